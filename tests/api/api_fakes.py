"""A scripted daemon behind the real HTTP application, on real sockets, for all tests of the API."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import vector_fakes
from aiohttp import web
from fakes import FakeModels, FakePool, play
from msgspec.structs import replace

from fleetd import errors
from fleetd.api.app import build_app
from fleetd.api.http.deadlines import BoundedRunner
from fleetd.api.http.route_entry import Route
from fleetd.api.http.services import Services
from fleetd.api.routes import ALL_ROUTES
from fleetd.compression.selection import Selection
from fleetd.control import fleet_view, pairing_events
from fleetd.control.daemon_status import DaemonStatus, EngineStatus, HardwareReading, HttpAddress
from fleetd.control.model_change import ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.control.network_diagnosis import NetworkDiagnosis, PeerPortView
from fleetd.control.prefill_plan import AddedQuestion, AddedView, PlanQuestion, PlanView
from fleetd.control.usage_report import Span, UsageReport, UsageRow, UsageTotals
from fleetd.engine import protocol as p
from fleetd.errors import ModelNotFound
from fleetd.hardware.memory import MemoryReading, budget
from fleetd.models.model_names import ModelNames
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.vectors.job import MachineRun, TextsDone, VectorJob
from fleetd.requests.vectors.messages import texts_of
from fleetd.requests.vectors.part_answer import PartAnswer
from fleetd.requests.vectors.parts import VectorMachine

TOKEN = "fleet-test-token"
MODEL = "smollm2-135m"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "one", "lazy", "dog", "naps", "while", "rain"]

Step = p.Loading | p.Event | asyncio.Event | Exception
Script = Callable[[Job], Iterable[Step]]


def prompt_tokens(request: p.Generate) -> int:
    match request.prompt:
        case p.ChatPrompt(messages=messages):
            return sum(len(str(m["content"]).split()) + 4 for m in messages)
        case p.TextPrompt(text=text):
            return max(1, len(text.split()))
        case p.TokenPrompt(tokens=tokens):
            return len(tokens)


def logprob(token: str, offset: int, top: int, value: float = -0.5) -> p.TokenLogprob:
    best = [p.TopLogprob(f"{token}{i or ''}", value - i, f"{token}{i or ''}".encode()) for i in range(top)]
    return p.TokenLogprob(token, value, token.encode(), best, offset)


def speak(job: Job) -> Iterable[Step]:
    """A toy engine: words drawn from the seed; honours max_tokens, stop, logprobs, echo and tools."""
    r = job.request
    total = prompt_tokens(r)
    yield p.Accepted(r.id, total)
    if r.count_only:
        yield p.Finished(r.id, "stop")
        return
    yield p.Prefill(r.id, total, total, cached=1)
    yield p.Prefill(r.id, total, total)
    usage = p.Usage(total, 1, 0, 0)
    timings = p.Timings(0.001, 0.5, 0.25)
    offset = 0
    if r.echo:
        text = r.prompt.text if isinstance(r.prompt, p.TextPrompt) else "echo"
        shown = None
        if r.top_logprobs is not None:
            shown = [logprob(text, 0, 0, 0.0)]
        yield p.Delta(r.id, text, tokens=0, logprobs=shown)
        offset = len(text)
    if isinstance(r.prompt, p.ChatPrompt) and r.prompt.tools and r.prompt.tool_choice != "none":
        for i, tool in enumerate(r.prompt.tools):
            yield p.ToolCall(r.id, i, f"call_{i}", tool["function"]["name"], '{"city": "Oslo"}')
        usage = p.Usage(total, 1, 9, 0)
        yield p.Finished(r.id, "tool_calls", usage, timings)
        return
    draw = random.Random(r.sampling.seed)
    limit = 6 if r.max_tokens is None else r.max_tokens
    sent = 0
    for i in range(min(limit, 12)):
        word = draw.choice(WORDS) + " "
        sent += 1
        if any(stop in word for stop in r.stop):
            yield p.Finished(r.id, "stop", p.Usage(total, 1, sent, 0), timings, r.stop[0])
            return
        shown = None if r.top_logprobs is None else [logprob(word, offset, r.top_logprobs)]
        offset += len(word)
        yield p.Delta(r.id, word, logprobs=shown)
        del i
    reason: p.FinishReason = "length" if r.max_tokens is not None and sent >= r.max_tokens else "stop"
    yield p.Finished(r.id, reason, p.Usage(total, 1, sent, 0), timings)


class FakeRunner:
    """Plays a script per job."""

    def __init__(self, script: Script = speak) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.running = 0
        self.cancelled: list[str] = []
        self.changed = asyncio.Condition()

    async def run(self, job: Job) -> AsyncGenerator[Planned | p.Loading | p.Event, None]:
        p.encode(job.request)  # what cannot be encoded could never reach a worker
        self.jobs.append(job)
        self.running += 1
        ended = False
        try:
            await self._notify()
            yield LOCAL
            async with aclosing(play(self.script(job))) as steps:
                async for step in steps:
                    yield step
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            self.running -= 1
            if not ended:
                self.cancelled.append(job.request.id)
            await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)


def installed_models(*names: str) -> FakeModels:
    """A store with these models, or two usual ones; a pull ends at once."""
    names = names or (MODEL, "mlx-community/Qwen3-0.6B-4bit")
    digests = {name: f"blake3:{name}" for name in names}
    return FakeModels(list(names), known={"/blobs/sha256-1"}, digests=digests, pull_steps=[])


@dataclass
class FakePinned:
    names: set[str] = field(default_factory=set)

    def pin(self, name: str) -> None:
        self.names.add(name)

    def unpin(self, name: str) -> None:
        self.names.discard(name)


class FakeCompressing:
    """Keeps every other line, and plays ``trouble``."""

    def __init__(self) -> None:
        self.passages: list[Any] = []
        self.closed: list[str] = []
        self.trouble: BaseException | None = None

    def bill(self, request_id: str) -> Any:
        return self

    def close(self, refunded: str = "") -> None:
        self.closed.append(refunded)

    async def run(self, compression: Any) -> AsyncGenerator[p.Loading, None]:
        self.passages.append(compression)
        yield p.Loading("scoring", 1, 2)
        if self.trouble is not None:
            raise self.trouble
        kept = []
        for block in compression.document.blocks:
            spans, at = [], 0
            for n, line in enumerate(block.text.splitlines(keepends=True)):
                if n % 2 == 0:
                    spans.append((at, at + len(line)))
                at += len(line)
            kept.append(tuple(spans))
        compression.compressor, compression.names = MODEL, ("this",)
        compression.selection = Selection(tuple(kept), 100, 50)
        compression.scored_tokens, compression.score_s, compression.select_s = 120, 0.5, 0.01


class FakeVectors:
    """Finds a text's hash, the last text first; plays ``trouble`` after the first part."""

    def __init__(self) -> None:
        self.jobs: list[VectorJob] = []
        self.trouble: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.begun = asyncio.Event()
        self.closed = asyncio.Event()

    async def run(self, job: VectorJob) -> AsyncGenerator[p.Loading | TextsDone, None]:
        self.jobs.append(job)
        self.begun.set()
        try:
            async with aclosing(self._parts(job)) as parts:
                async for part in parts:
                    yield part
        finally:
            self.closed.set()

    async def _parts(self, job: VectorJob) -> AsyncGenerator[p.Loading | TextsDone, None]:
        if self.trouble is not None:
            raise self.trouble
        yield p.Loading("reading", 1, 2)
        if self.gate is not None:
            await self.gate.wait()
        job.name, texts = MODEL, texts_of(job.request)
        machine = MachineRun(VectorMachine(THIS_NODE, "this", 1.0), 0.0)
        job.ran[THIS_NODE] = machine
        for first in reversed(range(0, len(texts), 3)):
            some = range(first, min(first + 3, len(texts)))
            answer = PartAnswer(job.part(some, "part"))
            for event in vector_fakes.answers(job.part(some, "part")):
                if isinstance(event, p.TextsEmbedded | p.TextsReranked):
                    answer.feed(event)
            machine.texts, machine.tokens = machine.texts + len(some), machine.tokens + sum(answer.tokens)
            yield TextsDone(some, answer.found)


