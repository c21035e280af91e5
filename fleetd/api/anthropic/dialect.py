"""Anthropic's dialect: ``{"type": "error", "error": {...}}``, and events that carry their names."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import ClassVar

import msgspec

from fleetd.api.http.dialect import BUSY, Dialect, ServerSentEvents, tag_of
from fleetd.errors import FleetError

# Anthropic's own status for "busy, try again".
_OVERLOADED = 529


class AnthropicErrorBody(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """Its ``message`` ends in what to do. ``code`` is fleetd's own, and stable."""

    kind: str
    message: str
    code: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """A whole answer, and the last event of a stream that failed."""

    error: AnthropicErrorBody


class AnthropicDialect(Dialect):
    error_type = AnthropicError
    addresses = "/v1/messages"

    _kinds: ClassVar[Mapping[int, str]] = {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.FORBIDDEN: "permission_error",
        HTTPStatus.NOT_FOUND: "not_found_error",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
        HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
        _OVERLOADED: "overloaded_error",
    }

    def error(self, error: FleetError) -> AnthropicError:
        status = self.status(error)
        below = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        return AnthropicError(AnthropicErrorBody(self._kinds.get(status, below), str(error), error.code))

    def status(self, error: FleetError) -> int:
        return _OVERLOADED if isinstance(error, BUSY) else error.status

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {"request-id": request_id, **super().headers(request_id)}

    def asked_by(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def stream(self) -> ServerSentEvents:
        return ServerSentEvents(self.error, event=tag_of)


ANTHROPIC = AnthropicDialect()
