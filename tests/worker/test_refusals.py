"""Everything outside the allow-list is refused at start, by name, with the way out."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vtoken.errors import UnsupportedError
from worker.compat import check_config, check_kv_cache, check_layers
from worker.plugin import register

OURS = {
    "scheduler_cls": "worker.scheduler.VTokenScheduler",
    "worker_cls": "worker.cpu_worker.VTokenCPUWorker",
}
Config = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_config(tiny: Path) -> Config:
    register()

    def make(options: dict[str, Any] | None = None, **arguments: Any) -> Any:
        base = {"model": str(tiny), "dtype": "float32", "block_size": 32, "max_model_len": 512}
        ours = OURS | {"additional_config": {"vtoken": options or {}}}
        return EngineArgs(**(base | ours | arguments)).create_engine_config()

    return make


@pytest.fixture(scope="module")
def base_config(tiny: Path) -> Any:
    register()
    arguments = {"model": str(tiny), "dtype": "float32", "block_size": 32, "max_model_len": 512}
    return EngineArgs(**(arguments | OURS)).create_engine_config()


@pytest.fixture
def config(base_config: Any) -> Any:
    """A configuration of its own for the test to spoil."""
    return copy.deepcopy(base_config)


def test_the_base_configuration_is_accepted(make_config: Config) -> None:
    check_config(make_config({"policy": "random", "keep_ratio": 0.5}))


@pytest.mark.parametrize(
    ("part", "field", "value", "option"),
    [
        ("parallel_config", "worker_cls", "auto", "worker_cls"),
        ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel_size"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config", "enable_dbo", True, "enable_dbo"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode"),
        ("cache_config", "block_size", 48, "block_size"),
        ("cache_config", "cache_dtype", "fp8", "kv_cache_dtype"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("attention_config", "hisparse_config", object(), "hisparse_config"),
        ("scheduler_config", "scheduler_reserve_full_isl", False, "scheduler_reserve_full_isl"),
        ("scheduler_config", "enable_chunked_prefill", False, "enable_chunked_prefill"),
        ("model_config", "runner_type", "pooling", "runner"),
        (None, "speculative_config", object(), "speculative_config"),
        (None, "kv_transfer_config", object(), "kv_transfer_config"),
        (None, "ec_transfer_config", object(), "ec_transfer_config"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(
    config: Any, part: str | None, field: str, value: object, option: str
) -> None:
    object.__setattr__(getattr(config, part) if part else config, field, value)
    with pytest.raises(UnsupportedError, match=f"`{option}`.*: "):
        check_config(config)


@pytest.mark.parametrize(
    ("trait", "value", "reason"),
    [
        ("is_encoder_decoder", True, "encoder-decoder"),
        ("use_mla", True, "latent attention"),
        ("is_hybrid", True, "state-space"),
        ("rswa_window", 64, "sliding windows"),
        ("is_mm_prefix_lm", True, "prefix-LM"),
    ],
)
def test_a_model_with_another_attention_is_refused(
    config: Any, trait: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vars(config.model_config).pop(trait, None)  # a cached property
    monkeypatch.setattr(type(config.model_config), trait, value, raising=False)
    with pytest.raises(UnsupportedError, match=reason):
        check_config(config)


def test_another_device_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(UnsupportedError, match=r"`device`.*: use a CPU or an NVIDIA GPU"):
        check_config(config)


def test_the_other_model_runner_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    with pytest.raises(UnsupportedError, match=r"`VLLM_USE_V2_MODEL_RUNNER`.*V1 on the CPU"):
        check_config(config)


def test_another_vllm_version_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.compat.vllm_version", "0.33.0")
    with pytest.raises(UnsupportedError, match=r"0\.33\.0.*install 0\.32\.0"):
        check_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "h3o", "keep_ratio": 0.5}, "`policy`='h3o' is unknown; choose one of"),
        ({"policy": "random", "budget_tokens": 20}, "raise it to at least 36"),
        ({"policy": "random", "keep_ratio": 0.0}, "`keep_ratio`=0.0: .*greater than 0"),
        ({"policy": "random", "keep_ratio": 1.5}, "`keep_ratio`=1.5: .*less than or equal to 1"),
        ({"policy": "random"}, "set `budget_tokens` or `keep_ratio`"),
        ({"budget": 100}, "`budget` is not an option; known: .*budget_tokens"),
        ({"policy": "random", "keep_ratio": 0.5, "backend": "magic"}, "`backend`='magic'"),
        ({"keep_ratio": 0.5}, "no effect with policy keep_all"),
    ],
)
def test_a_wrong_vtoken_option_stops_the_start(
    make_config: Config, options: dict[str, Any], message: str
) -> None:
    # vLLM's configuration is a pydantic dataclass: it wraps the OptionError, text and all.
    with pytest.raises(ValueError, match=message):
        make_config(options)


def test_options_that_nothing_reads_are_refused(make_config: Config) -> None:
    with pytest.raises(UnsupportedError, match="`scheduler_cls`"):
        make_config(scheduler_cls=None)


def kv_cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def spec(kind: type = FullAttentionSpec, **fields: Any) -> Any:
    base = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return kind(**(base | fields))


@pytest.mark.parametrize(
    ("cache", "sizes", "message"),
    [
        (lambda: kv_cache(spec(), spec()), (32, 32), "2 KV cache groups"),
        (lambda: kv_cache(spec(sliding_window=64)), (32, 32), "sliding-window"),
        (lambda: kv_cache(spec(attention_chunk_size=64)), (32, 32), "chunked"),
        (lambda: kv_cache(spec(non_causal=True)), (32, 32), "non-causal"),
        (lambda: kv_cache(spec(SlidingWindowSpec, sliding_window=64)), (32, 32), "SlidingWindow"),
        (lambda: kv_cache(spec(MLAAttentionSpec)), (32, 32), "MLAAttentionSpec"),
        (lambda: kv_cache(spec()), (32, 16), "hash_block_size"),
    ],
)
def test_another_cache_layout_is_refused(
    cache: Callable[[], KVCacheConfig], sizes: tuple[int, int], message: str
) -> None:
    check_kv_cache(kv_cache(spec()), 32, 32)
    with pytest.raises(UnsupportedError, match=message):
        check_kv_cache(cache(), *sizes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 64, "layer0: sliding window 64"),
        ("alibi_slopes", torch.ones(2), "layer0: ALiBi"),
        ("kv_sharing_target_layer_name", "other", "layer0: shares its K/V"),
        ("attn_type", "encoder", "layer0: attention type encoder"),
        ("vllm_flash_attn_version", 2, "layer0: FlashAttention 2, not 3"),
    ],
)
def test_a_layer_that_could_tell_moved_tokens_is_refused(
    config: Any, field: str, value: object, message: str
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    with set_current_vllm_config(config):
        impl = CPUAttentionBackendImpl(2, 32, 1.0, 2, None, None, "auto")
    check_layers({"layer0": SimpleNamespace(impl=impl)})
    setattr(impl, field, value)
    with pytest.raises(UnsupportedError, match=message):
        check_layers({"layer0": SimpleNamespace(impl=impl)})
    with pytest.raises(UnsupportedError, match="attention backend"):
        check_layers({"layer0": SimpleNamespace(impl=object())})
    with pytest.raises(UnsupportedError, match="no attention layers"):
        check_layers({})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 16}, "`block_size` is not supported.*multiple of 32"),
        ({"additional_config": {"vtoken": {"policy": "h3o"}}}, "`policy`='h3o' is unknown"),
    ],
)
def test_a_real_start_is_refused(tiny: Path, arguments: dict[str, Any], message: str) -> None:
    from vllm import LLM

    base = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": 32}
    with pytest.raises((UnsupportedError, ValueError), match=message):
        LLM(model=str(tiny), **(base | OURS | arguments))
