# SPDX-License-Identifier: Apache-2.0
"""Errors of the front door in the shape that OpenAI clients parse."""

import math

from fastapi.responses import JSONResponse

TYPES = {
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def openai_error(status: int, message: str, *, retry_after_s: float | None = None) -> JSONResponse:
    """A response like vLLM's own errors; `status` is one of `TYPES`."""
    body = {"error": {"message": message, "type": TYPES[status], "param": None, "code": status}}
    headers = {} if retry_after_s is None else {"retry-after": str(math.ceil(retry_after_s))}
    return JSONResponse(body, status_code=status, headers=headers)
