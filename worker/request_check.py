# SPDX-License-Identifier: Apache-2.0
"""Refuses wrong eviction options of a request before its response starts.

The plugin validates every request where it enters the engine. For a response that streams that is
after the status line, so the client would get 200 and then an error event. These hooks ask the
same question first.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError

from vtoken.errors import OptionError
from vtoken.options import ReplicaOptions, parse_request_options


def install_request_check(state: Any, options: ReplicaOptions) -> None:
    """Wrap the chat and completion serving objects in `state`, an app's vLLM state."""
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    if chat is not None:
        chat.create_chat_completion = _checked(chat.create_chat_completion, options)
    if completion is not None:
        completion.create_completion = _checked(completion.create_completion, options)


def _checked(original: Callable[..., Any], options: ReplicaOptions) -> Callable[..., Any]:
    @wraps(original)
    async def create(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            parse_request_options(request.vllm_xargs, options)
        except OptionError as error:
            # vLLM's app answers 400 with this message.
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
        return await original(request, *args, **kwargs)

    return create
