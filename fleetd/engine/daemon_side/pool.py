"""The models that this machine has loaded: their workers are started when needed, and ended when idle or in
the way.

A model that does not fit can still help others: then its worker has some of its layers only, and answers
nothing itself.

While no worker of this machine has anything to do, one of them at a time may be measured for scoring.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from fleetd import limits
from fleetd.control.daemon_status import Carried, EngineStatus, Pressure
from fleetd.control.model_change import Split
from fleetd.control.model_facts import KvBits
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.cpu import address_space, openmp_file
from fleetd.engine.daemon_side.group_front import GroupFront, GroupLife, NewCut
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.replay import Replay
from fleetd.engine.daemon_side.supervisor import EngineProcess, no_progress
from fleetd.engine.protocol import (
    WAITING,
    EmbedTexts,
    Event,
    Generate,
    Loading,
    Prefill,
    Question,
    Ready,
    RerankTexts,
)
from fleetd.engine.settings import RingPlace, WorkerOptions, WorkerSettings
from fleetd.errors import (
    EngineDied,
    FleetError,
    GroupLost,
    ModelUnsupported,
    NoMachine,
    OutOfMemory,
    Overloaded,
)
from fleetd.limits import MIB
from fleetd.models import cpu_arithmetic, file_threads, model_sizes
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WeightRules, weight_need
from fleetd.models.model_sizes import ModelSizes
from fleetd.plan import chip_speeds, load_times

log = structlog.get_logger(__name__)

A = TypeVar("A")

_CHECK_S = 1.0
_HELD_STEP_BYTES = 256 * MIB
_ANY_BYTES = 1 << 50


async def no_drafter(folder: ModelFolder) -> Path | None:
    """None for any model."""
    return None


class PoolOptions(WorkerOptions, frozen=True, kw_only=True):
    """How workers run, and after how many seconds an idle one is unloaded; 0 keeps them."""

    idle_unload_s: float = 1800.0


class _WantedLayers(msgspec.Struct, frozen=True):
    """A model, or layers [first, last) of it; (0, 0) is all."""

    folder: ModelFolder
    first: int = 0
    last: int = 0
    # Names of the other machines that are to hold the model with this one, which holds it alone if there are
    # none; None leaves it open.
    over: frozenset[str] | None = None
    # How those machines are to hold it: each some of the layers, or a part of each; None leaves it open.
    split: Split | None = None
    # It is for a worker that is another rank than 0.
    ring: RingPlace | None = None

    @property
    def name(self) -> str:
        if self.ring is not None:
            return f"{self.folder.name}[rank {self.ring.rank} of {self.ring.size}]"
        return f"{self.folder.name}[{self.first}:{self.last}]" if self.last else self.folder.name


@dataclass
class _Turns:
    """Two models do not fit together: ``first`` is used and then gives way. ``allowed``: the one model that
    may be loaded now, "" if none; ``changed`` is set at each change, the end included."""

    first: str
    allowed: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Requests for the first model that came once it was to give way, and wait.
    put_off: int = 0

    @property
    def giving_way(self) -> str:
        """The model that nobody may begin to use any more, "" if none."""
        return self.first if self.allowed != self.first else ""

    def allow(self, name: str) -> None:
        self.allowed = name
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


@dataclass
class EnginePool:
    """The loaded models by name. One request or several may wait for the same load."""

    options: PoolOptions = field(default_factory=PoolOptions)
    # Where a folder's recorded checksums are (``ModelStore.record_path``).
    record_path: Callable[[ModelFolder], Path | None] = lambda folder: None
    # How short the system is of memory.
    pressure: Callable[[], Pressure] = lambda: ""
    # What decides how loads hold weights; without a daemon, on a CPU with memory for any model.
    weight_rules: Callable[[], WeightRules] = lambda: WeightRules(
        "cpu", available=cpu_arithmetic.installed(), budget_bytes=_ANY_BYTES
    )
    # About how many seconds a load of a model takes here.
    load_s: Callable[[ModelFolder], float] = lambda folder: chip_speeds.load_s(folder.weights_bytes)
    # Models that stay loaded unless the system is critically short of memory.
    pinned: Callable[[], Collection[str]] = frozenset
    # The other machines for a model that does not fit this one, given its sizes and the names of those that
    # were asked for; None: none.
    groups: Callable[[ModelFolder, ModelSizes, Sequence[str]], GroupLife | None] = (
        lambda folder, sizes, over: None
    )
    # Another cut of a model over machines, given its name, what its layers took lately and the tokens that
    # were written with it; None: it stays as it is cut.
    cut_anew: Callable[[str, Sequence[GroupStage], int], NewCut | None] = lambda name, stages, tokens: None
    # The same for a model whose layers are divided: the other ranks. Raises FleetError if it cannot be.
    ranks: Callable[[ModelFolder, Sequence[str], ModelSizes], GroupLife] | None = None
    # The folder of what drafts from a model's hidden states; None: what lies in its own folder, if anything.
    drafter: Callable[[ModelFolder], Awaitable[Path | None]] = no_drafter
    # In how many bits a model's keys and values are held, by its name; 0 is as they are computed.
    kv_bits: Callable[[str], KvBits] = lambda name: 0
    # Told the id of each worker's process once that has ended.
    ended: Callable[[int], None] = lambda pid: None
    _models: dict[str, LoadedModel] = field(default_factory=dict, init=False)
    _deaths: dict[str, int] = field(default_factory=dict, init=False)
    # By model: the figures with which its last worker ended, those before it included.
    _earlier: dict[str, EngineStatus] = field(default_factory=dict, init=False)
    # Held while a worker is started: of two that begin at the same moment, one is seen by the other.
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    # Models that have left the table and whose workers still hold memory.
    _ending: list[LoadedModel] = field(default_factory=list, init=False)
    # Requests that have an engine but have not started to stream: they keep it from being unloaded.
    _claims: dict[str, int] = field(default_factory=dict, init=False)
    # The machines whose groups have a worker's layers, with a name for each group.
    _askers: dict[str, list[str]] = field(default_factory=dict, init=False)
    # Why models are loaded once more for answers that go on.
    _again: dict[str, str] = field(default_factory=dict, init=False)
    # How the bytes of a rank travel, by the name of its worker.
    _carried: dict[str, Callable[[], Carried]] = field(default_factory=dict, init=False)
    # Seconds of idleness after which a model is unloaded, where a client has said so.
    _stays_s: dict[str, float] = field(default_factory=dict, init=False)
    # Models that are to be measured for scoring whatever their size; those of them that are to be loaded.
    _wanted: set[str] = field(default_factory=set, init=False)
    _to_load: dict[str, ModelFolder] = field(default_factory=dict, init=False)
    _measuring: asyncio.Task[None] | None = field(default=None, init=False)
    # Loads a model that is cut anew.
    _cutting: asyncio.Task[None] | None = field(default=None, init=False)
    # While two models take turns in the memory; and the load of the second one.
    _turns: _Turns | None = field(default=None, init=False)
    _second: asyncio.Task[None] | None = field(default=None, init=False)
    # Set when a claim on a model ends.
    _let_go: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # When memory was given back last because the system was short of it; 0 if it is not.
    _relieved_at: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Watch for stalls and idleness until cancelled."""
        # Of workers that were killed together with the daemon before this one.
        openmp_file.sweep()
        while True:
            await asyncio.sleep(_CHECK_S)
            self.use_idle_time()
            self.cut_when_idle()
            self.share_memory()
            await self.relieve(self.pressure())
            for name, model in list(self._models.items()):
                await model.check()
                overdue = model.first.idle_s > self.stays_s(name)
                if overdue and model.state == "ready" and not self._in_use(name):
                    log.info("engine.unload", model=name, reason="idle", idle_s=round(model.first.idle_s))
                    await self.unload(name)

    def keep(self, name: str, idle_s: float) -> None:
        """Unload a model after so many seconds of idleness, until it is unloaded; infinite is never.

        Nothing is noted of a model that is not loaded.
        """
        if name in self._models:
            self._stays_s[name] = idle_s

    def stays_s(self, name: str) -> float:
        """After so many seconds of idleness a model is unloaded; infinite if it stays."""
        if name in self.pinned():
            return math.inf
        return self._stays_s.get(name, self.options.idle_unload_s or math.inf)

    async def relieve(self, pressure: Pressure) -> None:
        """Called every second or so: give memory back while the system is short of it.

        Running requests keep theirs. A warning costs only what was idle for a while, and reuse of buffers:
        small machines live with it for hours.
        """
        if pressure not in ("warning", "critical"):
            self._relieved_at = 0.0
            return
        critical, now = pressure == "critical", asyncio.get_running_loop().time()
        first = not self._relieved_at
        if not first and now - self._relieved_at < limits.PRESSURE_STEP_S:
            return
        self._relieved_at = now
        if first or critical:
            for worker in self._workers():
                worker.free_memory(prompts=critical)
        idle_s = 0.0 if critical else limits.PRESSURE_IDLE_S
        kept = () if critical else self.pinned()
        await self._evict_idle(f"the system is short of memory ({pressure})", idle_s=idle_s, kept=kept)

    @property
    def disk_note(self) -> str:
        """Why a worker writes nothing to the disk at the moment; "" if all may."""
        return next((note for worker in self._workers() if (note := worker.disk_note)), "")

    def forget_prompts(self) -> None:
        """Let every worker throw away what it keeps of earlier prompts in memory."""
        for worker in self._workers():
            worker.free_memory(prompts=True)

    def forget_origins(self, labels: list[str]) -> None:
        """Let every worker throw away what it keeps under these labels in memory."""
        for worker in self._workers():
            worker.forget_origins(labels)

    def _workers(self) -> list[EngineProcess]:
        return [worker for model in self._models.values() for worker in model.workers]

    @property
    def held_bytes(self) -> int:
        """What all workers hold of the device's memory, rounded up: it changes a little with each token."""
        return self._held_besides(None)

    def _held_besides(self, besides: EngineProcess | None) -> int:
        ending = [worker for model in self._ending for worker in model.workers]
        held = sum(worker.claimed_bytes for worker in self._workers() + ending if worker is not besides)
        return -(-held // _HELD_STEP_BYTES) * _HELD_STEP_BYTES

    def share_memory(self) -> None:
        """Called every second or so: tell each worker what others have taken of what it was given.

        One that is loaded later is given what is left then; the earlier ones have as much less.
        """
        if self.options.overcommit and not self.options.max_memory_bytes:
            return
        for worker in self._workers():
            worker.taken_elsewhere(max(0, self._held_besides(worker) - worker.settings.held_bytes))

    # ---- idle time -------------------------------------------------------------------------------------

    def measure_when_idle(self, folder: ModelFolder) -> None:
        """Measure a model for scoring once nothing else runs; load it for that if it fits beside others."""
        self._wanted.add(folder.name)
        if self.engine(folder) is None:
            self._to_load[folder.name] = folder

    def use_idle_time(self) -> None:
        """Called every second or so: while nothing runs, a worker that has no profile may look for it."""
        if self.busy or any(self._claims.values()):
            return
        if self._to_load and (self._measuring is None or self._measuring.done()):
            name, folder = self._to_load.popitem()
            if self.engine(folder) is None:
                self._measuring = asyncio.create_task(self._load_to_measure(folder), name=f"measure-{name}")
                return
        # Those that a prompt has wanted first.
        for name, model in sorted(self._models.items(), key=lambda item: item[0] not in self._wanted):
            facts = model.first.facts
            small = facts is not None and facts.shape.weights_bytes <= limits.IDLE_MODEL_BYTES
            if model.state == "ready" and model.first.scoring.left and (small or name in self._wanted):
                model.first.give_idle_time(limits.IDLE_TIME_S)
                return

    def _end_idle_time(self) -> None:
        for model in self._models.values():
            if model.first.scoring.left:
                model.first.give_idle_time(0.0)

    async def _load_to_measure(self, folder: ModelFolder) -> None:
        try:
            await self._load_beside(_WantedLayers(folder))
        except FleetError as error:
            log.info("engine.not_measured", model=folder.name, reason=str(error))

    # ---- cut anew --------------------------------------------------------------------------------------

    def cut_when_idle(self) -> None:
        """Called every second or so: a model over several machines that nobody uses may be loaded over
        another cut, if its machines turned out to be slower or faster than planned."""
        if self._cutting is not None and not self._cutting.done():
            return
        for name, model in self._models.items():
            front = model.first
            if isinstance(front, GroupFront) and front.stages and self._may_cut(model):
                self._cutting = asyncio.create_task(self._cut(model, front), name=f"cut-{name}")
                return

    def _may_cut(self, model: LoadedModel) -> bool:
        quiet = model.first.idle_s >= limits.GROUP_RECUT_IDLE_S and self._turns is None
        return quiet and model.state == "ready" and not model.busy and not self._in_use(model.name)

    def _held_ready(self, model: LoadedModel) -> bool:
        return self._models.get(model.name) is model and model.state == "ready"

    async def _cut(self, model: LoadedModel, front: GroupFront) -> None:
        """Load a model over another cut, if there is a better one. Requests that come meanwhile wait for that
        load as for any other; if it fails, the model is loaded as it was."""
        cut: LoadedModel | None = None
        async with self._starting:
            if not self._held_ready(model) or not self._may_cut(model):
                return
            # Each answer's figures are looked at once.
            stages, front.stages = front.stages, ()
            if (new := self.cut_anew(model.name, stages, front.written_tokens)) is None:
                return
            if new.prepare is None:
                cut = await self._switched(model, front, new)
        if new.prepare is not None:
            ready = new.prepare(front.exact_kind, partial(self._unused, model))
            cut = await self._prepared(model, front, new, ready)
        if cut is None:
            return
        try:
            async for _ in cut.loaded():
                pass
        except FleetError as error:
            log.warning("group.not_cut_anew", model=model.name, code=error.code, reason=error.message)
            await self._as_before(cut, new)

    async def _prepared(
        self, model: LoadedModel, front: GroupFront, new: NewCut, ready: Awaitable[None]
    ) -> LoadedModel | None:
        """Load it over another cut once machines that are new to it are ``ready``; None if they do not get
        so. Meanwhile it answers as before."""
        log.info("group.prepared", model=model.name, reason=new.why)
        waiting = asyncio.ensure_future(ready)
        try:
            while not waiting.done():
                if not self._held_ready(model):
                    raise EngineDied(f"{model.name} is not loaded any more.")
                await asyncio.wait([waiting], timeout=_CHECK_S)
            await waiting
            async with self._starting:
                if not self._held_ready(model) or not self._may_cut(model):
                    raise Overloaded(f"{model.name} is in use again.")
                return await self._switched(model, front, new)
        except FleetError as error:
            log.info("group.not_cut_anew", model=model.name, code=error.code, reason=error.message)
            new.group.close()
            return None
        except BaseException:
            new.group.close()
            raise
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _unused(self, model: LoadedModel) -> None:
        """Until nobody uses it. Raises Overloaded if that takes too long: machines keep memory for it."""
        try:
            async with asyncio.timeout(limits.GROUP_RECUT_S):
                while not self._may_cut(model):  # noqa: ASYNC110  (idle for a while is no event)
                    await asyncio.sleep(_CHECK_S)
        except TimeoutError:
            raise Overloaded(f"{model.name} was in use all the time.") from None

    async def _switched(self, model: LoadedModel, front: GroupFront, new: NewCut) -> LoadedModel | None:
        """The other cut in the place of the one that is loaded, started. None if that could not be."""
        name = model.name
        cut = LoadedModel([front.over(new.group, self._held_besides(front), new.why)], self._exited)
        self._models[name] = cut
        try:
            # The memory of machines that are in both holds one of both.
            await self._end(model)
            await cut.start()
        except BaseException as error:
            # Unloaded meanwhile, or cancelled: no request may wait for what was never started.
            if self._models.get(name) is cut:
                del self._models[name]
            new.group.close()
            if not isinstance(error, FleetError):
                raise
            log.info("group.not_cut_anew", model=name, code=error.code, reason=error.message)
            return None
        return cut

    async def _as_before(self, cut: LoadedModel, new: NewCut) -> None:
        """Load a model as it was before ``cut``, which failed, unless a request has done so, or it was
        unloaded."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + limits.GROUP_AGAIN_S
        while (now := self._models.get(cut.name)) is not None and (now is cut or now.state == "failed"):
            try:
                async for _ in self.loading(new.folder, evict=False, over=new.over):
                    pass
            except FleetError as error:
                # Machines may have yet to free their parts of the other cut.
                if not isinstance(error, OutOfMemory) or clock() > until_s:
                    log.warning("group.not_again", model=cut.name, code=error.code, reason=error.message)
                    return
                await asyncio.sleep(_CHECK_S)

    async def stream(
        self, folder: ModelFolder, request: Generate, over: Collection[str] | None = None
    ) -> AsyncGenerator[Loading | Event, None]:
        """Load the model if needed (yields Loading), then yield the request's events up to Finished.

        Args:
            over: names of the other machines that have to hold the model with this one, which holds it alone
                if there are none; None leaves it open.

        Raises FleetError: why the load or the request failed. Closing the generator cancels the request.
        """
        wanted = _WantedLayers(folder, over=_names(over))
        replay, lost_s = Replay(request), -math.inf
        clock = asyncio.get_running_loop().time
        with self._claim(folder.name):
            while True:
                try:
                    async with aclosing(self._streamed(wanted, replay)) as events:
                        async for event in events:
                            passed = event if isinstance(event, Loading) else replay.passed(event)
                            if passed is not None:
                                yield passed
                except GroupLost as error:
                    replay.again(error)
                    lost_s = clock()
                    log.warning("group.again", model=folder.name, reason=error.message)
                    self._again[folder.name] = error.message
                    yield _going_on(error)
                except OutOfMemory as error:
                    if clock() - lost_s > limits.GROUP_AGAIN_S:
                        if not self._refused_by_member(folder.name):
                            raise
                        replay.again(error)
                        yield _going_on(error)
                        continue
                    # The others of a group that has just lost a machine have yet to free their parts of it.
                    yield Loading("waiting for memory on other machines")
                    await asyncio.sleep(_CHECK_S)
                else:
                    return

    def _refused_by_member(self, name: str) -> bool:
        """True if the model's group failed before its worker here was started: others may do better."""
        model = self._models.get(name)
        return model is not None and _forms(model)

    async def _streamed(self, wanted: _WantedLayers, replay: Replay) -> AsyncGenerator[Loading | Event, None]:
        """The same, as long as the model stays loaded."""
        async for item in self._acquire(wanted):
            if not isinstance(item, EngineProcess):
                yield item
                continue
            if isinstance(item, GroupFront):
                if replay.request.local_only:
                    raise NoMachine(
                        f"{wanted.name} is on several machines, and this request stays on one.",
                        hint="Choose a model that fits this machine (fleetctl models).",
                    )
                replay.of_group = True
            request = replay.repeatable if replay.of_group else replay.request
            async with aclosing(item.stream(request)) as events:
                async for event in events:
                    yield event

    async def ask(
        self,
        folder: ModelFolder,
        question: Question[A],
        *,
        evict: bool = True,
        progress: Callable[[Loading | Prefill], None] = no_progress,
    ) -> A:
        """Load the model if needed, then its answer. Cancelling cancels the question.

        ``evict``: idle models make room for it. ``progress`` is told of the load, then of the work. Raises as
        ``EngineProcess.ask``, and why the load failed.
        """
        with self._claim(folder.name):
            async with aclosing(self._acquire(_WantedLayers(folder), evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, EngineProcess):
                        return await step.ask(question, progress)
                    progress(step)
        raise EngineDied(f"The engine for {folder.name} did not load.")

    async def vectors(
        self, folder: ModelFolder, request: EmbedTexts | RerankTexts, *, evict: bool = True
    ) -> AsyncGenerator[Loading | Event, None]:
        """Load the model if needed (yields Loading), then yield the request's events up to Finished.

        ``evict``: idle models make room for it. Raises as ``EngineProcess.vectors``, and why the load failed.
        Closing the generator cancels the request.
        """
        with self._claim(folder.name):
            async with aclosing(self._acquire(_WantedLayers(folder), evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, Loading):
                        yield step
                        continue
                    # It may have been loaded while a prompt was read.
                    self._tell_of_prompts()
                    async with aclosing(step.vectors(request)) as events:
                        async for event in events:
                            yield event

    def _tell_of_prompts(self) -> None:
        """Tell workers that make vectors whether a worker here reads a chat's prompt: that goes first."""
        reading = any(worker.reads_prompts for worker in self._workers())
        for worker in self._workers():
            if worker.settings.purpose != "chat":
                worker.prompts_read(reading)

    async def load(self, folder: ModelFolder, over: Collection[str] | None = None) -> None:
        """Load without a request. ``over`` and what it raises: as ``stream``."""
        async for _ in self.loading(folder, over=over):
            pass

    async def loading(
        self,
        folder: ModelFolder,
        *,
        evict: bool = True,
        over: Collection[str] | None = None,
        split: Split | None = None,
    ) -> AsyncGenerator[Loading, None]:
        """Load without a request and yield the progress. ``evict`` and what it raises: as ``ask``. ``split``:
        how the machines ``over`` hold it; None leaves it open."""
        wanted = _WantedLayers(folder, over=_names(over), split=split)
        with self._claim(folder.name):
            async with aclosing(self._acquire(wanted, evict=evict)) as steps:
                async for step in steps:
                    if isinstance(step, Loading):
                        yield step

    def engine(self, folder: ModelFolder) -> EngineProcess | None:
        """The worker that has the whole model, if it is ready."""
        return self._ready(folder.name)

    def loading_engine(self, folder: ModelFolder) -> EngineProcess | None:
        """The worker that has the whole model, or is about to."""
        model = self._models.get(folder.name)
        return model.first if model is not None and model.state in ("loading", "ready") else None

    def takes_others(self, folder: ModelFolder, over: Collection[str] | None) -> bool:
        """True if a load of the model would need other machines. ``over``: as ``stream``. Reads headers of
        files."""
        if over is not None:
            return bool(over)
        if folder.source == "part":
            return True
        rules = self.weight_rules()
        need = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
        return need.n_bytes > rules.budget_bytes

    def _ready(self, name: str) -> EngineProcess | None:
        model = self._models.get(name)
        return model.first if model is not None and model.state == "ready" else None

    def facts(self, name: str) -> Ready | None:
        """What the worker that has the whole model says of it, if it is ready."""
        engine = self._ready(name)
        return engine.facts if engine is not None else None

    @asynccontextmanager
    async def assisting(
        self,
        folder: ModelFolder,
        first: int,
        last: int,
        *,
        progress: Callable[[Loading], None] = no_progress,
        asked_by: str = "",
    ) -> AsyncIterator[EngineProcess]:
        """A ready worker that has layers [first, last), not unloaded for others meanwhile.

        One is loaded if need be, with these layers alone (with the whole model where ``last`` is 0): whoever
        asks for some has found that its prompts do not fit beside all of them. No model makes room for other
        machines' prompts. ``progress`` is told of the load. ``asked_by``: a machine whose group has these
        layers until the end, by name. Raises as ``stream``.
        """
        name = await self._with_layers(folder, first, last, progress, asked_by)
        with self._claim(name), self._asked_by(name, asked_by):
            yield self._models[name].first

    @asynccontextmanager
    async def ranked(
        self,
        folder: ModelFolder,
        place: RingPlace,
        *,
        progress: Callable[[Loading], None] = no_progress,
        asked_by: str = "",
        carried: Callable[[], Carried] = lambda: "",
    ) -> AsyncIterator[EngineProcess]:
        """A ready worker that is this rank of another machine's model, and ends with the context. No model
        makes room for it. ``carried``: how its bytes travel. Raises as ``stream``."""
        wanted = _WantedLayers(folder, ring=place)
        self._carried[wanted.name] = carried
        try:
            with self._claim(wanted.name), self._asked_by(wanted.name, asked_by):
                await self._load_beside(wanted, progress)
                yield self._models[wanted.name].first
        finally:
            await self.unload(wanted.name)
            self._carried.pop(wanted.name, None)

    async def let_go(self, folder: ModelFolder, first: int, last: int) -> None:
        """End a worker that has layers [first, last) and not the others, unless somebody uses it."""
        name = _WantedLayers(folder, first, last).name
        model = self._models.get(name)
        if model is not None and model.first.settings.part_of and not self._in_use(name):
            log.info("engine.unload", model=name, reason="no machine needs these layers")
            await self.unload(name)

    def part(self, folder: ModelFolder) -> tuple[int, int] | None:
        """Layers [first, last) of a model that a worker has, or is loading, which has not all of it."""
        found = [
            (model.first.settings.first_layer, model.first.settings.last_layer)
            for model in self._models.values()
            if model.first.settings.part_of == folder.name
            and model.first.settings.ring is None
            and model.state in ("loading", "ready")
        ]
        return max(found, key=lambda part: part[1] - part[0], default=None)

    def held_of(self, folder: ModelFolder, first: int, last: int) -> int:
        """Bytes of memory that the worker of just these layers holds; 0 without one."""
        return self._held_for(_WantedLayers(folder, first, last))

    def held_by_rank(self, folder: ModelFolder, place: RingPlace) -> int:
        """Bytes of memory that the worker of this rank holds; 0 without one."""
        return self._held_for(_WantedLayers(folder, ring=place))

    def _held_for(self, wanted: _WantedLayers) -> int:
        model = self._models.get(wanted.name)
        return sum(worker.claimed_bytes for worker in model.workers) if model is not None else 0

    def holds(self, folder: ModelFolder, first: int, last: int) -> bool:
        """True if a ready worker has layers [first, last), so that ``assisting`` would load nothing."""
        return self._holder(folder, first, last) is not None

    def _holder(self, folder: ModelFolder, first: int, last: int) -> str | None:
        for name, model in self._models.items():
            held = model.first.settings
            if self._turns is not None and name == self._turns.giving_way:
                continue
            if model.state == "ready" and (
                (name == folder.name and not held.group)
                or (held.path == str(folder.path) and held.first_layer <= first < last <= held.last_layer)
            ):
                return name
        return None

    async def _with_layers(
        self,
        folder: ModelFolder,
        first: int,
        last: int,
        progress: Callable[[Loading], None],
        asked_by: str,
    ) -> str:
        """The name of a worker that has these layers; loads one for ``asked_by`` if there is none."""
        if (name := self._holder(folder, first, last)) is not None:
            return name
        whole = self._models.get(folder.name)
        if whole is not None and whole.state == "loading" and not whole.first.settings.group:
            first = last = 0
        wanted = _WantedLayers(folder, first, last)
        # Another group that asked for the same layers and leaves does not end the load for this one.
        with self._claim(wanted.name), self._asked_by(wanted.name, asked_by):
            await self._load_beside(wanted, progress)
        return wanted.name

    async def _load_beside(
        self, wanted: _WantedLayers, progress: Callable[[Loading], None] = no_progress
    ) -> None:
        """Load it if it fits beside what is loaded. Raises as ``stream``."""
        try:
            async for step in self._acquire(wanted, evict=False):
                if isinstance(step, Loading):
                    progress(step)
        except OutOfMemory:
            # No request of this machine asked for it: the failure is not shown here.
            if (model := self._models.get(wanted.name)) is not None and model.state == "failed":
                del self._models[wanted.name]
                await self._end(model)
            raise

    async def unload(self, name: str) -> bool:
        """End a model's workers; their running requests fail with ModelUnloaded. False if none runs."""
        self._stays_s.pop(name, None)
        parts = [other for other, model in self._models.items() if model.first.settings.part_of == name]
        found = [model for n in (name, *parts) if (model := self._models.pop(n, None)) is not None]
        await self._end(*found)
        return bool(found)

    async def _end(self, *models: LoadedModel) -> None:
        """Stop models that have left the table; until their workers are gone, their memory is counted. If it
        is cancelled, they end all the same."""
        for model in models:
            self._ending.append(model)
            model.ending().add_done_callback(partial(self._ended, model))
        await asyncio.gather(*(model.stop() for model in models))

    def _ended(self, model: LoadedModel, _ending: asyncio.Task[None]) -> None:
        self._ending.remove(model)

    @property
    def busy(self) -> bool:
        """True while a worker loads, or computes for anybody."""
        return any(model.busy or model.state == "loading" for model in self._models.values())

    def status(self) -> list[EngineStatus]:
        pinned = self.pinned()
        return [
            msgspec.structs.replace(
                self._with_earlier(model.status),
                pinned=name in pinned,
                again=self._again.get(name, "") if model.state == "loading" else "",
                asked_by=sorted({*self._askers.get(name, ())} - {""}),
                **({"carried": carried()} if (carried := self._carried.get(name)) is not None else {}),
            )
            for name, model in self._models.items()
        ]

    def _with_earlier(self, status: EngineStatus) -> EngineStatus:
        """Its figures that only grow include those of the model's workers before this one."""
        if (earlier := self._earlier.get(status.model)) is None:
            return status
        return msgspec.structs.replace(
            status,
            disk_written_bytes=earlier.disk_written_bytes + status.disk_written_bytes,
            disk_dropped=earlier.disk_dropped + status.disk_dropped,
        )

    async def close(self) -> None:
        """End all workers."""
        for task in (self._measuring, self._cutting, self._second):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(self.unload(name) for name in list(self._models)))
        # Of those whose requests were cancelled before their workers had ended.
        await asyncio.gather(*(model.stop() for model in self._ending))

    @contextmanager
    def _asked_by(self, name: str, machine: str) -> Iterator[None]:
        """Meanwhile a machine's group has a worker's layers; "" is no group."""
        self._askers.setdefault(name, []).append(machine)
        try:
            yield
        finally:
            self._askers[name].remove(machine)
            if not self._askers[name]:
                del self._askers[name]

    @contextmanager
    def _claim(self, name: str) -> Iterator[None]:
        """Meanwhile the model is not unloaded to make room for others."""
        self._claims[name] = self._claims.get(name, 0) + 1
        try:
            yield
        finally:
            self._claims[name] -= 1
            if not self._claims[name]:
                self._again.pop(name, None)
            self._let_go.set()

    # ---- in turn ---------------------------------------------------------------------------------------

    def freed_by(self, folder: ModelFolder) -> int:
        """Bytes of memory that unloading a model would give back."""
        model = self._models.get(folder.name)
        return self.held_bytes - self._held_besides(model.first) if model is not None else 0

    def why_stays(self, folder: ModelFolder) -> str:
        """Why a model cannot be unloaded for a while and loaded again; "" if it can, or is not loaded."""
        name, model = folder.name, self._models.get(folder.name)
        # The first come are served first: a model that somebody waits for does not wait for one turn more.
        awaited = (other for other, claims in self._claims.items() if claims and other != name)
        if self._turns is not None or any(self._ready(other) is None for other in awaited):
            return "another model is to be loaded first"
        if self._in_use(name):
            return f"{name} is in use"
        if any(other.first.settings.part_of == name for other in self._models.values()):
            return f"other machines use layers of {name}"
        if model is None:
            return ""
        if why := self.why_pinned(folder):
            return why
        if model.first.settings.group or model.first.settings.ring is not None or len(model.workers) > 1:
            return f"other machines hold some of {name}"
        return f"{name} is in use" if model.busy or model.state == "loading" else ""

    def why_pinned(self, folder: ModelFolder) -> str:
        """Says so of a model that is pinned; "" of others."""
        return f"{folder.name} is pinned" if folder.name in self.pinned() else ""

    @asynccontextmanager
    async def in_turn(self, first: ModelFolder, second: ModelFolder) -> AsyncIterator[None]:
        """Meanwhile ``first`` can be loaded into the memory that ``second`` has or needs: that is unloaded,
        and no other load begins.

        At the end ``first`` is unloaded once nobody uses it; who asks for it from then on waits. Then
        ``second`` begins to load, if it was loaded or all went well; a request for it shares that load.
        Raises Overloaded, before anything is unloaded, if ``second`` has to stay as it is.
        """
        name = second.name
        if why := self.why_stays(second) or self.why_pinned(first):
            raise Overloaded(
                f"{name} and {first.name} cannot take turns: {why}.", hint="Send it again later."
            )
        again, stays_s = name in self._models, self._stays_s.get(name)
        turns = self._turns = _Turns(first.name, allowed=first.name)
        try:
            with self._claim(name):
                log.info("engine.in_turn", model=first.name, then=name)
                await self.unload(name)
                yield
            again = True
        finally:
            # In a task of its own, for a client that leaves must not leave two models behind.
            self._second = asyncio.create_task(
                self._second_turn(turns, first, second if again else None, stays_s), name=f"second-{name}"
            )
            await asyncio.shield(self._gone(turns, second))

    async def _gone(self, turns: _Turns, second: ModelFolder) -> None:
        """Until the first model is gone."""
        while self._turns is turns and turns.allowed != second.name:
            await turns.changed.wait()

    async def _second_turn(
        self, turns: _Turns, first: ModelFolder, second: ModelFolder | None, stays_s: float | None
    ) -> None:
        try:
            turns.allow("")
            # Requests that wait for this turn to be over have claims, too.
            while self._claims.get(first.name, 0) > turns.put_off and self.loading_engine(first) is not None:
                self._let_go.clear()
                await self._let_go.wait()
            await self.unload(first.name)
            if second is not None:
                if stays_s is not None:
                    self._stays_s[second.name] = stays_s
                turns.allow(second.name)
                await self.load(second)
        except FleetError as error:
            log.warning("engine.not_again", model=first.name, code=error.code, reason=error.message)
        finally:
            self._turns = None
            turns.allow("")

    async def _acquire(
        self, wanted: _WantedLayers, *, evict: bool = True
    ) -> AsyncGenerator[Loading | EngineProcess, None]:
        """Yield progress, then the ready engine. Two first requests share one load; idle models make room."""
        while True:
            while (turns := self._turns) is not None and not self._may_go_on(turns, wanted):
                with self._put_off(turns, wanted.name):
                    yield Loading(f"{WAITING}a model that has to make room")
                    await turns.changed.wait()
            # One load at a time: each looks at the memory that is free, and would count the same bytes.
            while other := self._loading_besides(wanted):
                yield Loading(f"{WAITING}{other.name} to load")
                with suppress(FleetError):  # its own requests hear of that
                    async for _ in other.loaded():
                        pass
            if (model := await self._running(wanted)) is None:
                continue
            try:
                async for progress in model.loaded():
                    yield progress
            except OutOfMemory:
                if not evict or not await self._evict_idle(
                    "memory is needed", besides=wanted.name, kept=self.pinned()
                ):
                    raise
                continue
            if not _is_as_wanted(model, wanted):
                continue
            yield model.first
            return

    def _may_go_on(self, turns: _Turns, wanted: _WantedLayers) -> bool:
        """True for a model that needs no load, or whose turn it is."""
        if wanted.name == turns.giving_way:
            return False
        return self._ready(wanted.name) is not None or wanted.name == turns.allowed

    @contextmanager
    def _put_off(self, turns: _Turns, name: str) -> Iterator[None]:
        """Meanwhile a request waits for the end of a turn, which does not wait for the request."""
        count = int(name == turns.first)
        turns.put_off += count
        self._let_go.set()
        try:
            yield
        finally:
            turns.put_off -= count

    def _loading_besides(self, wanted: _WantedLayers) -> LoadedModel | None:
        """Another model whose load is to be over first.

        Layers for another machine do not wait for a group that is formed here: its members load first, and
        one of them may wait for these.
        """
        own = self._models.get(wanted.name)
        if own is not None and own.state in ("loading", "ready"):
            return None
        loading = (model for model in self._models.values() if model.state == "loading")
        for_others = wanted.last or wanted.ring is not None
        return next((each for each in loading if not (for_others and _forms(each))), None)

    async def _running(self, wanted: _WantedLayers) -> LoadedModel | None:
        """The model, its workers started if need be. None if another has begun to load meanwhile: that one
        is first."""
        name = wanted.name
        ready = self._models.get(name)
        if ready is not None and ready.state == "ready" and _is_as_wanted(ready, wanted):
            return ready
        sizes: ModelSizes | None = None
        if ready is None or ready.state != "loading":
            # A disk that hangs holds up this load alone.
            sizes = await self._sizes(wanted)
        async with self._starting:
            model = self._models.get(name)
            if model is not None and model.state in ("loading", "ready"):
                if model.state == "loading" or _is_as_wanted(model, wanted):
                    return model
                self._check_unused(model)
            if model is not None:
                # Only this one: unloading would also end what helps with other layers.
                del self._models[name]
                await self._end(model)
            if self._loading_besides(wanted):
                return None
            drafter = None if wanted.last else await self.drafter(wanted.folder)
            sizes = sizes or await self._sizes(wanted)
            model = LoadedModel(self._new_workers(wanted, drafter, sizes), self._exited)
            # It measures its speed at the end of its load.
            self._end_idle_time()
            self._models[name] = model
            try:
                await model.start()
            except BaseException:
                # Refused or cancelled: the next request must not wait for what was never started.
                if self._models.get(name) is model:
                    del self._models[name]
                raise
            return model

    def _check_unused(self, model: LoadedModel) -> None:
        """Raises Overloaded unless the request that is placed now is the model's only one: then it is loaded
        anew, over other machines."""
        if model.busy or self._claims.get(model.name, 0) > 1:
            raise Overloaded(
                f"{model.name} is in use, and on other machines than those that were named.",
                hint="Leave `placement` out, or send it again once its requests have ended.",
            )

    async def _sizes(self, wanted: _WantedLayers) -> ModelSizes:
        """What a model's files say; of its layers only if other machines may hold some."""
        rules, other_machines = self.weight_rules(), bool(wanted.over)
        return await file_threads.look(model_sizes.read, wanted.folder, rules, layers=other_machines)

    def _new_workers(
        self, wanted: _WantedLayers, drafter: Path | None, sizes: ModelSizes
    ) -> Sequence[EngineProcess]:
        """What is to compute it, not started: one worker. ``drafter``: the folder of what drafts from its
        hidden states. ``sizes``: as its files have just told."""
        folder, need = wanted.folder, sizes.need
        rules = self.weight_rules()
        if need.arithmetic == "float32" and not rules.available:
            log.info("engine.float32", model=folder.name, reason="onnxruntime is not installed")
        settings = self._settings(wanted, drafter)
        options: dict[str, Any] = {
            "weights_bytes": need.n_bytes,
            "load_within_s": load_times.stall_s(self.load_s(folder)),
            "is_bounded": address_space.is_bounded(rules.accelerator),
            "restarts": self._deaths.get(wanted.name, 0),
            "on_work": self._end_idle_time,
            "on_reading": self._tell_of_prompts,
        }
        if wanted.split == "tensors" and wanted.over and self.ranks is not None:
            if folder.source == "part":
                raise ModelUnsupported(
                    f"{folder.name} is here in part, and machines that divide every layer need all files.",
                    hint="Deal its layers out (--split layers), or get all of it: "
                    f"fleetctl models pull {folder.name}",
                )
            ring = self.ranks(folder, sorted(wanted.over), sizes)
            options["weights_bytes"] //= 1 + len(wanted.over)
            return [GroupFront(self._settings(wanted, None), ring, **options)]
        if wanted.ring is not None:
            options["weights_bytes"] //= wanted.ring.size
        whole = not (wanted.last or wanted.ring)
        too_large = whole and (need.n_bytes > rules.budget_bytes or folder.source == "part")
        group = None
        if wanted.over or (wanted.over is None and too_large):
            group = self.groups(folder, sizes, sorted(wanted.over or ()))
        if group is not None:
            return [GroupFront(settings, group, **options)]
        if whole and folder.source == "part":
            raise NoMachine(
                f"{folder.name} is here in part, and there are no other machines that may hold the rest.",
                hint=f"Get all of it: fleetctl models pull {folder.name}",
            )
        return [EngineProcess(settings, **options)]

    def _settings(self, wanted: _WantedLayers, drafter: Path | None) -> WorkerSettings:
        folder = wanted.folder
        record = self.record_path(folder)
        return WorkerSettings(
            name=wanted.name,
            path=str(folder.path),
            record=str(record) if record else "",
            drafter=str(drafter) if drafter else "",
            first_layer=wanted.first,
            last_layer=wanted.last,
            part_of=folder.name if wanted.last or wanted.ring else "",
            purpose=folder.purpose,
            held_bytes=self.held_bytes,
            ring=wanted.ring,
            # Layers for others hold rows as those who ask for them do.
            kv_bits=self.kv_bits(wanted.name),
            **{name: getattr(self.options, name) for name in WorkerOptions.__struct_fields__},
        )

    async def _evict_idle(
        self, reason: str, *, besides: str = "", idle_s: float = 0.0, kept: Collection[str] = ()
    ) -> bool:
        """Unload the model that has been idle longest, at least for ``idle_s``. False if there is none."""
        idle = [
            (model.first.idle_s, n)
            for n, model in self._models.items()
            if n != besides
            and n not in kept
            and model.state == "ready"
            and not self._in_use(n)
            and model.first.idle_s >= idle_s
        ]
        if not idle:
            return False
        _, name = max(idle)
        log.info("engine.unload", model=name, reason=reason, for_model=besides)
        return await self.unload(name)

    def _in_use(self, name: str) -> bool:
        return self._claims.get(name, 0) > 0

    def _exited(self, model: LoadedModel, worker: EngineProcess) -> None:
        name = model.name
        if worker is model.first:
            self._earlier[name] = self._with_earlier(model.status)
        if worker.pid is not None:
            self.ended(worker.pid)
        # Unwanted deaths only, and one for all workers that end with the one that died.
        if self._models.get(name) is model and worker is model.lost and worker.facts is not None:
            self._deaths[name] = self._deaths.get(name, 0) + 1


def _names(over: Collection[str] | None) -> frozenset[str] | None:
    return None if over is None else frozenset(over)


def _forms(model: LoadedModel) -> bool:
    """True if it waits for the other machines of its group, and has no worker yet."""
    return bool(model.first.settings.group) and model.first.pid is None


def _is_as_wanted(model: LoadedModel, wanted: _WantedLayers) -> bool:
    """True if just the machines that are wanted hold it with this one, in the way that is wanted."""
    settings = model.first.settings
    if wanted.over is None:
        return True
    if wanted.split is not None and (settings.ring is not None) != (wanted.split == "tensors"):
        return False
    return {member.name for member in settings.group} == wanted.over


def _going_on(error: FleetError) -> Loading:
    """What a request is told while another group forms because of ``error``."""
    return Loading(f"going on: {error.message}"[: limits.CARD_TEXT_CHARS])
