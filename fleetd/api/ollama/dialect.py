"""Ollama's dialect: ``{"error": "..."}``, and streams of one JSON object per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetd.api.http.dialect import Dialect, StreamFormat
from fleetd.errors import FleetError


class OllamaError(msgspec.Struct, frozen=True):
    """A whole answer, and the last line of a stream that failed. ``error`` ends in what to do; ``code`` is
    fleetd's own, and stable."""

    error: str
    code: str


class NdJson(StreamFormat):
    """One JSON object per line. There are no comments, and the last object says that it is the last."""

    content_type = "application/x-ndjson"

    def frame(self, item: object) -> bytes:
        # JSON has no raw newline, so one line holds any object.
        return msgspec.json.encode(item) + b"\n"

    def error(self, error: FleetError) -> bytes:
        return self.frame(OLLAMA.error(error))

    def schema(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"anyOf": list(items)}


class OllamaDialect(Dialect):
    error_type = OllamaError
    addresses = "/api/"

    def error(self, error: FleetError) -> OllamaError:
        return OllamaError(str(error), error.code)

    def asked_by(self, headers: Mapping[str, str]) -> bool:
        return headers.get("User-Agent", "").startswith("ollama")

    def stream(self) -> NdJson:
        return NdJson()


OLLAMA = OllamaDialect()
