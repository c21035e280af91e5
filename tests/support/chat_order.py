"""The order of a stream of /v1/chat/completions, as OpenAI's clients rely on it; for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ChoiceOrder:
    """One choice: the role → deltas → an empty delta with the finish reason. The arguments of the last call
    may be cut where the reason is the length."""

    state: str = "new"
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""

    def take(self, choice: Mapping[str, Any]) -> None:
        delta = choice["delta"]
        if self.state == "new":
            assert delta == {"role": "assistant", "content": ""}
            assert choice["finish_reason"] is None
            self.state = "open"
            return
        assert self.state == "open", f"a delta after the choice {self.state}"
        if choice["finish_reason"] is not None:
            assert delta == {}
            self.state, self.reason = "ended", choice["finish_reason"]
            return
        (kind,) = delta
        assert delta[kind], "a delta that says nothing"
        if kind == "content":
            self.content += delta[kind]
        elif kind == "reasoning_content":
            self.reasoning += delta[kind]
        else:
            assert kind == "tool_calls"
            (call,) = delta[kind]
            self._call(call)

    def _call(self, call: Mapping[str, Any]) -> None:
        """First the id and the name, with no arguments; then arguments of the call that was named last."""
        if "id" in call:
            assert call["index"] == len(self.calls)
            assert call["type"] == "function"
            function = dict(call["function"])
            assert function["arguments"] == ""
            self.calls.append({"id": call["id"], "type": "function", "function": function})
        else:
            assert call["index"] == len(self.calls) - 1, "arguments of a call that is not open"
            assert set(call["function"]) == {"arguments"}
            assert call["function"]["arguments"]
            self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]


@dataclass
class ChatOrder:
    """Takes chunks one by one; raises AssertionError at the first that is out of order.

    Chunks of any choice → one chunk with the usage and no choices, if it was asked for → [DONE]; an error
    instead of what is missing.
    """

    state: str = "open"
    choices: dict[int, ChoiceOrder] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] = field(default_factory=dict)
    ids: set[tuple[str, int, str]] = field(default_factory=set)

    def take(self, data: str) -> None:
        assert self.state == "open", f"a chunk after the stream {self.state}"
        if data == "[DONE]":
            assert all(choice.state == "ended" for choice in self.choices.values())
            self.state = "ended"
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error, self.state = chunk["error"], "failed"
            return
        assert chunk["object"] == "chat.completion.chunk"
        self.ids.add((chunk["id"], chunk["created"], chunk["model"]))
        assert len(self.ids) == 1
        assert self.usage is None, "a chunk after the usage"
        if not chunk["choices"]:
            self.usage = chunk["usage"]
            return
        assert chunk.get("usage") is None
        for choice in chunk["choices"]:
            self.choices.setdefault(choice["index"], ChoiceOrder()).take(choice)


def read_chunks(pieces: Iterable[str]) -> ChatOrder:
    """The data of a stream's events."""
    order = ChatOrder()
    for data in pieces:
        order.take(data)
    assert order.state in ("ended", "failed"), f"the stream stopped while {order.state}"
    return order
