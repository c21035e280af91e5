"""Engine workers that share prefills on one box: a model whose answers depend on every token, and the part of
two daemons that hands them their streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import chain_model
import tiny_architectures
from asking import GREEDY
from request_events import RequestEvents

from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    Accepted,
    Assisted,
    AssistPrefill,
    Delta,
    Generate,
    Prefill,
    PrefillWithHelpers,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill.frame_schedule import helper_streams
from fleetd.errors import FleetError
from fleetd.plan.prefill.split import Split

LAYERS = 4
CHUNK = 64
VOCAB = 512


def write(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """A small random model, with the chain model's tokenizer."""
    chain = chain_model.build(folder / "chain")
    own = tiny_architectures.OWN[model_type]
    if "text_config" in own:
        changes = {"text_config": {**own["text_config"], "vocab_size": VOCAB, **changes}}
    tiny_architectures.write(folder, model_type, **{"vocab_size": VOCAB, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chain / name, folder / name)
    shutil.rmtree(chain)
    return folder


def prompt(request_id: str, tokens: int, seed: int = 5, **fields: Any) -> Generate:
    """A request for a shared prefill of random tokens; its answer's logprobs depend on all of them."""
    drawn = random.Random(seed).choices(range(300), k=tokens)
    settings: dict[str, Any] = {
        "prompt": TokenPrompt(drawn),
        "sampling": GREEDY,
        "max_tokens": 4,
        "top_logprobs": 2,
        "shared": True,
        **fields,
    }
    return Generate(request_id, **settings)


def split_of(kind: str, accepted: Accepted, cuts: Sequence[float] = (0.5,), chunk: int = CHUNK) -> Split:
    """Cut at these fractions of the layers, or of the new tokens (at chunk boundaries)."""
    tokens, cached = accepted.prompt_tokens - 1, accepted.cached
    if kind == "layers":
        inner = [round(LAYERS * cut) for cut in cuts]
        return Split("layers", (0, *inner, LAYERS), LAYERS, cached, tokens, chunk)
    inner = [cached + round((tokens - cached) * cut / chunk) * chunk for cut in cuts]
    return Split("tokens", (cached, *inner, tokens), LAYERS, cached, tokens, chunk)


@asynccontextmanager
async def workers(path: Path, count: int = 2, **settings: Any) -> AsyncIterator[list[EngineProcess]]:
    """Loaded ones; the first answers."""
    made = [
        EngineProcess(worker_settings(path, **{"name": f"worker{number}", **settings}))
        for number in range(count)
    ]
    try:
        await asyncio.gather(*(start(engine) for engine in made))
        yield made
    finally:
        # A test that failed may have left them.
        for relay in list(Relay.open):
            relay.close()
        await asyncio.gather(*(engine.stop() for engine in made))


def worker_settings(path: Path, **settings: Any) -> WorkerSettings:
    return WorkerSettings(
        **{
            "name": "worker",
            "path": str(path),
            "device": "cpu",
            "threads": 1,
            "max_memory_bytes": 2 << 30,
            "prefill_chunk_tokens": CHUNK,
            **settings,
        }
    )


async def start(engine: EngineProcess) -> None:
    await engine.start()
    async for _ in engine.loaded():
        pass


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


class Sharing:
    """One request of ``home`` and the assists that belong to it."""

    def __init__(self, home: EngineProcess, helpers: Sequence[EngineProcess], request: Generate) -> None:
        self.home, self.helpers, self.request = home, helpers, request
        self.told = RequestEvents()
        self.assists = [RequestEvents() for _ in helpers]
        self.relays: list[Relay] = []
        self.accepted = asyncio.Event()
        self.computed = asyncio.Event()
        self.decoding = asyncio.Event()
        self.tasks = [asyncio.create_task(self._ask())]

    async def _ask(self) -> None:
        try:
            async for event in self.home.stream(self.request):
                self.told.events.append(event)
                match event:
                    case Accepted():
                        self.accepted.set()
                    case Prefill():
                        if event.done > event.cached:
                            self.computed.set()
                    case Delta():
                        self.decoding.set()
                    case _:
                        pass
        except FleetError as error:
            self.told.error = error

    async def _assist(
        self, told: RequestEvents, engine: EngineProcess, assist: AssistPrefill, ready: asyncio.Event
    ) -> None:
        try:
            async for event in engine.assist(assist):
                told.events.append(event)
                ready.set()
        except FleetError as error:
            told.error = error
        ready.set()

    async def wait(self) -> Accepted:
        await self.accepted.wait()
        (accepted,) = self.told.of(Accepted)
        return accepted  # type: ignore[no-any-return]

    async def agree(self, split: Split) -> None:
        """Every helper has reserved its memory."""
        for rank, (engine, told) in enumerate(zip(self.helpers, self.assists, strict=True)):
            ready = asyncio.Event()
            kv_bits = self.home.facts.shape.kv_bits if self.home.facts is not None else 0
            assist = AssistPrefill(f"{self.request.id}.{rank}", split, rank, kv_bits)
            self.tasks.append(asyncio.create_task(self._assist(told, engine, assist, ready)))
            await ready.wait()

    async def connect(self, split: Split, *, hold_after: int | None = None, leave_out: str = "") -> None:
        """All streams but ``leave_out``; home's pass through a relay that holds after so many bytes."""
        for rank, engine in enumerate(self.helpers):
            job = f"{self.request.id}.{rank}"
            for name in helper_streams(split, rank):
                if name == leave_out or name == "in":  # comes with its neighbour's "out"
                    continue
                last = rank == split.helpers - 1
                other = self.home if name == "home" or last else self.helpers[rank + 1]
                their_job = self.request.id if other is self.home else f"{self.request.id}.{rank + 1}"
                theirs = f"helper{rank}" if name == "home" else "in"
                key = os.urandom(32)
                near, far = tcp_pair()
                if name == "home" and hold_after is not None:
                    near.close()
                    far.close()
                    near, far, relay = through_relay(hold_after)
                    self.relays.append(relay)
                await engine.give_stream(StreamTag(job, name, key, "acceptor"), near)
                await other.give_stream(StreamTag(their_job, theirs, key, "connector"), far)

    async def held(self) -> None:
        """Until every relay holds."""
        for relay in self.relays:
            assert await asyncio.to_thread(relay.held.wait, 30)

    async def begin(
        self,
        kind: str,
        cuts: Sequence[float] = (0.5,),
        *,
        predicted_s: float = 5.0,
        exact: bool = True,
        hold_after: int | None = None,
    ) -> None:
        """From the acceptance to the word to share."""
        split = split_of(kind, await self.wait(), cuts)
        await self.agree(split)
        await self.connect(split, hold_after=hold_after)
        self.home.share(PrefillWithHelpers(self.request.id, split, predicted_s, exact))

    async def run(self, kind: str, cuts: Sequence[float] = (0.5,), *, exact: bool = True) -> RequestEvents:
        """From the acceptance to the end of everything."""
        await self.begin(kind, cuts, exact=exact)
        await self.end()
        return self.told

    async def end(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)
        for relay in self.relays:
            relay.close()

    def assisted(self) -> bool:
        return all(told.error is None and told.of(Assisted) for told in self.assists)


class Relay:
    """A wire between two machines that can be cut: after ``count`` bytes from the helper nothing more
    passes, in either direction, until it is closed."""

    open: ClassVar[list[Relay]] = []

    def __init__(self, home: socket.socket, helper: socket.socket, count: int) -> None:
        self.open.append(self)
        self._home, self._helper, self._left = home, helper, count
        self.held = threading.Event()
        self._threads = [
            threading.Thread(target=self._upward, daemon=True),
            threading.Thread(target=self._downward, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _upward(self) -> None:
        with contextlib.suppress(OSError):
            while self._left and (data := self._helper.recv(min(1 << 16, self._left))):
                self._left -= len(data)
                self._home.sendall(data)
            self.held.set()

    def _downward(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._home.recv(1 << 16):
                self._helper.sendall(data)

    def close(self) -> None:
        if self in self.open:
            self.open.remove(self)
        for sock in (self._home, self._helper):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        self._home.close()
        self._helper.close()


def through_relay(count: int) -> tuple[socket.socket, socket.socket, Relay]:
    """The helper's end, home's end, and what is between."""
    helper, relay_helper = tcp_pair()
    relay_home, home = tcp_pair()
    return helper, home, Relay(relay_home, relay_helper, count)


async def settle(check: Callable[[], bool]) -> None:
    """Until it is so; processes tell what they have done when they beat."""
    async with asyncio.timeout(60):
        while not check():  # noqa: ASYNC110 — what is waited for happens in other processes
            await asyncio.sleep(0.05)
