# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin (entry point group ``vllm.general_plugins``): loaded in every process.

Re-entrant, and without effect on an engine whose scheduler is not vToken's.
"""

from functools import wraps
from typing import Any

from vllm.config import VllmConfig


def register() -> None:
    """Install the hooks once per process."""
    _wrap_platform()
    _wrap_input_processor()
    _extend_engine_core()


def _wrap_platform() -> None:
    """vLLM's CPU platform turns async scheduling off after it has read the configuration; put
    the requested value back, for vToken only. The platform check is also the first moment at
    which a configuration can be refused, in the front end as well."""
    from vllm.platforms import current_platform

    from worker.compat import check_config, is_vtoken

    platform = type(current_platform)
    original = platform.check_and_update_config
    if getattr(original, "wrapped_by_vtoken", False):
        return

    @wraps(original)
    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        requested = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        if is_vtoken(vllm_config) and current_platform.is_cpu():
            vllm_config.scheduler_config.async_scheduling = requested
        check_config(vllm_config)

    check_and_update_config.wrapped_by_vtoken = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


def _wrap_input_processor() -> None:
    """Validate per-request options in the front-end process: an exception in the engine's
    scheduler would take the whole replica down."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from vtoken.errors import OptionError
    from vtoken.options import parse_request_options
    from worker.compat import is_vtoken, replica_options

    original = InputProcessor._validate_params
    if getattr(original, "wrapped_by_vtoken", False):
        return

    @wraps(original)
    def _validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
        result = original(self, params, supported_tasks)
        if is_vtoken(self.vllm_config):
            try:
                options = replica_options(self.vllm_config)
                parse_request_options(getattr(params, "extra_args", None), options)
            except OptionError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
        return result

    _validate_params.wrapped_by_vtoken = True  # type: ignore[attr-defined]
    InputProcessor._validate_params = _validate_params


def _extend_engine_core() -> None:
    """Utility calls that reach the scheduler from the front end. Adds, replaces nothing."""
    from vllm.v1.engine.core import EngineCore

    def vtoken_status(self: Any) -> dict[str, Any]:
        status: dict[str, Any] = self.scheduler.vtoken_status()
        return status

    def vtoken_reclaim_now(self: Any) -> None:
        self.scheduler.reclaimer.reclaim_now()

    EngineCore.vtoken_status = vtoken_status
    EngineCore.vtoken_reclaim_now = vtoken_reclaim_now
