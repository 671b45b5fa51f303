# SPDX-License-Identifier: Apache-2.0
"""What vToken runs on: an allow-list. Everything else is refused by name before it can be wrong.

Three moments: ``check_config`` when the engine's configuration is made (front end included),
``check_kv_cache`` in the scheduler, ``check_layers`` in each worker once the model is loaded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.version import __version__ as vllm_version

from vtoken.errors import OptionError, UnsupportedError
from vtoken.options import ReplicaOptions, parse_replica_options

SUPPORTED_VLLM = "0.32.0"
SCHEDULER = "worker.scheduler.VTokenScheduler"
CPU_WORKER = "worker.cpu_worker.VTokenCPUWorker"
GPU_WORKER = "worker.gpu_worker.VTokenGPUWorker"
FLASH_ATTENTION = 3  # what vLLM runs on Hopper GPUs
PLAIN_KV_DTYPES = ("auto", "float16", "bfloat16", "float32")


def worker_class() -> str:
    """The worker that runs on this platform."""
    return CPU_WORKER if current_platform.is_cpu() else GPU_WORKER


def is_vtoken(config: VllmConfig) -> bool:
    """Whether this engine is configured to run vToken's scheduler."""
    return _qualified_name(config.scheduler_config.scheduler_cls) == SCHEDULER


def replica_options(config: VllmConfig) -> ReplicaOptions:
    """The replica's options from ``additional_config["vtoken"]``.

    Raises:
        OptionError: an option is unknown or out of range.
    """
    additional = config.additional_config
    if not isinstance(additional, Mapping):
        raise OptionError("`additional_config` must be a mapping with a `vtoken` entry")
    return parse_replica_options(additional.get("vtoken"))


def check_config(config: VllmConfig) -> None:
    """Refuse what is not proven to work with token eviction.

    Raises:
        UnsupportedError: names the option and the way out.
        OptionError: a vToken option is wrong.
    """
    if not is_vtoken(config):
        if isinstance(config.additional_config, Mapping) and "vtoken" in config.additional_config:
            raise UnsupportedError(
                f"`additional_config` has vtoken options that nothing would read: set "
                f"`scheduler_cls` to {SCHEDULER}"
            )
        return
    replica_options(config)
    if vllm_version.split("+")[0] != SUPPORTED_VLLM:
        raise UnsupportedError(f"vLLM {vllm_version} is not supported: install {SUPPORTED_VLLM}")
    for option, wrong, way_out in _config_rules(config):
        if wrong:
            raise UnsupportedError(f"`{option}` is not supported with token eviction: {way_out}")


def _config_rules(config: VllmConfig) -> Iterable[tuple[str, bool, str]]:
    """(option, whether its value is refused, the way out), every rule of the allow-list."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    scheduler, attention = config.scheduler_config, config.attention_config
    block_size = cache.block_size or 0
    on_cpu, on_cuda = current_platform.is_cpu(), current_platform.is_cuda()
    yield "device", not on_cpu and not on_cuda, "use a CPU or an NVIDIA GPU"
    yield "worker_cls", parallel.worker_cls != worker_class(), f"set it to {worker_class()}"
    yield "block_size", on_cpu and block_size % 32 != 0, "use a multiple of 32 on the CPU"
    yield "kv_cache_dtype", cache.cache_dtype not in PLAIN_KV_DTYPES, "use auto"
    yield "speculative_config", config.speculative_config is not None, "remove it"
    yield "kv_transfer_config", config.kv_transfer_config is not None, "remove the KV connector"
    yield "ec_transfer_config", config.ec_transfer_config is not None, "remove it"
    yield "tensor_parallel_size", parallel.tensor_parallel_size > 1, "use 1"
    yield "pipeline_parallel_size", parallel.pipeline_parallel_size > 1, "use 1"
    yield "data_parallel_size", parallel.data_parallel_size > 1, "run more replicas"
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    yield "decode_context_parallel_size", context > 1, "use 1 for decode and prefill"
    yield "enable_dbo", parallel.enable_dbo, "turn dual-batch overlap off"
    yield "hisparse_config", attention.hisparse_config is not None, "remove it"
    yield "runner", model.runner_type != "generate", "serve a generative model"
    yield "model", model.is_encoder_decoder, "encoder-decoder models keep cross-attention K/V"
    yield "model", model.use_mla, "multi-head latent attention has another cache layout"
    yield "model", model.is_hybrid, "state-space layers have no tokens to evict"
    yield "model", model.rswa_window is not None, "reference sliding windows need positions"
    yield "model", model.is_mm_prefix_lm, "prefix-LM ranges are absolute positions"
    yield "kv_sharing_fast_prefill", cache.kv_sharing_fast_prefill, "turn it off"
    yield "enable_sleep_mode", model.enable_sleep_mode, "leave it off: rows would not survive"
    reserve = scheduler.scheduler_reserve_full_isl
    yield "scheduler_reserve_full_isl", not reserve, "leave it on: admission hangs on it"
    yield "enable_chunked_prefill", not scheduler.enable_chunked_prefill, "leave it on"
    # Last: other options of this list choose the V2 runner themselves.
    wrong_runner = config.use_v2_model_runner == on_cpu
    yield "VLLM_USE_V2_MODEL_RUNNER", wrong_runner, "unset it: V1 on the CPU, V2 on a GPU"


def check_kv_cache(kv_cache_config: KVCacheConfig, block_size: int, hash_block_size: int) -> None:
    """Refuse cache layouts with anything but one group of plain full attention.

    Raises:
        UnsupportedError: names what the model has instead.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(f"the model has {len(groups)} KV cache groups; one is supported")
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedError(f"{type(spec).__name__}: only plain full attention is supported")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise UnsupportedError("sliding-window and chunked attention are not supported")
    if spec.non_causal:
        raise UnsupportedError("non-causal attention is not supported")
    if not spec.block_size == block_size == hash_block_size:
        raise UnsupportedError(
            f"block sizes differ (cache {spec.block_size}, scheduler {block_size}, hashes "
            f"{hash_block_size}): leave `hash_block_size` at the block size"
        )


def check_layers(layers: Mapping[str, Any]) -> None:
    """Refuse attention layers whose kernel could tell that tokens have moved.

    Args:
        layers: vLLM's attention layers by name, after the model is loaded.

    Raises:
        UnsupportedError: names the layer and what it has.
    """
    supported: Any = _attention_class()
    if not layers:
        raise UnsupportedError("the model has no attention layers")
    for name, layer in layers.items():
        impl = layer.impl
        if type(impl) is not supported:
            raise UnsupportedError(f"{name}: attention backend {type(impl).__name__}")
        version = getattr(impl, "vllm_flash_attn_version", FLASH_ATTENTION)  # the CPU's has none
        if version != FLASH_ATTENTION:
            raise UnsupportedError(f"{name}: FlashAttention {version}, not {FLASH_ATTENTION}")
        if impl.sliding_window not in (None, -1, (-1, -1)):
            raise UnsupportedError(f"{name}: sliding window {impl.sliding_window}")
        if impl.alibi_slopes is not None:
            raise UnsupportedError(f"{name}: ALiBi biases by distance in the row")
        if impl.kv_sharing_target_layer_name is not None:
            raise UnsupportedError(f"{name}: shares its K/V with another layer")
        if impl.attn_type != "decoder":
            raise UnsupportedError(f"{name}: attention type {impl.attn_type}")


def _attention_class() -> type:
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        return CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    return FlashAttentionImpl


def _qualified_name(value: object) -> str | None:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, str) else None
