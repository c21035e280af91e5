"""The order of a Responses stream, as OpenAI's clients rely on it; a second account of it, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
# Per type of item: its deltas, the event with the whole of them, and where the text is there and in the item.
WRITTEN = {
    "message": ("response.output_text.delta", "response.output_text.done", "text"),
    "reasoning": ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
    "function_call": (
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "arguments",
    ),
    "custom_tool_call": (
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "input",
    ),
}
WITH_PARTS = {"message", "reasoning"}


@dataclass
class ResponseOrder:
    """Takes events one by one, raises AssertionError at the first that is out of order, and keeps the answer.

    ``created`` → ``in_progress`` → (``item.added`` → [``part.added``] → deltas → ``done`` → [``part.done``] →
    ``item.done``)* → an end; ``in_progress`` anywhere behind the first, and ``failed`` instead of what is
    missing. An item that is incomplete is the last one, of a response that is.
    """

    state: str = "new"
    items: list[dict[str, Any]] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)
    progressed: int = 0
    _number: int = -1
    _open: dict[str, Any] = field(default_factory=dict)
    _pieces: list[str] = field(default_factory=list)

    @property
    def _incomplete(self) -> bool:
        return any(item["status"] == "incomplete" for item in self.items)

    @property
    def ended(self) -> bool:
        return self.state in ENDS.values()

    def take(self, name: str, event: Mapping[str, Any]) -> None:
        assert event["type"] == name
        assert not self.ended, f"{name} after the end"
        self._number += 1
        assert event["sequence_number"] == self._number
        if "response" in event:
            self._whole(name, event["response"])
            return
        assert event["output_index"] == len(self.items)
        if name == "response.output_item.added":
            assert self.state == "between", f"{name} while {self.state}"
            assert not self._incomplete, "an item after one that is incomplete"
            self._open, self._pieces = dict(event["item"]), []
            assert self._open["status"] == "in_progress"
            self.state = "part" if self._open["type"] in WITH_PARTS else "text"
        elif name == "response.output_item.done":
            assert self.state == "item done", f"{name} while {self.state}"
            self._close(event["item"])
        else:
            assert event["item_id"] == self._open["id"]
            self._inside(name, event)

    def _whole(self, name: str, response: Mapping[str, Any]) -> None:
        if self.state == "new":
            assert name == "response.created", f"{name} comes first"
            self.state = "created"
        elif name == "response.in_progress":
            self.progressed += 1
            self.state = "between" if self.state == "created" else self.state
        else:
            assert name == "response.failed" or self.state == "between", f"{name} while {self.state}"
            self.state, self.response = ENDS[name], dict(response)
        assert response["status"] == (ENDS.get(name) or "in_progress")
        assert not self._incomplete or name not in ENDS or name == "response.incomplete"
        assert self.response or response["output"] == []
        if name != "response.failed" and self.ended:
            assert response["output"] == self.items

    def _inside(self, name: str, event: Mapping[str, Any]) -> None:
        delta, done, key = WRITTEN[self._open["type"]]
        match name:
            case "response.content_part.added":
                assert self.state == "part"
                assert event["part"]["text"] == ""
                self.state = "text"
            case "response.content_part.done":
                assert self.state == "part done"
                assert event["part"]["text"] == "".join(self._pieces)
                self.state = "item done"
            case _ if name == delta:
                assert self.state == "text", f"{name} while {self.state}"
                self._pieces.append(event["delta"])
            case _ if name == done:
                assert self.state == "text", f"{name} while {self.state}"
                assert event[key] == "".join(self._pieces)
                self.state = "part done" if self._open["type"] in WITH_PARTS else "item done"
            case _:
                raise AssertionError(f"unknown event {name}")

    def _close(self, item: Mapping[str, Any]) -> None:
        assert {name: item[name] for name in ("id", "type")} == {
            name: self._open[name] for name in ("id", "type")
        }
        assert item["status"] in ("completed", "incomplete")
        holder = item["content"][0] if item["type"] in WITH_PARTS else item
        assert holder[WRITTEN[item["type"]][2]] == "".join(self._pieces)
        self.items.append(dict(item))
        self.state = "between"


def checked(events: Iterable[tuple[str, Mapping[str, Any]]]) -> ResponseOrder:
    """A whole stream."""
    order = ResponseOrder()
    for name, event in events:
        order.take(name, event)
    assert order.ended, f"the stream stopped while {order.state}"
    return order