class FakeLedger:
    def usage(self, days: int, by: Span = "day") -> UsageReport:
        return UsageReport([UsageRow(day="2026-01-01", requests=days)], UsageTotals(requests=days))


class FakeMetrics:
    def __init__(self) -> None:
        self.refused: list[str] = []

    def auth_failure(self, reason: str) -> None:
        self.refused.append(reason)

    def render(self, accept: str) -> tuple[bytes, str]:
        if "openmetrics" in accept:
            return b"# EOF\n", "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return b"up 1\n", "text/plain; version=0.0.4; charset=utf-8"


STUDIO = fleet_view.PeerView("k3f9a2bxxxxxx", "k3f9a2b", "studio", "usable")
MINI = fleet_view.FleetView(True, "me", "me", "mini", peers=[STUDIO])


@dataclass
class FakeFleet:
    """Plays ``steps``."""

    steps: list[pairing_events.PairingEvent | Exception | asyncio.Event] = field(default_factory=list)
    fleet: fleet_view.FleetView = MINI
    joined: list[tuple[str, str | None, bool]] = field(default_factory=list)
    answered: list[tuple[str, bool, bool]] = field(default_factory=list)
    prompts: list[tuple[str, bool, bool]] = field(default_factory=list)
    waiting: str = ""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    # What was asked of other machines' models; what an operation there says, and the models there.
    managed: list[tuple[str, str, str]] = field(default_factory=list)
    manage_steps: list[ModelProgress | ModelDone | Exception | asyncio.Event] = field(default_factory=list)
    listing: ModelListing | errors.FleetError = field(default_factory=ModelListing)
    found: FoundModels = field(default_factory=FoundModels)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def is_here(self, ref: str) -> bool:
        return ref == self.fleet.name

    def manage(self, machine: str, verb: Verb, model: str) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        self._find(machine)
        self.managed.append((machine, verb, model))
        return self._managing(model)

    async def _managing(self, model: str) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        self.begun.set()
        try:
            async for step in play(self.manage_steps):
                yield step
            yield ModelDone(name=model)
        finally:
            self.closed.set()

    async def look(self, machine: str, words: str = "") -> ModelListing | FoundModels:
        self._find(machine)
        if isinstance(self.listing, errors.FleetError):
            raise self.listing
        return replace(self.found, words=words) if words else self.listing

    def view(self) -> fleet_view.FleetView:
        return self.fleet

    async def pair(self) -> AsyncGenerator[pairing_events.PairingEvent, None]:
        try:
            async for step in play(self.steps):
                yield step
        finally:
            self.closed.set()

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        if node_id != self.waiting:
            raise errors.PairingClosed("Nobody waits for an answer.", hint="`fleetctl pair` opens a window.")
        self.answered.append((node_id, admit, sees_prompts))

    def join(
        self, code: str, host: str | None, *, sees_prompts: bool
    ) -> AsyncGenerator[pairing_events.PairingEvent, None]:
        self.joined.append((code, host, sees_prompts))
        return self.pair()

    def _find(self, peer: str) -> fleet_view.PeerView:
        for each in self.fleet.peers:
            if peer in (each.name, each.node_id):
                return each
        raise errors.NotFound(f"No machine is called {peer!r}.", hint="The nearest is 'studio'.")

    async def unpair(self, peer: str, keep: Iterable[str] = ()) -> pairing_events.Unpaired:
        return pairing_events.Unpaired(self._find(peer).node_id, peer, ["air"], ["pro"], kept=list(keep))

    async def allow_prompts(self, peer: str, allowed: bool, *, fleet: bool) -> fleet_view.PeerView:
        self.prompts.append((peer, allowed, fleet))
        return replace(self._find(peer), sees_prompts=allowed)

    async def diagnose(self) -> NetworkDiagnosis:
        return NetworkDiagnosis(port=PeerPortView(host="10.0.0.2", reachable=True))


