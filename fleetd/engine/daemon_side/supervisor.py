"""One engine worker seen from the daemon: start it, talk to it, notice that it died or stalled, end it.

The worker's socket closes the moment its process does, so death is known at once, whatever the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from typing import Any, ClassVar, TypeVar

import msgspec
import structlog

from fleetd import limits
from fleetd.control.daemon_status import EngineState, EngineStatus
from fleetd.control.prefill_plan import StepView
from fleetd.engine import protocol
from fleetd.engine.cpu import openmp_file
from fleetd.engine.daemon_side.load_watch import LoadWatch
from fleetd.engine.daemon_side.memory_watch import MemoryWatch
from fleetd.engine.daemon_side.rank_watch import RankWatch
from fleetd.engine.measure.stage_times import StageTimes
from fleetd.engine.protocol import (
    Assisted,
    AssistPrefill,
    Cancel,
    Delta,
    DraftFor,
    DraftReport,
    EmbedTexts,
    Event,
    Failed,
    FetchBlocks,
    Finished,
    ForgetOrigins,
    FreeMemory,
    Generate,
    Heartbeat,
    IdleTime,
    LoadFailed,
    Loading,
    MeasuredAgain,
    Prefill,
    PrefillAlone,
    PrefillWithHelpers,
    PromptsRead,
    Question,
    Ready,
    RerankTexts,
    Score,
    ScoringState,
    ServeStage,
    Shutdown,
    StreamTag,
    TakenElsewhere,
    Tokenized,
    ToolCall,
    ToolCallPiece,
    WriteNow,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.streams.channel import SocketSender
from fleetd.errors import (
    EngineDied,
    EngineError,
    EngineStalled,
    FleetError,
    GroupLost,
    ModelUnloaded,
    Overloaded,
    from_code,
)
from fleetd.hardware.memory import resident_bytes
from fleetd.hardware.process_work import work_of
from fleetd.models.names import shown_name
from fleetd.plan.chip_speeds import compiles_late

log = structlog.get_logger(__name__)

A = TypeVar("A")

# A worker's stderr goes to the log; one line of it is never worth more than this.
_LOG_LINE_CHARS = 2000


def no_progress(step: object) -> None:
    """Progress that is not wanted."""


def _reads_prompt(command: object) -> bool:
    """True for what reads a prompt of a chat that somebody waits for, here or at another machine."""
    return isinstance(command, AssistPrefill | Score) or (
        isinstance(command, Generate) and not command.count_only
    )


class EngineProcess:
    """A worker for one model. Create, ``await start()``, ``stream`` any number of requests, ``await stop()``.

    ``weights_bytes``: what the model's weights take in memory. ``load_within_s``: a load that stands still
    for so long is given up. ``is_bounded``: the worker itself bounds the memory of code over a publisher's
    files; else it is ended from here where that takes too much.
    ``on_exit`` is called once when the worker is gone, wanted or not; ``on_work`` whenever it is to do
    something; ``on_reading`` whenever ``reads_prompts`` has changed.
    """

    command: ClassVar[tuple[str, ...]] = (sys.executable, "-m", "fleetd.engine.worker")

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        restarts: int = 0,
        weights_bytes: int = 0,
        load_within_s: float = limits.ENGINE_LOAD_S,
        is_bounded: bool = True,
        on_exit: Callable[[EngineProcess], None] | None = None,
        on_work: Callable[[], None] | None = None,
        on_reading: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self.state: EngineState = "loading"
        self.loading = Loading("starting")
        self._stages = StageTimes()
        self.facts: Ready | None = None
        self.error: FleetError | None = None
        self.restarts = restarts
        self.pid: int | None = None
        self._memory_watch = None if is_bounded else MemoryWatch(settings.name, weights_bytes)
        self._watching: asyncio.Task[None] | None = None
        self.on_exit = on_exit
        self._on_work = on_work
        self._on_reading = on_reading
        self._heartbeat = Heartbeat(0)
        self._taken_elsewhere = 0
        self._streams: dict[str, asyncio.Queue[Event | FleetError]] = {}
        # Requests whose prompt the worker prepares, with the time they were sent; and those it has not
        # accepted yet.
        self._preparing: dict[str, float] = {}
        self._unaccepted: set[str] = set()
        # Requests whose prompt is being read, for a chat here or elsewhere; and what this worker was told of
        # those of other workers.
        self._reading: set[str] = set()
        self._told_of_prompts = False
        self._changed = asyncio.Condition()
        self._progress_at = self._used_at = self._heard_at = asyncio.get_running_loop().time()
        self._stages.enter(self.loading.stage, self._progress_at)
        self._load_watch = LoadWatch(settings.name, load_within_s, self.loading, self._progress_at)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._socket_sender: SocketSender | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._rank_watch: RankWatch | None = None

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the worker; returns before the model is loaded (see ``loaded``).

        Raises EngineDied if it cannot be started, ModelUnloaded if it was told to stop meanwhile.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        channel, their_channel = socket.socketpair()
        self._socket_sender = SocketSender(channel)
        try:
            with theirs, their_channel:
                self._process = await self._spawn(theirs, their_channel)
            self.pid = self._process.pid
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException as error:
            # Refused or cancelled half way: only this method knows of the sockets and the process.
            ours.close()
            self._socket_sender.close()
            self.kill()
            if self._rank_watch is not None:
                self._rank_watch.close()
            self.state = "failed"
            # Others may wait for this load.
            await self._notify()
            if not isinstance(error, OSError):
                raise
            self.error = EngineDied(f"The engine worker could not be started: {error}.")
            raise self.error from error
        self._tasks = [
            asyncio.create_task(
                self._read(reader, self._writer, self._process), name=f"engine-{self.settings.name}"
            ),
        ]
        if self._process.stderr is not None:
            self._tasks.append(
                asyncio.create_task(
                    self._log_stderr(self._process.stderr), name=f"engine-log-{self.settings.name}"
                )
            )
        if self._rank_watch is not None:
            watching = self._end_if_late(self._rank_watch, self._process)
            self._tasks.append(asyncio.create_task(watching, name=f"rank-{self.settings.name}"))
        self._watch_memory()
        log.info("engine.started", model=self.settings.name, pid=self.pid)
        if self.state == "stopping":
            await self.stop()
            raise self._not_running()

    async def _spawn(self, theirs: socket.socket, their_channel: socket.socket) -> asyncio.subprocess.Process:
        """Start the program with its ends of the two sockets."""
        if self.settings.ring is not None:
            self._rank_watch = RankWatch(self.settings.part_of or self.settings.name)
        watch = self._rank_watch
        try:
            return await self._executed(theirs, their_channel)
        finally:
            if watch is not None:
                watch.started()

    async def _executed(
        self, theirs: socket.socket, their_channel: socket.socket
    ) -> asyncio.subprocess.Process:
        watch = self._rank_watch
        return await asyncio.create_subprocess_exec(
            *self.command,
            *(watch.arguments if watch is not None else ()),
            "--fd",
            str(theirs.fileno()),
            "--streams-fd",
            str(their_channel.fileno()),
            "--settings",
            msgspec.json.encode(self.settings).decode(),
            pass_fds=[
                theirs.fileno(),
                their_channel.fileno(),
                *(watch.inherited if watch is not None else ()),
            ],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # Its own group: a Ctrl-C in the daemon's terminal must not kill answers being drained.
            start_new_session=True,
        )

    async def _end_if_late(self, watch: RankWatch, process: asyncio.subprocess.Process) -> None:
        """End a rank once it is late. Returns when its process has ended."""

        def silent_s() -> float:
            return asyncio.get_running_loop().time() - self._heard_at if self.state == "ready" else 0.0

        with closing(watch):
            if (reason := await watch.late(process, silent_s)) is not None:
                self.error = reason
                log.warning("rank.late", model=self.settings.name, pid=self.pid, reason=reason.message)
                await watch.end(process)

    async def loaded(self) -> AsyncGenerator[Loading, None]:
        """Progress until the model is ready. Raises what the load failed with."""
        seen: Loading | None = None
        while True:
            async with self._changed:
                while self.state == "loading" and self.loading is seen:
                    await self._changed.wait()
                seen = self.loading
            if self.state == "ready":
                return
            if self.state != "loading":
                raise self._not_running()
            yield seen

    async def stop(self) -> None:
        """End the worker: ask, wait ``limits.ENGINE_STOP_S``, kill; requests end with ModelUnloaded.

        One that even the kernel cannot end, as it waits for a dead disk, is left to itself. Idempotent.
        """
        if self.state in ("loading", "ready"):
            self.state = "stopping"
            self.error = self.error or ModelUnloaded(
                f"{self.shown_name} was unloaded.",
                hint="Send the request again, and it is loaded again.",
                retry_after_s=1,
            )
        process, writer = self._process, self._writer
        if process is None or writer is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                writer.write(protocol.encode(Shutdown()))
            try:
                if self._rank_watch is not None:
                    await self._rank_watch.end(process)
                elif not await _ended(process, limits.ENGINE_STOP_S):
                    self.kill()
            except asyncio.CancelledError:
                self.kill()
                raise
            if not await _ended(process, limits.ENGINE_KILL_S):
                log.warning("engine.unkillable", model=self.settings.name, pid=self.pid)
                for task in self._tasks:
                    task.cancel()
                return
        if self._watching is not None:
            self._watching.cancel()
            self._tasks.append(self._watching)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await process.wait()
        openmp_file.remove(process.pid)

    def kill(self, reason: FleetError | None = None) -> None:
        """SIGKILL; requests end with ``reason``. The operating system takes all its memory back."""
        if reason is not None:
            self.error = reason
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    # ---- use -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    def stream(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Events up to and including Finished. Closing the generator cancels the request.

        Raises the error of a Failed request, EngineDied, or Overloaded if the consumer is too slow.
        """
        return self._exchange(request, Finished)

    def vectors(self, request: EmbedTexts | RerankTexts) -> AsyncGenerator[Event, None]:
        """Accepted, then TextsEmbedded or TextsReranked, and at the end Finished. Closing the generator
        cancels it.

        Raises as ``stream``; ModelUnsupported if the model is for something else.
        """
        return self._exchange(request, Finished)

    def assist(self, assist: AssistPrefill) -> AsyncGenerator[Event, None]:
        """Accepted once there is memory for it, and at the end Assisted. Closing the generator cancels it.

        Raises as ``stream``.
        """
        return self._exchange(assist, Assisted)

    def serve(self, stage: ServeStage) -> AsyncGenerator[Event, None]:
        """Accepted once there is memory for it. Closing the generator ends it.

        Raises as ``stream``, and PeerError if the other worker goes.
        """
        return self._exchange(stage, Finished)

    async def ask(self, question: Question[A], progress: Callable[[Prefill], None] = no_progress) -> A:
        """The answer, once there is memory for the work and that is done. Cancelling cancels it.

        Raises as ``stream``; for a Score ModelUnsupported if this model's attention cannot be tapped.
        """
        async with aclosing(self._exchange(question, question.answer)) as events:
            async for event in events:
                if isinstance(event, Prefill):
                    progress(event)
                elif isinstance(event, question.answer):
                    found: A = event
                    return found
        raise self._death()

    def follow(self, follow: DraftFor) -> AsyncGenerator[Event, None]:
        """Accepted, and DraftReport once the text needs no more drafts. Closing the generator cancels it.

        Raises as ``stream``.
        """
        return self._exchange(follow, DraftReport)

    def share(self, share: PrefillWithHelpers) -> None:
        """Prefill a waiting prompt together with others; its streams are given with ``give_stream``.

        Nothing happens if the request has ended.
        """
        self._send(share)

    def alone(self, request_id: str, reason: str = "") -> None:
        """Prefill a prompt here that waits or is being shared. Ignored if there is none."""
        self._send(PrefillAlone(request_id, reason))

    def fetch(self, fetch: FetchBlocks) -> None:
        """Answer a KvMissing; its stream is given with ``give_stream``. Nothing happens if it has ended."""
        self._send(fetch)

    def write_now(self) -> None:
        """Let the worker write the prompts that wait for the disk, though it computes."""
        self._send(WriteNow())

    @property
    def scoring(self) -> ScoringState:
        """Whether the model can score, by its last report."""
        at_load = self.facts.scoring if self.facts is not None else ScoringState()
        return self._heartbeat.scoring or at_load

    def give_idle_time(self, seconds: float) -> None:
        """Let the worker find out what it has not found out yet; 0 stops it."""
        self._send(IdleTime(seconds))

    def free_memory(self, *, prompts: bool) -> None:
        """Let the worker give back buffers that it keeps for reuse and, if ``prompts``, kept prompts."""
        self._send(FreeMemory(prompts))

    def taken_elsewhere(self, n_bytes: int) -> None:
        """Tell the worker how much more other workers hold than when it was loaded."""
        if n_bytes != self._taken_elsewhere and self.state == "ready":
            self._taken_elsewhere = n_bytes
            self._send(TakenElsewhere(n_bytes))

    @property
    def reads_prompts(self) -> bool:
        """True while it reads a chat's prompt: from the request to the first of its answer."""
        return bool(self._reading)

    def prompts_read(self, reading: bool) -> None:
        """Tell a worker that makes vectors whether other workers read prompts of chats."""
        if reading != self._told_of_prompts and self.state == "ready":
            self._told_of_prompts = reading
            self._send(PromptsRead(reading))

    def _note_prompt(self, request_id: str, reading: bool) -> None:
        """A prompt begins or ends to be read."""
        before = self.reads_prompts
        if reading:
            self._reading.add(request_id)
        else:
            self._reading.discard(request_id)
        if self.reads_prompts != before and self._on_reading is not None:
            self._on_reading()

    def forget_origins(self, labels: list[str]) -> None:
        """Let the worker throw away what it keeps of prompts under these labels."""
        self._send(ForgetOrigins(labels))

    async def give_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        """Hand a connected socket to the worker; it is closed here in any case. Raises EngineDied."""
        # One that answers for a group connects to the others while it loads.
        waits = self.state == "loading" and self.settings.group
        if not (self.state == "ready" or waits) or self._socket_sender is None:
            sock.close()
            raise self._not_running()
        await self._socket_sender.give(tag, sock)

    def _send(self, command: protocol.Order) -> None:
        if self.state == "ready" and self._writer is not None:
            # A worker that is gone is noticed where its answers are awaited.
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.write(protocol.encode(command))

    def _not_running(self) -> FleetError:
        return self.error or EngineDied(f"The engine for {self.shown_name} is not running.", retry_after_s=1)

    async def _exchange(
        self,
        command: Generate | AssistPrefill | ServeStage | Question[Any] | DraftFor | EmbedTexts | RerankTexts,
        last: type[Any],
    ) -> AsyncGenerator[Event, None]:
        if self.state != "ready" or self._writer is None:
            raise self._not_running()
        queue: asyncio.Queue[Event | FleetError] = asyncio.Queue(limits.EVENTS_QUEUED)
        now = asyncio.get_running_loop().time()
        if not self._streams:
            self._progress_at = now
        self._streams[command.id] = queue
        if self._on_work is not None:
            self._on_work()
        if isinstance(command, Generate | Question | EmbedTexts | RerankTexts):
            self._preparing[command.id] = now
            self._unaccepted.add(command.id)
            self._watch_memory()
        if _reads_prompt(command):
            self._note_prompt(command.id, True)
        done = False
        try:
            self._writer.write(protocol.encode(command))
            await self._writer.drain()
            while not done:
                event = await queue.get()
                if isinstance(event, FleetError):
                    done = True
                    raise event
                if isinstance(event, Failed):
                    done = True
                    raise from_code(event.code, event.message, hint=event.hint, param=event.param)
                done = isinstance(event, last)
                if isinstance(event, Delta | ToolCallPiece | ToolCall):
                    self._note_prompt(command.id, False)
                yield event
        except ConnectionError as error:
            done = True
            raise self._death() from error
        finally:
            self._streams.pop(command.id, None)
            self._preparing.pop(command.id, None)
            self._unaccepted.discard(command.id)
            self._note_prompt(command.id, False)
            self._used_at = asyncio.get_running_loop().time()
            if not done:
                self._send(Cancel(command.id))

    async def check(self) -> None:
        """Kill a worker that has work and makes no progress. Called every second or so by the pool."""
        now = asyncio.get_running_loop().time()
        name = self.shown_name
        if self.state == "loading" and self.pid is not None:
            await self._check_load(self.pid, now)
        if self.state != "ready" or not self._streams:
            return
        # Prompts are prepared one after the other, so the clock starts anew whenever one is done.
        waiting_since = max(min(self._preparing.values(), default=now), self._progress_at)
        if self._preparing and now - waiting_since > limits.RENDER_S:
            self.kill(
                EngineStalled(
                    f"The chat template of {name} did not finish within {limits.RENDER_S:.0f} s.",
                    hint="The model's template is at fault; choose another model.",
                )
            )
        elif now - self._progress_at > (within_s := self._silent_within_s):
            stalled = f"The engine for {name} made no progress for {within_s:.0f} s."
            # A rank waits for others, any of which may be at fault: its requests go another way.
            self.kill(EngineStalled(stalled) if self.settings.ring is None else GroupLost(stalled))

    @property
    def shown_name(self) -> str:
        """The model's name, for sentences: also of a worker that has some of its layers."""
        return shown_name(self.settings.part_of or self.settings.name)

    @property
    def _silent_within_s(self) -> float:
        """Seconds after which a worker that has work and says nothing will say nothing any more."""
        compiles = self.facts is not None and compiles_late(self.facts.device)
        return limits.ENGINE_COMPILE_S if compiles else limits.ENGINE_STALL_S

    async def _check_load(self, pid: int, now: float) -> None:
        """Take over how far the load is by what its process does, or end it."""
        self.loading = self._load_watch.looked(work_of(pid), now)
        if (stalled := self._load_watch.over(now)) is not None:
            # A process that waits for a dead disk ends when that answers, if ever: no request waits for it.
            self.state = "failed"
            self.kill(stalled)
        await self._notify()

    def _watch_memory(self) -> None:
        """While it loads or prepares prompts, where nothing else bounds what that takes."""
        if self._memory_watch is not None and (self._watching is None or self._watching.done()):
            watching = self._bound_memory(self._memory_watch)
            self._watching = asyncio.create_task(watching, name=f"engine-memory-{self.settings.name}")

    async def _bound_memory(self, watch: MemoryWatch) -> None:
        while self.state == "loading" or (self.state == "ready" and self._preparing):
            resident = resident_bytes(self.pid or 0)
            if self.state == "loading":
                error = watch.loading(resident)
            else:
                error = watch.preparing(resident, self.memory_bytes)
            if error is not None:
                self._end_for_memory(error)
                return
            await asyncio.sleep(limits.WORKER_MEMORY_S)
        watch.prepared()

    def _end_for_memory(self, error: FleetError) -> None:
        """Kill it. Prompts that are being prepared are at fault, or its files; other requests are not."""
        log.warning("engine.memory", model=self.settings.name, pid=self.pid, error=str(error))
        for name in self._preparing:
            if (queue := self._streams.get(name)) is not None and not queue.full():
                queue.put_nowait(error)
        loading, self.state = self.state == "loading", "failed"
        self.kill(error if loading else None)

    @property
    def memory_bytes(self) -> int:
        """What the worker holds of the device's memory, by its last report; nothing once it has ended."""
        if self._process is None or self._process.returncode is not None:
            return 0
        return self._heartbeat.memory_bytes or self._weights_bytes

    @property
    def claimed_bytes(self) -> int:
        """The same, with what running requests were promised and do not use yet; nothing while it loads."""
        heartbeat, held = self._heartbeat, self.memory_bytes
        return max(held, self._weights_bytes + heartbeat.kv_bytes + heartbeat.prefix_bytes) if held else 0

    @property
    def _weights_bytes(self) -> int:
        """Bytes of the layers that it holds; 0 until they are loaded."""
        return self.facts.shape.weights_bytes if self.facts is not None else 0

    @property
    def disk_note(self) -> str:
        """Why the worker writes nothing to the disk at the moment; "" if it may."""
        return self._heartbeat.disk_note

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while there is one."""
        return 0.0 if self._streams else asyncio.get_running_loop().time() - self._used_at

    @property
    def status(self) -> EngineStatus:
        heartbeat, now = self._heartbeat, asyncio.get_running_loop().time()
        status = EngineStatus(
            model=self.settings.name,
            state=self.state,
            stage=self.loading.stage if self.state == "loading" else "",
            done=self.loading.done,
            total=self.loading.total,
            memory_bytes=heartbeat.memory_bytes,
            kv_bytes=heartbeat.kv_bytes,
            prefix_bytes=heartbeat.prefix_bytes,
            prefix_entries=heartbeat.prefix_entries,
            disk_queued_bytes=heartbeat.disk_queued_bytes,
            disk_written_bytes=heartbeat.disk_written_bytes,
            disk_dropped=heartbeat.disk_dropped,
            load_steps=[StepView(stage, round(seconds, 3)) for stage, seconds in self._stages.seconds],
            scoring=self.scoring.state if self.facts is not None else "",
            part_of=self.settings.part_of,
            first_layer=self.settings.first_layer,
            last_layer=self.settings.last_layer,
            prefilling=heartbeat.prefilling,
            decoding=heartbeat.decoding,
            waiting=heartbeat.waiting + len(self._unaccepted),
            assisting=heartbeat.assisting,
            steps=heartbeat.steps,
            progress_age_s=round(now - self._progress_at, 3) if self._streams else 0.0,
            idle_s=round(self.idle_s, 3),
            restarts=self.restarts,
            pid=self.pid,
            error=str(self.error) if self.error else None,
        )
        if self.settings.ring is not None:
            place = self.settings.ring
            status = msgspec.structs.replace(status, rank=place.rank, ranks=place.size)
        if self.facts is None:
            return status
        # A head that is hardly ever right is switched off while it is in use.
        known = msgspec.structs.replace(status, draft_head=heartbeat.draft_head or self.facts.draft_head)
        return _with_facts(known, self.facts)

    # ---- what arrives ----------------------------------------------------------------------------------

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        decoder = protocol.reports()
        try:
            while data := await reader.read(1 << 16):
                for report in decoder.feed(data):
                    await self._take(report)
        except ConnectionError:
            pass
        except (protocol.FrameTooLong, msgspec.DecodeError) as error:
            self.kill(EngineDied(f"The engine for {self.shown_name} sent what cannot be decoded: {error}."))
        except Exception:
            log.exception("engine.reader", model=self.settings.name)
        finally:
            writer.close()
            await self._gone(process)

    async def _take(self, report: protocol.Report | protocol.Unfit) -> None:
        now = self._heard_at = asyncio.get_running_loop().time()
        match report:
            case protocol.Unfit(request_id, reason):
                self._on_unfit(request_id, reason)
            case Heartbeat():
                self._on_heartbeat(report, now)
            case Loading():
                self.loading = report
                self._load_watch.told(report, now)
                self._stages.enter(report.stage, now)
                await self._notify()
            case Ready():
                self.facts, self._used_at = report, now
                self._stages.end(now)
                if self.state == "loading":
                    self.state = "ready"
                log.info(
                    "engine.ready",
                    model=self.settings.name,
                    device=report.device,
                    load_s=round(report.load_s, 2),
                )
                await self._notify()
            case MeasuredAgain():
                if self.facts is not None:
                    self.facts = msgspec.structs.replace(self.facts, speed=report.speed)
                log.info("engine.measured", model=self.settings.name, doubt=report.speed.doubt)
            case LoadFailed(code, message, hint):
                self.error = from_code(code, message, hint=hint)
                self.state = "failed"
                await self._notify()
            case _:
                self._on_event(report, now)

    def _on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        # One that can only wait for other machines is as alive as one that computes, and bounds its waits
        # itself.
        if heartbeat.steps != self._heartbeat.steps or heartbeat.blocked:
            self._progress_at = now
        if heartbeat.disk_note not in ("", self._heartbeat.disk_note):
            log.warning(
                "cache.unavailable",
                model=self.settings.name,
                reason=heartbeat.disk_note,
                note="prompts are kept in memory only",
            )
        self._heartbeat = heartbeat

    def _on_event(self, event: Event, now: float) -> None:
        """Pass an event to the request that it belongs to, or end that one if its reader is too slow."""
        self._progress_at = now
        self._preparing.pop(event.id, None)
        if not isinstance(event, Tokenized):
            self._unaccepted.discard(event.id)
        queue = self._streams.get(event.id)
        if queue is None:
            return  # cancelled here; its last events were already on the way
        if queue.full():
            self._end_stream(event.id, Overloaded("The answer is read too slowly; it was stopped."))
            return
        queue.put_nowait(event)

    def _on_unfit(self, request_id: str, reason: str) -> None:
        """A bug in the engine costs the request that it is about, and none of the others."""
        log.error("engine.unfit", model=self.settings.name, request=request_id, reason=reason)
        self._end_stream(request_id, EngineError("The engine reported what cannot be about this answer."))

    def _end_stream(self, request_id: str, error: FleetError) -> None:
        """End a request here and in the worker, whatever still waits to be read of it."""
        queue = self._streams.pop(request_id, None)
        if queue is None:
            return
        while queue.full():
            queue.get_nowait()
        queue.put_nowait(error)
        self._send(Cancel(request_id))

    async def _gone(self, process: asyncio.subprocess.Process) -> None:
        """The worker's end of the socket closed: it exited, crashed or was killed."""
        before, self.state = self.state, "failed"
        self.error = self.error or self._death()
        if self._socket_sender is not None:
            self._socket_sender.close()
        if before != "stopping":
            self.kill()  # a worker that closed its socket but lives on would keep the memory
            await process.wait()
            openmp_file.remove(process.pid)
        if before in ("loading", "ready"):
            log.warning("engine.died", model=self.settings.name, pid=self.pid, status=process.returncode)
        for queue in self._streams.values():
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(self.error or self._death())
        await self._notify()
        if self.on_exit is not None:
            self.on_exit(self)

    def _death(self) -> FleetError:
        return self.error or EngineDied(
            f"The engine for {self.shown_name} ended in the middle of its work.",
            hint="Send the request again: a new engine starts with it. The daemon's log has the reason.",
            retry_after_s=1,
        )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _log_stderr(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # a line longer than the stream's buffer: drop it, keep reading
                continue
            if not line:
                return
            log.info(
                "engine.stderr",
                model=self.settings.name,
                line=line.decode(errors="replace").rstrip()[:_LOG_LINE_CHARS],
            )


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _with_facts(status: EngineStatus, facts: Ready) -> EngineStatus:
    """Add what the worker reported of its model when that was loaded, or measured again."""
    arithmetic = facts.arithmetic
    return msgspec.structs.replace(
        status,
        device=facts.device,
        shape=facts.shape,
        speed=facts.speed,
        kv_budget_bytes=facts.kv_budget_bytes,
        prefix_budget_bytes=facts.prefix_budget_bytes,
        arithmetic=arithmetic.text if arithmetic else "",
        speculation=facts.speculation,
    )
