"""Events of one answer in orders that an engine may send, for the tests of every dialect."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from hypothesis import strategies as st

from fleetd.engine import protocol as p
from fleetd.requests.job import LOCAL

# Each dialect has to carry all of them: what ends lines and events, quotes, escapes, several bytes.
_CHARACTERS = "ab :{}[]\"'\\/\n\r\t\0\x1b\x7f\x85\xadäß€漢\u2028\u2029\ufeff\uffff😀🏳"
_WORDS = ("data: ", "event: ping\n\n", "[DONE]", "<tool_call>", ": ", "\n\n")
_ARGUMENTS = ("", "not JSON", "[1]", '"text"', '{"cut": ', "{}", '{"input": "a\\nb"}')
# Tools that generated answers call.
TOOL_NAMES = ("look", "patch", "fleet__send")


def _text(rng: random.Random) -> str:
    pieces = rng.choices((rng.choice(_WORDS), *_CHARACTERS), k=rng.randint(0, 12))
    return "".join(pieces)


def _arguments(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_ARGUMENTS)
    values = (rng.randint(-(2**63), 2**63 - 1), _text(rng), None, True, 0.5, [_text(rng)])
    return json.dumps({_text(rng): rng.choice(values) for _ in range(rng.randint(0, 3))})


def _beginning(rng: random.Random, arguments: str) -> list[str]:
    """What is told of a call before it is whole, in pieces; nothing of one whose arguments are no object."""
    if not arguments.endswith("}"):
        return []
    cuts = sorted({rng.randint(1, len(arguments)) for _ in range(rng.randint(0, 4))})
    return [arguments[begin:end] for begin, end in itertools.pairwise([0, *cuts])]


def _cut_call(rng: random.Random, index: int) -> list[Any]:
    """A call of which the last is never told."""
    name, arguments = rng.choice(TOOL_NAMES), json.dumps({"input": _text(rng), "path": _text(rng)})
    written = arguments[: rng.randint(1, len(arguments) - 1)]
    cuts = sorted({rng.randint(1, len(written)) for _ in range(3)} | {len(written)})
    pieces = [written[begin:end] for begin, end in itertools.pairwise([0, *cuts])]
    return [p.ToolCallPiece("r", index, f"call_{index}", name, piece) for piece in pieces]


def whole_events(events: list[Any]) -> list[Any]:
    """What an engine sends of the same answer to those who do not ask for pieces of calls."""
    return [event for event in events if not isinstance(event, p.ToolCallPiece)]


def is_cut(events: list[Any]) -> bool:
    """True if an answer ends inside a call."""
    return isinstance(events[-2], p.ToolCallPiece)


def answer(rng: random.Random, *, cut_calls: bool = False) -> list[Any]:
    """The events of one answer; with ``cut_calls`` it may end inside a call, as at max_tokens."""
    events: list[Any] = [LOCAL, *([p.Loading("reading", 1, 2)] if rng.random() < 0.5 else [])]
    total, calls = rng.randint(1, 99), 0
    events += [p.Accepted("r", total), p.Prefill("r", 0, total, cached=rng.randint(0, total))]
    for _ in range(rng.randint(0, 8)):
        if rng.random() < 0.5:
            channel: Any = rng.choice(["content", "reasoning"])
            events.append(p.Delta("r", _text(rng), channel))
            continue
        name, arguments = rng.choice(TOOL_NAMES), _arguments(rng)
        pieces = _beginning(rng, arguments)
        events += [p.ToolCallPiece("r", calls, f"call_{calls}", name, piece) for piece in pieces]
        events.append(p.ToolCall("r", calls, f"call_{calls}", name, arguments))
        calls += 1
    reason: Any = rng.choice(["stop", "length", "tool_calls"])
    if cut_calls and rng.random() < 0.25:
        events += _cut_call(rng, calls)
        reason = "length"
    usage = p.Usage(total, rng.randint(0, total), rng.randint(0, 50))
    stop = rng.choice([None, "END"]) if reason == "stop" else None
    return [*events, p.Finished("r", reason, usage, stop=stop)]


def answers(*, cut_calls: bool = False) -> st.SearchStrategy[list[Any]]:
    """Drawn as one number: drawing each event takes longer than what the tests do with all of them."""
    return st.integers(0, 2**32 - 1).map(lambda seed: answer(random.Random(seed), cut_calls=cut_calls))


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
