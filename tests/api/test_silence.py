"""A prefill of twenty minutes, in virtual time: the first event comes at once, and no silence is long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from api_fakes import MODEL, serve_unix, services
from virtual_loop import VirtualLoop

from fleetd.api.generation import generate
from fleetd.api.http import body
from fleetd.engine import protocol as p
from fleetd.requests.job import LOCAL, Job, Planned

PREFILL_S = 1200.0
TOKENS = 100_000
ASK = [{"role": "user", "content": "A very long prompt."}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": ASK}),
    "responses": ("/v1/responses", {"input": ASK}),
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 5}),
    "ollama": ("/api/chat", {"model": MODEL, "messages": ASK}),
}


class SlowRunner:
    """Reads the prompt for twenty minutes, in ``steps`` chunks.

    ``busy``: its compute thread is held as long by another prompt, before it accepts this one.
    """

    def __init__(self, steps: int, *, busy: bool = False) -> None:
        self.steps = steps
        self.busy = busy

    async def run(self, job: Job) -> AsyncGenerator[Planned | p.Event, None]:
        name = job.request.id
        yield LOCAL
        yield p.Tokenized(name, TOKENS)
        if self.busy:
            await asyncio.sleep(PREFILL_S)
        yield p.Accepted(name, TOKENS)
        for step in range(1, self.steps + 1):
            await asyncio.sleep(PREFILL_S / self.steps)
            yield p.Prefill(name, TOKENS * step // self.steps, TOKENS)
        yield p.Delta(name, "yes")
        yield p.Finished(name, "stop", p.Usage(TOKENS, 0, 1, 0))


async def heard(path: Path, engine: SlowRunner, dialect: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """When each piece of the answer came, in seconds, and the piece. The request was sent at 0."""
    loop = asyncio.get_running_loop()
    for module in (generate, body):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    address, fields = DIALECTS[dialect]
    no_limit = aiohttp.ClientTimeout(total=None)
    async with (
        serve_unix(services(engine), path) as site,
        site.client(timeout=no_limit) as session,
        session.post(address, json={"stream": True, **fields}) as answer,
    ):
        assert answer.status == 200
        return [(loop.time(), piece) async for piece in answer.content.iter_any()]


def is_event(piece: bytes) -> bool:
    """True for what a client's library hands on; comments keep the connection only."""
    return any(line.startswith((b"data:", b"{")) for line in piece.splitlines())


def longest_silence_s(times_s: list[float]) -> float:
    return max(later - sooner for sooner, later in pairwise([0.0, *times_s]))


@pytest.mark.parametrize("steps", [1, 2_400])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_first_sign_comes_at_once_and_no_silence_is_over_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, steps: int
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        pieces = runner.run(heard(tmp_path / "s", SlowRunner(steps), dialect, monkeypatch))
    # A chat has no object that says nothing, so comments keep its clients.
    signs_s = [at_s for at_s, piece in pieces if dialect == "chat" or is_event(piece)]
    assert signs_s[0] <= 0.1
    assert longest_silence_s(signs_s) <= 10.0
    assert pieces[-1][0] == pytest.approx(PREFILL_S, abs=0.1)
    last = pieces[-1][1].decode()
    assert any(end in last for end in ("[DONE]", "response.completed", "message_stop", '"done":true'))


@pytest.mark.parametrize(
    ("dialect", "sign"),
    [
        ("chat", f": keepalive 0/{TOKENS}"),
        ("responses", "response.created"),
        ("messages", f'"input_tokens":{TOKENS}'),
        ("ollama", '"done":false'),
    ],
)
def test_the_first_event_comes_at_once_while_the_engine_computes_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, sign: str
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        engine = SlowRunner(1, busy=True)
        pieces = runner.run(heard(tmp_path / "s", engine, dialect, monkeypatch))
    at_once = b"".join(piece for at_s, piece in pieces if at_s <= 0.1).decode()
    assert sign in at_once
    assert dialect == "chat" or is_event(at_once.encode())
    assert longest_silence_s([at_s for at_s, _ in pieces]) <= 10.0
    assert pieces[-1][0] == pytest.approx(2 * PREFILL_S, abs=0.1)
