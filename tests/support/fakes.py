"""Stand-ins for engines, pools and the model store: scripted, and honest about being cancelled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.engine.protocol import (
    Accepted,
    Arithmetic,
    Assisted,
    AssistPrefill,
    ChatPrompt,
    Delta,
    DraftFor,
    DraftReport,
    Event,
    FetchBlocks,
    Finished,
    Generate,
    Loading,
    Prefill,
    PrefillWithHelpers,
    Ready,
    ScoringState,
    StepTime,
    StreamTag,
    Timings,
    Usage,
)
from fleetd.errors import FleetError, ModelNotFound
from fleetd.models.model_store import UnlistedFolder
from fleetd.models.other_stores import FoundFile
from fleetd.models.parts import HeldPart
from fleetd.requests.job import Job

WITHIN_S = 60.0
LAYERS = 4
ARITHMETIC = Arithmetic(
    "cpu",
    "float32",
    {"mlx": "1", "mlx-lm": "1"},
    layers=[bytes([n]) * 8 for n in range(LAYERS)],
    chunks="any",
)
FACTS = Ready(
    device="cpu",
    shape=ModelShape(
        "llama",
        weights_bytes=1000,
        context_tokens=8192,
        dtype="float32",
        layers=LAYERS,
        sizes=StateSizes(1024),
        hidden_bytes=256,
        hidden_width=128,
        any_chunks=True,
    ),
    vocab_size=100,
    kv_budget_bytes=1 << 30,
    has_chat_template=True,
    tool_calls=False,
    reasoning=False,
    load_s=1.0,
    versions=ARITHMETIC.versions,
    speed=MeasuredSpeed(prefill_tok_s=100.0, decode_tok_s=10.0),
    arithmetic=ARITHMETIC,
    scoring=ScoringState("ready"),
)
STEPS = [StepTime("compute", 0.5, 1000)]


@dataclass(frozen=True)
class FakeFolder:
    name: str = "m"
    context_tokens: int = 8192
    weights_bytes: int = 1000
    config: dict[str, object] = field(default_factory=dict, compare=False)
    path: Path = field(default=Path("/models/it"), compare=False)
    source: str = field(default="embedded", compare=False)
    architecture: str = field(default="llama", compare=False)
    created_s: float = field(default=1_700_000_000.5, compare=False)
    purpose: str = field(default="chat", compare=False)
    images: bool = field(default=False, compare=False)

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.architecture, self.weights_bytes, self.context_tokens)


@dataclass(frozen=True)
class FakePullStep:
    file: str
    done_bytes: int
    total_bytes: int
    stage: str = "downloading"


async def play(steps: Iterable[Any]) -> AsyncGenerator[Any, None]:
    """Exceptions are raised, asyncio.Events waited for, all else is yielded."""
    for step in steps:
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield step


def answer(request_id: str = "r1", text: Sequence[str] = ("Hello", " world")) -> list[Loading | Event]:
    """A whole, healthy answer."""
    return [
        Accepted(request_id, prompt_tokens=7),
        Prefill(request_id, done=3, total=7, cached=3),
        Prefill(request_id, done=7, total=7, cached=3),
        *(Delta(request_id, piece) for piece in text),
        Finished(
            request_id,
            "stop",
            Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=len(text)),
            Timings(queue_s=0.1, prefill_s=0.2, decode_s=0.3),
        ),
    ]


@dataclass
class FakePool:
    """Streams ``script``, as ``play`` does. Models of ``loaded`` stay for the time of ``kept``."""

    script: Sequence[Loading | Event | BaseException | asyncio.Event] = ()
    load_steps: Sequence[Loading | BaseException | asyncio.Event] = ()
    cancelled: int = 0
    streamed: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)

    async def stream(
        self, folder: FakeFolder, request: Generate, over: Any = None
    ) -> AsyncGenerator[Loading | Event, None]:
        self.streamed.append(folder.name)
        try:
            async with aclosing(play(self.script)) as steps:
                async for step in steps:
                    yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    def keep(self, name: str, idle_s: float) -> bool:
        if name in self.loaded:
            self.kept[name] = idle_s
        return name in self.loaded

    def stays_s(self, name: str) -> float:
        return self.kept.get(name, 1800.0)

    def facts(self, name: str) -> Ready | None:
        return None

    def takes_others(self, folder: Any, over: Any = None) -> bool:
        return False

    async def load(self, folder: FakeFolder, over: Any = None) -> None:
        self.loaded.append(folder.name)

    async def loading(
        self, folder: FakeFolder, over: Any = None, split: Any = None
    ) -> AsyncGenerator[Loading, None]:
        """Loads once what is to be said of it, ``load_steps``, is said."""
        try:
            async with aclosing(play(self.load_steps)) as steps:
                async for step in steps:
                    yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        await self.load(folder)

    async def unload(self, name: str) -> bool:
        if name not in self.loaded:
            return False
        self.loaded.remove(name)
        return True


@dataclass
class FakeEngine:
    """Takes what it is given. Work for other machines ends when ``end`` is set.

    ``error``: what that work fails with, at once; where it is ``late``, or set after that, at the end.
    """

    facts: Ready | None = FACTS
    error: FleetError | None = None
    late: bool = False
    # Rows of earlier prompts are there, and this one's stay.
    warm: bool = False
    keeps: bool = False
    steps: list[StepTime] = field(default_factory=lambda: list(STEPS))
    end: asyncio.Event = field(default_factory=asyncio.Event)
    assists: list[AssistPrefill] = field(default_factory=list)
    follows: list[DraftFor] = field(default_factory=list)
    shares: list[PrefillWithHelpers] = field(default_factory=list)
    lonely: list[tuple[str, str]] = field(default_factory=list)
    fetches: list[FetchBlocks] = field(default_factory=list)
    streams: dict[str, socket.socket] = field(default_factory=dict)
    tags: dict[str, StreamTag] = field(default_factory=dict)
    cancelled: int = 0
    told: asyncio.Task[None] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def scoring(self) -> ScoringState:
        return self.facts.scoring if self.facts is not None else ScoringState()

    async def assist(self, assist: AssistPrefill) -> AsyncGenerator[Event, None]:
        self.assists.append(assist)
        async with aclosing(self._work(self._accepted(assist))) as events:
            async for event in events:
                yield event
        yield Assisted(assist.id, self.steps, self.keeps)

    def _accepted(self, assist: AssistPrefill) -> Accepted:
        return Accepted(assist.id, assist.split.tokens, is_warm=self.warm and assist.warm is not None)

    async def follow(self, follow: DraftFor) -> AsyncGenerator[Event, None]:
        self.follows.append(follow)
        async with aclosing(self._work(Accepted(follow.id, 0))) as events:
            async for event in events:
                yield event
        yield DraftReport(follow.id, 30, 20, 10)

    async def _work(self, accepted: Accepted) -> AsyncGenerator[Event, None]:
        if self.error is not None and not self.late:
            raise self.error
        try:
            yield accepted
            await self.end.wait()
            if self.error is not None:
                raise self.error
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            await self._notify()

    def fetch(self, fetch: FetchBlocks) -> None:
        self.fetches.append(fetch)
        self._soon()

    async def give_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        if (before := self.streams.get(tag.name)) is not None:
            before.close()
        self.streams[tag.name], self.tags[tag.name] = sock, tag
        await self._notify()

    async def given(self, name: str) -> tuple[StreamTag, socket.socket]:
        """A stream, once the engine has it."""
        await self.until(lambda: name in self.streams)
        return self.tags[name], self.streams[name]

    def share(self, share: PrefillWithHelpers) -> None:
        self.shares.append(share)
        self._soon()

    def alone(self, request_id: str, reason: str = "") -> None:
        self.lonely.append((request_id, reason))
        self._soon()

    def _soon(self) -> None:
        self.told = asyncio.create_task(self._notify())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S), self.changed:
            await self.changed.wait_for(condition)

    def close(self) -> None:
        for sock in self.streams.values():
            sock.close()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@dataclass
class FakeModels:
    """Models with these ``names``; ``found`` are those that are listed, if it is given.

    ``pull`` plays ``pull_steps``, then installs; unless they are given, it reports one step and waits for
    ``gate``. It knows the models of ``known``.
    """

    names: list[str] = field(default_factory=lambda: ["m"])
    found: list[FakeFolder] | None = None
    known: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    pull_steps: Iterable[FakePullStep | BaseException | asyncio.Event] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    pulls: int = 0
    cancelled_pulls: int = 0
    pull_ended: asyncio.Event = field(default_factory=asyncio.Event)
    removed: list[str] = field(default_factory=list)
    parts: list[HeldPart] = field(default_factory=list)

    def resolve(self, ref: str) -> FakeFolder:
        if ref not in self.names:
            nearest = (self.names or ["m"])[0]
            raise ModelNotFound(
                f"No model is called {ref!r}.", hint=f"Did you mean {nearest!r}?", param="model"
            )
        return next((folder for folder in self.found or () if folder.name == ref), FakeFolder(ref))

    def in_part(self, ref: str) -> FakeFolder:
        return self.resolve(ref)

    def outline_order(self, ref: str) -> None:
        return None

    def answerable(self) -> list[FakeFolder]:
        return self.installed()

    def parts_here(self) -> list[HeldPart]:
        return self.parts

    def needs_pull(self, ref: str) -> bool:
        return ref in self.known and ref not in self.names

    def installed(self) -> list[FakeFolder]:
        return [FakeFolder(name) for name in self.names] if self.found is None else self.found

    def sweep(self) -> list[str]:
        return []

    def unlisted(self) -> list[UnlistedFolder]:
        return []

    def digest(self, folder: FakeFolder) -> str:
        return self.digests.get(folder.name, "d")

    def known_digest(self, folder: FakeFolder) -> str:
        return self.digests.get(folder.name, "")

    async def pull(self, ref: str) -> AsyncGenerator[FakePullStep, None]:
        self.pulls += 1
        steps = self.pull_steps
        if steps is None:
            steps = [FakePullStep("weights", 1, 2), self.gate, FakePullStep("weights", 2, 2)]
        try:
            async with aclosing(play(steps)) as played:
                async for step in played:
                    yield step
            self.names.append(ref)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled_pulls += 1
            raise
        finally:
            self.pull_ended.set()

    def remove(self, ref: str) -> None:
        self.removed.append(ref)

    def importable(self) -> list[FoundFile]:
        return [FoundFile("qwen3:4b", Path("/blobs/sha256-1"), 5, "Ollama")]

    def locate(self, ref: str) -> FoundFile | Path:
        return Path(ref) if ref.startswith("/") else self.importable()[0]

    def name_for(self, place: FoundFile | Path, name: str) -> str:
        return name or "usual"

    def add(self, place: FoundFile | Path, name: str) -> FakeFolder:
        self.names.append(name)
        return FakeFolder(name)


def job(model: str = "m", request_id: str = "r1", prompt: str = "hi") -> Job:
    content = ChatPrompt(messages=[{"role": "user", "content": prompt}])
    return Job(model=model, request=Generate(request_id, content), origin="socket", route="chat")
