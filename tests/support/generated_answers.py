"""Events of one answer in orders that an engine may send, for the tests of every dialect."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import strategies as st

from fleetd.engine import protocol as p
from fleetd.requests.job import LOCAL

TEXTS = st.text(max_size=12)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6), max_size=3).map(json.dumps),
    st.sampled_from(["", "not JSON", "[1]", '"text"', '{"cut": ', "{}", '{"input": "a\\nb"}']),
)
# Tools that generated answers call.
TOOL_NAMES = ("look", "patch", "fleet__send")


def deltas() -> st.SearchStrategy[p.Event]:
    return st.builds(
        lambda text, channel: p.Delta("r", text, channel), TEXTS, st.sampled_from(["content", "reasoning"])
    )


@st.composite
def _beginning(draw: st.DrawFn, arguments: str) -> list[str]:
    """What is told of a call before it is whole, in pieces; nothing of one whose arguments are no object."""
    if not arguments.endswith("}"):
        return []
    cuts = sorted(draw(st.lists(st.integers(1, len(arguments)), max_size=4, unique=True)))
    return [arguments[begin:end] for begin, end in itertools.pairwise([0, *cuts])]


@st.composite
def answers(draw: st.DrawFn) -> list[Any]:
    body: list[Any] = draw(st.lists(st.one_of(deltas(), ARGUMENTS), max_size=8))
    calls, events = 0, list[Any]([LOCAL])
    if draw(st.booleans()):
        events += [p.Loading("reading", 1, 2)]
    total = draw(st.integers(1, 99))
    events += [p.Accepted("r", total), p.Prefill("r", 0, total, cached=draw(st.integers(0, total)))]
    for item in body:
        if isinstance(item, str):
            name = draw(st.sampled_from(TOOL_NAMES))
            events += [
                p.ToolCallPiece("r", calls, f"call_{calls}", name, text) for text in draw(_beginning(item))
            ]
            events.append(p.ToolCall("r", calls, f"call_{calls}", name, item))
            calls += 1
        else:
            events.append(item)
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    usage = p.Usage(total, draw(st.integers(0, total)), draw(st.integers(0, 50)))
    stop = draw(st.none() | st.just("END")) if reason == "stop" else None
    return [*events, p.Finished("r", reason, usage, stop=stop)]


SAMPLE_ANSWER: list[Any] = [
    LOCAL,
    p.Accepted("r", 5),
    p.Prefill("r", 0, 5, cached=2),
    p.Delta("r", "I wonder…", "reasoning"),
    p.Delta("r", "aé€😀z\n\nevent: ping\ndata: {}"),
    p.ToolCall("r", 0, "call_0", "look", '{"path": "ü"}'),
    p.ToolCall("r", 1, "call_1", "look", '{"path": "b"}'),
    p.Finished("r", "tool_calls", p.Usage(5, 2, 9, 3)),
]