def status(**changes: Any) -> DaemonStatus:
    given = DaemonStatus(
        version="0.1.0",
        ready=True,
        default_model=MODEL,
        http=HttpAddress("127.0.0.1", 8114),
        machine=HardwareReading(memory_bytes=16 << 30, accelerator="metal"),
        memory=budget(MemoryReading(16 << 30, 4 << 30)),
    )
    return replace(given, **changes)


def engine(**changes: Any) -> EngineStatus:
    return EngineStatus(**{"model": MODEL, "state": "ready", "progress_age_s": 0.1, **changes})


async def no_added(question: AddedQuestion) -> AddedView:
    raise AssertionError("no machine is added")


async def no_plan(question: PlanQuestion) -> PlanView:
    raise AssertionError("nothing is planned")


def services(runner: Any = None, **changes: Any) -> Services:
    made = Services(
        runner=runner if runner is not None else FakeRunner(),
        models=installed_models(),
        pull=installed_models().pull,
        pool=FakePool(),
        ledger=FakeLedger(),
        metrics=FakeMetrics(),
        status=status,
        verify=lambda path, full=False: None,
        token=TOKEN,
        version="0.1.0",
        names=ModelNames(MODEL),
        plan=no_plan,
        added=no_added,
        pinned=FakePinned(),
        compressing=FakeCompressing(),
        vectors=FakeVectors(),
    )
    made = replace(made, **changes)
    return made if "pull" in changes else replace(made, pull=made.models.pull)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Site:
    """One served application."""

    host: str
    port: int
    token: str
    runner: web.AppRunner
    socket_path: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
        options.setdefault("headers", self.auth)
        connector = None if self.socket_path is None else aiohttp.UnixConnector(str(self.socket_path))
        async with aiohttp.ClientSession(self.url, connector=connector, **options) as session:
            yield session

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)


