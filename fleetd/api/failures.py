"""Errors as OpenAI clients read them: ``{"error": {"message", "type", "param", "code", "hint"}}``."""

from __future__ import annotations

import logging
import math
import traceback
from http import HTTPStatus

import msgspec
from aiohttp import web

from fleetd.errors import BadRequest, FleetError, NotFound, Unauthorized

log = logging.getLogger(__name__)


class ErrorBody(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """``code`` is stable; ``hint`` says what to do and may be empty."""

    message: str
    kind: str
    param: str | None
    code: str
    hint: str = ""


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class HttpFailure(FleetError):
    """A refusal by the HTTP library itself (no such route, wrong method), given our shape."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        phrase = HTTPStatus(status).phrase
        self.code = phrase.lower().replace(" ", "_").replace("-", "_")  # type: ignore[misc]
        self.status = status  # type: ignore[misc]


def kind_of(error: FleetError) -> str:
    """OpenAI's ``type``: clients branch on ``code`` and the status, people read this."""
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, (BadRequest, NotFound)) or error.status in (404, 405):
        return "invalid_request_error"
    if error.status == HTTPStatus.FORBIDDEN:
        return "permission_error"
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def reply(error: FleetError) -> ErrorReply:
    """The body for an error."""
    body = ErrorBody(error.message, kind_of(error), error.param, error.code, error.hint)
    return ErrorReply(body)


def encode(error: FleetError) -> bytes:
    return msgspec.json.encode(reply(error))


def response(error: FleetError) -> web.Response:
    """The whole HTTP answer for an error."""
    answer = web.Response(status=error.status, body=encode(error), content_type="application/json")
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        answer.headers["WWW-Authenticate"] = 'Bearer realm="fleetd"'
    return answer


def unexpected(error: BaseException, request_id: str) -> FleetError:
    """Log a bug and turn it into an answer that gives nothing away.

    Only the exception's type and the frames are logged: its message may quote the prompt.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("http.internal_error request=%s type=%s\n%s", request_id, type(error).__name__, frames)
    return FleetError(
        f"An internal error stopped request {request_id}.",
        hint="The daemon's log has the details under this id.",
    )
