"""OpenAI's dialect: ``{"error": {...}}``, server-sent events without names, ``[DONE]`` at the end.

The Responses API, fleetd's own endpoints and addresses that belong to no dialect answer with the same errors.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd.api.http.dialect import Dialect, ServerSentEvents
from fleetd.errors import BadRequest, FleetError, NotFound, Unauthorized


class ErrorBody(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """An error, as OpenAI's libraries read it."""

    message: Annotated[
        str,
        Meta(description="A sentence that ends in the hint: OpenAI's libraries show people nothing else."),
    ]
    kind: Annotated[
        str, Meta(description="A family of errors, for people: programs branch on `code` and the status.")
    ]
    param: Annotated[str | None, Meta(description="The field of the request that is wrong, if there is one.")]
    code: Annotated[str, Meta(description="Stable between versions.")]
    hint: Annotated[str, Meta(description="What to do; may be empty.")] = ""


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def _kind_of(error: FleetError, status: int) -> str:
    """OpenAI's ``type`` of an error."""
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, (BadRequest, NotFound)) or status in (404, 405):
        return "invalid_request_error"
    if status == HTTPStatus.FORBIDDEN:
        return "permission_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


class OpenAIDialect(Dialect):
    """Args:
    end: the end marker of a stream; "" where the last object says that it is the last.
    """

    error_type = ErrorReply

    def __init__(self, end: str = "[DONE]") -> None:
        self._end = end

    def error(self, error: FleetError) -> ErrorReply:
        kind = _kind_of(error, self.status(error))
        return ErrorReply(ErrorBody(str(error), kind, error.param, error.code, error.hint))

    def stream(self) -> ServerSentEvents:
        return ServerSentEvents(self.error, end=self._end)


OPENAI = OpenAIDialect()
# fleetctl's streams: the same errors, and a last object that says "done".
CONTROL = OpenAIDialect(end="")
