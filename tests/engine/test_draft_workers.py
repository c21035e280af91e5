"""Workers that draft for each other: real processes and sockets; only the daemons are played here.

Whatever the drafter is and whatever befalls it, the answer is the one that its model gives alone, to the bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drafting import answer, drafted, following
from msgspec.structs import replace
from own_resources import POOL_THREADS, grown, of_worker
from request_events import RequestEvents
from sharing import VOCAB, prompt, settle, workers, write

from fleetd import limits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Cancel, DraftFor, DraftReport, Generate, Speculate, StreamTag
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import InvalidValue, Overloaded

pytestmark = pytest.mark.one_loop
TOKENS = 40
TRIES = 20
KEY = os.urandom(32)
ONLY = Speculate(sources=["drafter"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of another shape, with the same vocabulary."""
    return write(tmp_path_factory.mktemp("other"), num_hidden_layers=1)


def request(name: str, seed: int = 5, *, tokens: int = 300, **fields: Any) -> Generate:
    return prompt(name, tokens, seed, **{"max_tokens": TOKENS, "speculate": ONLY, **fields})


async def plain(home: EngineProcess, asked: Generate) -> list[Any]:
    """The numbers of the same request without any drafts."""
    alone = replace(asked, id=f"{asked.id} plain", shared=False, speculate=Speculate(enabled=False))
    return (await answer(home, alone)).numbers


def accepted(told: RequestEvents) -> int:
    found = told.finished.speculation
    return found.sources["drafter"].accepted if found is not None else 0


def free(*engines: EngineProcess) -> bool:
    """As last told."""
    return all(engine.status.kv_bytes == engine.status.assisting == 0 for engine in engines)


async def test_drafts_of_every_quality_give_the_same_bytes(model: Path, other: Path) -> None:
    """Of the same model, and of one that knows nothing."""
    async with workers(model, 2, speculation="on") as (home, good), workers(other, 1) as (bad,):
        assert home.facts is not None
        assert good.facts is not None
        assert bad.facts is not None
        assert home.facts.vocabulary == good.facts.vocabulary == bad.facts.vocabulary != ""
        for seed, drafter in enumerate((good, bad)):
            asked = request(f"r{seed}", seed)
            told, followed = await drafted(home, drafter, asked)
            assert told.numbers == await plain(home, asked)
            (account,) = followed.of(DraftReport)
            assert account.drafted > 0
            assert account.judged > 0
        # Nobody waits for a drafter, so on a busy machine an answer may be over before its drafts come.
        for seed in range(2, 2 + TRIES):
            asked = request(f"r{seed}", seed)
            told, followed = await drafted(home, good, asked)
            assert told.numbers == await plain(home, asked)
            if accepted(told) > 0:
                break
        assert accepted(told) > 0
        assert followed.of(DraftReport)[0].right > 0
        # Two at once go into the batch, where drafts wait; both are as they would be alone.
        first, second = request("first", 8), request("second", 9)
        both = await asyncio.gather(drafted(home, good, first), drafted(home, bad, second))
        for (told, _), asked in zip(both, (first, second), strict=True):
            assert told.numbers == await plain(home, asked)
        # A second turn is drafted from what is left of the first. An answer may end before drafts begin.
        await settle(lambda: good.status.prefix_entries > 0)
        again = replace(request("r0", 0), id="again")
        told, _ = await drafted(home, good, again)
        assert told.numbers == await plain(home, again)
        await settle(lambda: free(home, good, bad))


async def test_ending_either_side_leaves_nothing_behind(model: Path) -> None:
    async with workers(model, 2, speculation="on") as (home, drafter):
        await drafted(home, drafter, request("warm"))
        await settle(lambda: free(home, drafter))
        before = of_worker(home.pid), of_worker(drafter.pid)
        for number in range(2):
            # The answer: the drafter notices by its stream.
            asked = request(f"answer{number}", number, max_tokens=3000)
            cancel = partial(home._send, Cancel(asked.id))
            told, followed = await drafted(home, drafter, asked, begun=cancel)
            assert told.finished.reason == "cancelled"
            assert followed.of(DraftReport)
            # The follow: the answer goes on.
            asked = request(f"follow{number}", number)
            told, _ = await drafted(home, drafter, asked, leave=True)
            assert told.numbers == await plain(home, asked)
        # What they last told may be of before the drafter was let go.
        more = lambda: [  # noqa: E731
            grown(of_worker(engine.pid), held, POOL_THREADS)
            for engine, held in zip((home, drafter), before, strict=True)
        ]
        await settle(lambda: free(home, drafter) and not any(more()))
        await _refused(drafter)


async def test_a_text_of_any_length_costs_another_worker_the_memory_of_a_window(model: Path) -> None:
    """A text far longer than its context: drafts come, and it promises no more than for a short one."""
    async with workers(model, 1) as (drafter,):
        held = [await _memory_of(drafter, tokens) for tokens in (4_000, 100_000)]
        assert held[0] == held[1] > 0
        await settle(lambda: free(drafter))


async def _memory_of(drafter: EngineProcess, tokens: int) -> int:
    """Bytes that a worker has promised to a text of so many tokens once it has drafted for it."""
    loop, moved, follow = asyncio.get_running_loop(), asyncio.Event(), DraftFor(f"of {tokens}")
    near, far = socket.socketpair()
    text = random.Random(3).choices(range(300), k=tokens)

    def connect(place: Place) -> SocketPipe:
        return SocketPipe(
            near, KEY, "connector", place=place, wake=lambda: loop.call_soon_threadsafe(moved.set)
        )

    async with following(drafter, follow) as (told, _):
        assert told.error is None
        await drafter.give_stream(StreamTag(follow.id, DRAFTS, KEY, "acceptor"), far)
        source = RemoteSource(connect, text, VOCAB)
        async with asyncio.timeout(120):
            while not source.propose(Context(text, 8)):
                assert source.error is None
                await moved.wait()
                moved.clear()
        await settle(lambda: drafter.status.kv_bytes > 0)
        promised = drafter.status.kv_bytes
        source.close()
        await settle(lambda: free(drafter))
    return promised


async def _refused(drafter: EngineProcess) -> None:
    """Follows that make no sense, or are too many."""
    async with following(drafter, DraftFor("r")) as (first, _):
        assert first.error is None
        async with following(drafter, DraftFor("r")) as (second, _):
            assert isinstance(second.error, InvalidValue)
        async with contextlib.AsyncExitStack() as stack:
            names = [f"r{number}" for number in range(limits.FOLLOWS)]
            found = [await stack.enter_async_context(following(drafter, DraftFor(name))) for name in names]
            assert [told.error for told, _ in found[:-1]] == [None] * (limits.FOLLOWS - 1)
            assert isinstance(found[-1][0].error, Overloaded)
    await settle(lambda: free(drafter))
