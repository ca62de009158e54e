"""HTTP status and OpenAI's error shape, by the type of the exception."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .. import errors as e
from .responses import JSON

__all__ = ["error_body", "error_response", "lean_shape", "status_of"]

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    # the first that fits; HTTP status, OpenAI's type, OpenAI's code
    (e.UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (e.PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (e.LogitsError, 500, "server_error", "model_error"),
    (e.DeadlineError, 504, "server_error", "deadline_exceeded"),
    (e.RequestError, 400, "invalid_request_error", None),
    (e.OutOfSequencesError, 400, "invalid_request_error", None),
    (e.ConfigError, 400, "invalid_request_error", None),
    (e.QueueFullError, 429, "rate_limit_error", "queue_full"),
    (e.SlowReaderError, 408, "invalid_request_error", "slow_reader"),
    (e.CapacityError, 503, "server_error", "overloaded"),
    (e.UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (e.WorkerDiedError, 500, "server_error", "worker_died"),
    (e.WorkerError, 503, "server_error", "worker_unavailable"),
    (e.ClosedError, 503, "server_error", "shutting_down"),
    (e.FileError, 503, "server_error", "model_unavailable"),
    (e.NativeError, 503, "server_error", "model_unavailable"),
)
_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    return _facts(error)[0]


def _facts(error: Exception) -> tuple[int, str, str | None]:
    if isinstance(error, HTTPException):
        kind = _BY_STATUS.get(error.status_code)
        return (
            error.status_code,
            kind or ("invalid_request_error" if error.status_code < 500 else "server_error"),
            None,
        )
    for kind_of_error, status, kind, code in _STATUS:
        if isinstance(error, kind_of_error):
            return status, kind, code
    return 500, "server_error", None


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's shape. Of what nobody foresaw, only that it happened."""
    status, kind, code = _facts(error)
    if isinstance(error, HTTPException):
        message = str(error.detail)
    elif isinstance(error, e.LlamaherdError):
        message = str(error)
    else:
        message = "something went wrong in the server; its log says more"
    param = error.name if isinstance(error, (e.InvalidParameterError, e.UnknownParameterError)) else None
    if isinstance(error, e.UnknownModelError):
        param = "model"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


def lean_shape(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """An error for the Lean clients, which look for their own fields first."""
    message = body["error"]["message"]
    if path == "/generate":
        return {"error": message, "outputs": []}
    if path == "/encode":
        return {"error": message, "outputs": []}
    return {"error": message, "suggestions": []}


def error_response(request: Request | None, error: Exception) -> Response:
    """The response to an error; for the paths of the Lean protocols in their shapes."""
    status, _, _ = _facts(error)
    if status >= 500 and not isinstance(error, (HTTPException, e.LlamaherdError)):
        log.error("unforeseen error", exc_info=error)
    body = error_body(error)
    if request is not None and request.method == "POST" and request.url.path in ("/", "/generate", "/encode"):
        body = lean_shape(request.url.path, body)
    headers = {}
    retry_after = getattr(error, "retry_after", None)
    if status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(retry_after or 1)))
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSON(body, status_code=status, headers=headers)
