"""What a dialect costs beside OpenAI's chat: until its first event, in its TTFT, and for each token."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from bench.figures import Figure, Measured, at_most, rotated
from bench.harness import prompts
from bench.harness.client import Stream
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples, wait_for
from fleetd.api.anthropic.dialect import ANTHROPIC
from fleetd.api.anthropic.render import MessageOptions, MessageStream
from fleetd.api.generation.streamer import Streamer
from fleetd.api.http.dialect import Dialect
from fleetd.api.http.openai_dialect import OPENAI
from fleetd.api.ollama.dialect import OLLAMA
from fleetd.api.ollama.render import OllamaReplyOptions, OllamaStream
from fleetd.api.openai.render import ChatStream, ReplyOptions
from fleetd.api.responses.dialect import RESPONSES
from fleetd.api.responses.objects import Response
from fleetd.api.responses.render import ResponseOptions, ResponseStream
from fleetd.api.responses.tools import ToolTable
from fleetd.control.prefill_trace import TracesView
from fleetd.engine.protocol import Accepted, Delta, Event
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.plan.prefill import step_names

PROMPT_TOKENS = 500
# Of the prompt that keeps the worker busy.
BUSY_TOKENS = 4000
TOKENS = 5000
_ANSWER_S = 600.0
_TRACED_WITHIN_S = 20.0
# The worker's part of a TTFT on an idle machine.
_WORKER = (step_names.QUEUED, step_names.COMPUTED)


@dataclass(frozen=True, slots=True)
class BenchedDialect:
    """Args:
    address, body: a request of ``text`` whose answer is streamed.
    begins: true of the line that is its first event, as a client's library hands it on.
    piece: the text in one object of the stream; "" if it has none.
    streamer: what makes an answer's objects, and ``dialect`` their bytes.
    """

    address: str
    body: Callable[[str], dict[str, Any]]
    begins: Callable[[str], bool]
    piece: Callable[[dict[str, Any]], str]
    streamer: Callable[[], Streamer]
    dialect: Dialect


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _is_event(kind: str) -> Callable[[str], bool]:
    return lambda line: line.startswith("data: {") and json.loads(line[6:]).get("type") == kind


def _chat_piece(frame: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in frame["choices"])


DIALECTS = {
    "OpenAI's chat": BenchedDialect(
        "/v1/chat/completions",
        lambda text: {"messages": _said(text), "max_tokens": 1, "temperature": 0},
        # A chat has no event before its first token: a comment keeps its clients.
        lambda line: line.startswith(": "),
        _chat_piece,
        lambda: ChatStream(ReplyOptions(id="x", created=0, model=DEFAULT_MODEL, fingerprint="f")),
        OPENAI,
    ),
    "Responses": BenchedDialect(
        "/v1/responses",
        lambda text: {"input": text, "max_output_tokens": 1, "temperature": 0},
        _is_event("response.created"),
        lambda frame: frame["delta"] if frame["type"] == "response.output_text.delta" else "",
        lambda: ResponseStream(
            ResponseOptions(response=Response(id="x", created_at=0, model=DEFAULT_MODEL), tools=ToolTable())
        ),
        RESPONSES,
    ),
    "Messages": BenchedDialect(
        "/v1/messages",
        lambda text: {"messages": _said(text), "max_tokens": 1, "temperature": 0},
        _is_event("message_start"),
        lambda frame: frame["delta"].get("text", "") if frame["type"] == "content_block_delta" else "",
        lambda: MessageStream(MessageOptions(id="x", model=DEFAULT_MODEL)),
        ANTHROPIC,
    ),
    "Ollama's chat": BenchedDialect(
        "/api/chat",
        lambda text: {
            "model": DEFAULT_MODEL,
            "messages": _said(text),
            "options": {"num_predict": 1, "temperature": 0},
        },
        lambda line: line.startswith("{"),
        lambda frame: frame["message"]["content"],
        lambda: OllamaStream(
            OllamaReplyOptions(model=DEFAULT_MODEL, chat=True, began=datetime.now(UTC), elapsed_s=lambda: 0.0)
        ),
        OLLAMA,
    ),
}
_BASELINE = "OpenAI's chat"


def measure(runs: int) -> Measured:
    seen = Samples()
    with Daemon() as daemon:
        daemon.warm()
        for run in range(runs):
            for at, name in enumerate(rotated(run, list(DIALECTS))):
                # A text of its own: none may find another's in the prefix cache.
                text = prompts.text(MODEL, 9000 + 10 * run + at, PROMPT_TOKENS)
                first = _first(daemon, DIALECTS[name], text)
                seen["event", name].append(1000 * first.event_s)
                seen["first", name].append(first.text_s)
                seen["beside", name].append(first.text_s - first.worker_s)
                seen["busy", name].append(1000 * _busy_event_s(daemon, DIALECTS[name], 100 * run + at))
    for run in range(runs):
        for name in rotated(run, list(DIALECTS)):
            seen["token", name].append(1e6 * _token_s(DIALECTS[name]))
    return Measured(_figures(seen), _HOW)


def _figures(seen: Samples) -> list[Figure]:
    beside_ms = [1000 * beside for beside in seen["beside", _BASELINE]]
    figures = [
        Figure(f"{_BASELINE}, TTFT", "s", seen["first", _BASELINE]),
        Figure(f"{_BASELINE}, TTFT without the worker's part", "ms", beside_ms),
        Figure(f"{_BASELINE}, host time of a token's bytes", "µs", seen["token", _BASELINE]),
    ]
    for name in DIALECTS:
        sent = Figure(f"{name}, first event", "ms", seen["event", name], at_most(100), of="worst")
        busy = Figure(
            f"{name}, first event beside a prefill of {BUSY_TOKENS:,} tokens",
            "ms",
            seen["busy", name],
            at_most(100),
            of="worst",
        )
        figures += [sent, busy]
        if name == _BASELINE:
            continue
        added = [
            (ours - base) / first
            for ours, base, first in zip(
                seen["beside", name], seen["beside", _BASELINE], seen["first", _BASELINE], strict=True
            )
        ]
        more = [ours - base for ours, base in zip(seen["token", name], seen["token", _BASELINE], strict=True)]
        figures += [
            Figure(f"{name}, TTFT longer by", "%", added, at_most(0.01)),
            Figure(f"{name}, a token costs more by", "µs", more, at_most(50)),
        ]
    return figures


@dataclass(frozen=True, slots=True)
class First:
    """Seconds from sending a request to the first event of its stream, and to its first text; and of these,
    how long the worker had the prompt."""

    event_s: float
    text_s: float
    worker_s: float


def _first(daemon: Daemon, asked: BenchedDialect, text: str) -> First:
    with _asked(daemon, asked, text) as stream:
        event_s = text_s = 0.0
        for frame in stream.frames():
            if not event_s and asked.begins(frame.line):
                event_s = frame.at_s
            line = frame.line.removeprefix("data: ")
            if not text_s and line.startswith("{") and asked.piece(json.loads(line)):
                text_s = frame.at_s
        if not text_s:
            raise RuntimeError(f"{asked.address} ended without a text")
        return First(event_s, text_s, _worker_s(daemon, stream.id))


def _asked(daemon: Daemon, asked: BenchedDialect, text: str) -> Stream:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=_ANSWER_S)
    return Stream(connection, daemon.token, asked.address, {"stream": True, **asked.body(text)})


def _busy_event_s(daemon: Daemon, asked: BenchedDialect, seed: int) -> float:
    """Seconds from sending a request to its first event, while the worker reads another one's long prompt."""
    text = prompts.text(MODEL, 20_000 + seed, BUSY_TOKENS)
    with _asked(daemon, DIALECTS[_BASELINE], text) as other:
        lines = other.frames()
        next(frame for frame in lines if _is_under_way(frame.line))
        with _asked(daemon, asked, prompts.text(MODEL, 30_000 + seed, PROMPT_TOKENS)) as stream:
            event_s = next(frame.at_s for frame in stream.frames() if asked.begins(frame.line))
            seen_at = stream.sent + event_s
        read_at = other.sent + next(frame.at_s for frame in lines if frame.text)
    if read_at < seen_at:
        raise RuntimeError(f"the other prompt was read before the first event of {asked.address} came")
    return event_s


