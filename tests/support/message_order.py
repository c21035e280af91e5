"""The order of a Messages stream, as Anthropic's clients rely on it; a second account of it, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}

FULL = {"max_tokens", "model_context_window_exceeded"}


@dataclass
class MessageOrder:
    """Takes events one by one, raises AssertionError at the first that is out of order, and keeps the answer.

    ``start`` → (``block start`` → deltas → ``block stop``)* → ``message_delta`` → ``message_stop``, a ping
    anywhere behind the start, and an error instead of what is missing. The input of the last call may be cut
    where the answer was full.
    """

    state: str = "new"
    blocks: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    # What of a call's input was written when the answer was full.
    cut: str | None = None

    def take(self, name: str, event: Mapping[str, Any]) -> None:
        assert event["type"] == name
        assert self.state not in ("ended", "failed"), f"{name} after the end"
        if self.state == "new":
            assert name == "message_start", f"{name} comes first"
            assert event["message"]["content"] == []
            assert event["message"]["stop_reason"] is None
            self.usage, self.state = dict(event["message"]["usage"]), "between"
            return
        match name:
            case "ping":
                pass
            case "error":
                self.error, self.state = event["error"], "failed"
            case "content_block_start":
                self._expect("between", name)
                assert self.cut is None, "a block after a call that was cut"
                assert event["index"] == len(self.blocks)
                self.blocks.append({**event["content_block"], "pieces": []})
                self.state = "block"
            case "content_block_delta":
                self._expect("block", name)
                assert event["index"] == len(self.blocks) - 1
                self._add(event["delta"])
            case "content_block_stop":
                self._expect("block", name)
                assert event["index"] == len(self.blocks) - 1
                self._close(self.blocks[-1])
                self.state = "between"
            case "message_delta":
                self._expect("between", name)
                assert event["delta"]["stop_reason"]
                assert self.cut is None or event["delta"]["stop_reason"] in FULL
                self.stop, self.state = event["delta"], "stopped"
                self.usage |= event["usage"]
            case "message_stop":
                self._expect("stopped", name)
                self.state = "ended"
            case _:
                raise AssertionError(f"unknown event {name}")

    def _expect(self, state: str, name: str) -> None:
        assert self.state == state, f"{name} while {self.state}"

    def _add(self, delta: Mapping[str, Any]) -> None:
        block = self.blocks[-1]
        assert delta["type"] in DELTAS[block["type"]]
        (value,) = [value for key, value in delta.items() if key != "type"]
        if delta["type"] == "signature_delta":
            block["signature"] += value
        else:
            block["pieces"].append(value)

    def _close(self, block: dict[str, Any]) -> None:
        text = "".join(block.pop("pieces"))
        match block["type"]:
            case "tool_use":
                try:
                    block["input"] = json.loads(text)
                except ValueError:
                    self.cut = text
            case "thinking":
                assert block["signature"]
                block["thinking"] = text
            case "text":
                block["text"] = text


def checked(events: Iterable[tuple[str, Mapping[str, Any]]]) -> MessageOrder:
    """A whole stream."""
    order = MessageOrder()
    for name, event in events:
        order.take(name, event)
    assert order.state in ("ended", "failed"), f"the stream stopped while {order.state}"
    return order
