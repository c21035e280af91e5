"""Stand-ins for the engine pool and the model store: scripted, and honest about being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    Prefill,
    Timings,
    Usage,
)
from fleetd.errors import FleetError, ModelNotFound
from fleetd.requests.job import Job


@dataclass(frozen=True)
class FakeFolder:
    name: str


@dataclass(frozen=True)
class FakeProgress:
    file: str
    done_bytes: int
    total_bytes: int
    stage: str = "downloading"


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
    """Streams ``script``; an exception in it is raised, an Event in it is waited for."""

    script: Sequence[Loading | Event | BaseException | asyncio.Event] = ()
    cancelled: int = 0
    streamed: list[str] = field(default_factory=list)

    async def stream(self, folder: FakeFolder, request: Generate) -> AsyncGenerator[Loading | Event, None]:
        self.streamed.append(folder.name)
        try:
            for step in self.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise


@dataclass
class FakeModels:
    """``pull`` reports one step, waits for ``gate``, then installs."""

    names: set[str] = field(default_factory=lambda: {"m"})
    known: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    pulls: int = 0
    cancelled_pulls: int = 0
    error: FleetError | None = None

    def resolve(self, ref: str) -> FakeFolder:
        if ref not in self.names:
            raise ModelNotFound(f"No model is called {ref}.", hint="Did you mean `m`?", param="model")
        return FakeFolder(ref)

    def needs_pull(self, ref: str) -> bool:
        return ref in self.known and ref not in self.names

    def installed(self) -> list[FakeFolder]:
        return []

    def digest(self, folder: FakeFolder) -> str:
        return "d"

    async def pull(self, ref: str) -> AsyncGenerator[FakeProgress, None]:
        self.pulls += 1
        try:
            yield FakeProgress("weights", 1, 2)
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            yield FakeProgress("weights", 2, 2)
            self.names.add(ref)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled_pulls += 1
            raise


def job(model: str = "m", request_id: str = "r1", prompt: str = "hi") -> Job:
    content = ChatPrompt(messages=[{"role": "user", "content": prompt}])
    return Job(model=model, request=Generate(request_id, content), origin="socket", route="chat")