def _is_under_way(line: str) -> bool:
    """True of a comment that says that some of a prompt is read, and not all."""
    found = re.fullmatch(r": keepalive (\d+)/(\d+)", line)
    return found is not None and 0 < int(found[1]) < int(found[2])


def _worker_s(daemon: Daemon, request_id: str) -> float:
    """As the request's trace has it, which is written soon after the answer."""

    def traced() -> TracesView | None:
        told = daemon.control("GET", f"/fleet/v1/traces?id={request_id}")
        view = msgspec.json.decode(told, type=TracesView)
        return view if view.traces else None

    view = wait_for(traced, _TRACED_WITHIN_S, 0.01, lambda: f"{request_id} has no trace:\n{daemon.log()}")
    (trace,) = view.traces
    return sum(step.seconds for step in trace.steps if step.name in _WORKER)


def _token_s(asked: BenchedDialect) -> float:
    """Seconds of the daemon's event loop in which one token becomes the bytes of its dialect."""
    streamer, writer = asked.streamer(), asked.dialect.stream()
    events: list[Event] = [Delta("x", " word") for _ in range(TOKENS)]
    streamer.feed(0, Accepted("x", 1))
    for opening in streamer.opening():
        writer.frame(opening)
    begun = time.perf_counter()
    for event in events:
        for item in streamer.feed(0, event):
            writer.frame(item)
    return (time.perf_counter() - begun) / TOKENS


_HOW = (
    f"First event and TTFT: a daemon on loopback and prompts of {PROMPT_TOKENS:,} tokens, each with a text "
    "of its own, each dialect once in a run and first in turns; the times run from sending the request, "
    "the model loaded, to the first event of the stream, and to the text of the answer, one token. A chat "
    "has no event before its first token; its first comment counts. Beside a prefill: the same, while the "
    f"worker reads a prompt of {BUSY_TOKENS:,} tokens for another request, and has read some of it. "
    "How long the worker had the prompt, by the request's trace, is taken off each TTFT, for that varies "
    "by more than any dialect costs: what is left is HTTP, the dialect, the chat's template and tokenizing. "
    f"The share is that of the dialect less that of {_BASELINE}, over the TTFT of {_BASELINE} in the same "
    "run. Token: the daemon's code that makes a dialect's bytes of the engine's events, alone, over "
    f"{TOKENS:,} tokens; what follows, writing to the socket, is the same for all."
)
