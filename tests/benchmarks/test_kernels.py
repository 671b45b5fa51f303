# SPDX-License-Identifier: Apache-2.0
"""What is made of a trace."""

from typing import Any

from benchmarks.kernels import busy_us, idle_us, kind
from benchmarks.profile_step import overlap, share_of_copies

# Names as torch's profiler gave them on an H200.
FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
NAMES = {
    FLASH: "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<": "attention",
    "void flash::prepare_varlen_num_blocks_kernel<1, false>(": "attention",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16": "small kernels",
    "nvjet_sm90_tst_128x16_64x11_2x1_v_bz_splitK_TNT": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int": "matrix products",
    "Memcpy HtoD (Pinned -> Device)": "transfers",
    "_copy_tokens": "copy of plans",
    "triton_red_fused_fused_add_rms_norm_2": "small kernels",
}


def kernel(name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
    return {"name": name, "start_us": start, "length_us": length, "stream": stream}


def test_kernels_are_known_by_their_names() -> None:
    assert {name: kind(name) for name in NAMES} == NAMES


def test_idle_time_is_when_no_stream_does_anything() -> None:
    trace = [
        kernel("nvjet_a", 0, 10),
        kernel("_copy_tokens", 5, 25, stream=9),  # until 30
        kernel(FLASH, 12, 8),
        kernel("nvjet_b", 34, 1),
        kernel("nvjet_c", 36, 1),
    ]
    assert busy_us(trace) == {"matrix products": 12, "copy of plans": 25, "attention": 8}
    assert idle_us(trace) == {
        "copy of plans, matrix products": 4,
        "matrix products, matrix products": 1,
    }


def test_a_copy_overlaps_with_what_other_streams_do_meanwhile() -> None:
    copy = kernel("_copy_tokens", 100, 40, stream=9)
    others = [kernel("nvjet_a", 90, 20), kernel("nvjet_b", 105, 10), kernel("nvjet_c", 130, 90)]
    assert overlap([copy, *others]) == (15 + 10) / 40
    assert overlap([copy]) == 0


def test_the_share_of_copies_is_of_the_time_from_the_first_start_to_the_last_end() -> None:
    copies = [kernel("_copy_tokens", 10, 4), kernel("_copy_tokens", 20, 1)]
    assert share_of_copies([kernel("nvjet_a", 0, 50), *copies, kernel("nvjet_b", 5, 10)]) == 5 / 50
