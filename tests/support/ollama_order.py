"""The order of a stream of /api/chat or /api/generate, as Ollama's clients rely on it; for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIGURES = {
    "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
    "eval_count", "eval_duration",
}  # fmt: skip


@dataclass
class OllamaOrder:
    """Takes objects one by one; raises AssertionError at the first that is out of order.

    Pieces with ``done`` false → one object with ``done`` true and the figures; an error instead of what is
    missing.
    """

    state: str = "open"
    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)

    def take(self, item: Mapping[str, Any]) -> None:
        assert self.state == "open", f"an object after the stream {self.state}"
        if "error" in item:
            self.error, self.state = dict(item), "failed"
            return
        assert item["model"]
        assert item["created_at"].endswith("Z")
        self._add(item)
        if item["done"]:
            self.end = {name: item[name] for name in FIGURES if name in item}
            assert self.end["done_reason"]
            self.state = "ended"
        else:
            assert not FIGURES & item.keys()

    def _add(self, item: Mapping[str, Any]) -> None:
        if "message" in item:
            message = item["message"]
            assert message["role"] == "assistant"
            self.text += message["content"]
        else:
            message = item
            self.text += item["response"]
        self.thinking += message.get("thinking", "")
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], dict)
            assert call["function"]["index"] == len(self.calls)
            self.calls.append(call)


def read_lines(pieces: Iterable[bytes]) -> OllamaOrder:
    """A whole stream, cut into any pieces."""
    order, rest = OllamaOrder(), b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            order.take(json.loads(line))
    assert rest == b"", "the last line does not end"
    assert order.state in ("ended", "failed"), f"the stream stopped while {order.state}"
    return order
