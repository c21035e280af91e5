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


@dataclass
class MessageOrder:
    """Takes events one by one, raises AssertionError at the first that is out of order, and keeps the answer.

    ``start`` → (``block start`` → deltas → ``block stop``)* → ``message_delta`` → ``message_stop``, a ping
    anywhere behind the start, and an error instead of what is missing.
    """

    state: str = "new"
    blocks: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)

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
                block["input"] = json.loads(text)
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