@asynccontextmanager
async def serve(
    given: Services, routes: Sequence[Route] = ALL_ROUTES, *, needs_token: bool = True
) -> AsyncIterator[Site]:
    """On TCP, as strangers see it."""
    runner = BoundedRunner(build_app(given, routes), trusted=False, needs_token=needs_token)
    await runner.setup()
    try:
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(runner, sock, backlog=1024).start()
        yield Site("127.0.0.1", sock.getsockname()[1], given.token, runner)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_unix(given: Services, path: Path) -> AsyncIterator[Site]:
    """On a Unix socket, as fleetctl sees it."""
    runner = BoundedRunner(build_app(given), trusted=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield Site("fleetd", 80, given.token, runner, path)
    finally:
        await runner.cleanup()


@contextmanager
def serve_in_thread(make: Callable[[], Services]) -> Iterator[Site]:
    """For clients that block: the server gets a loop and a thread of its own."""
    started: list[Site] = []
    ready, stop = threading.Event(), []

    async def main() -> None:
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        async with serve(make()) as site:
            started.append(site)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(60)
        yield started[0]
    finally:
        loop, done = stop[0]
        loop.call_soon_threadsafe(done.set)
        thread.join(60)


def frames(text: str) -> list[str]:
    """The data of each event in a stream."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


async def read_until(reader: asyncio.StreamReader, marker: bytes, timeout_s: float = 60.0) -> bytes:
    got = b""
    async with asyncio.timeout(timeout_s):
        while marker not in got:
            piece = await reader.read(65536)
            if not piece:
                break
            got += piece
    return got


def post_bytes(site: Site, path: str, body: bytes, **headers: str) -> bytes:
    """A POST as raw bytes, for tests that talk to the socket themselves."""
    fields = {
        "Host": f"{site.host}:{site.port}",
        "Authorization": f"Bearer {site.token}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@dataclass(frozen=True)
class Target:
    base_url: str
    api_key: str
    model: str
    # A live model may say anything else than the call that a test waits for.
    tools: bool


def scripts(job: Job) -> list[Step]:
    """A word in the prompt asks for what a healthy model would not do."""
    text = str(getattr(job.request.prompt, "messages", job.request.prompt))
    start: list[Step] = [p.Accepted(job.request.id, 3), p.Delta(job.request.id, "half")]
    if job.model == "no-such-model-here":
        return [ModelNotFound("No such model.")]
    if "too long" in text:
        return [errors.ContextLengthExceeded("9000 tokens do not fit 8192.", param="messages")]
    if "busy" in text:
        return [errors.Overloaded("The queue is full.", retry_after_s=1)]
    if "die" in text:
        return [*start, errors.EngineDied("The engine died.")]
    if "think" in text:
        end = p.Finished(job.request.id, "stop", p.Usage(3, 0, 5, 3))
        return [start[0], p.Delta(job.request.id, "hm", "reasoning", 3), p.Delta(job.request.id, "yes"), end]
    return list(speak(job))
