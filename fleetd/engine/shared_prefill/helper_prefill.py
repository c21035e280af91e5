"""One part of another machine's prefill: the side of a helper.

    home ── tokens, cached prefix ──► this helper ── keys and values ──► home
                   the one before ──►             ── hidden states, or rows so far ──► the one after

Nothing of it stays here but what ``warm`` gives. The loop asks ``ready``, then ``step``, until it is
``finished``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import AssistPrefill, StepTime
from fleetd.engine.shared_prefill import frame_schedule
from fleetd.engine.shared_prefill.frame_schedule import Incoming
from fleetd.engine.shared_prefill.frame_writer import FrameWriter
from fleetd.engine.shared_prefill.helper_work import helper_work
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.row_wire import RowWire
from fleetd.engine.shared_prefill.step_times import HelperTimes
from fleetd.engine.shared_prefill.warm_store import WarmCaches
from fleetd.engine.streams.frames import HEAD_BYTES, Connect, FrameHeader, FramePipe
from fleetd.errors import FleetError, InvalidValue, PeerLost, from_code
from fleetd.plan.prefill.split import WarmRows, checked

# What may be unsent of a stream whose other end leaves, having all that it needs: the last head and the end.
_TAIL_BYTES = HEAD_BYTES + limits.KIB
_OUTGOING = frame_schedule.to_home, frame_schedule.to_next


class HelperPrefill:
    """Machine ``assist.rank``'s part of ``assist.split``.

    Args:
        stage: a model, or the part of one that has the layers; ``layout`` is ``KvLayout.of`` it.
        warm: rows of an earlier prompt that are here, as ``assist.warm`` names them.
        connect: opens this assist's streams. Its pipes wake the scheduler, which then asks ``ready`` again.
        clock: monotonic seconds.

    Raises:
        InvalidValue: the split is none, or not of this model, or needs layers that are not here.
    """

    def __init__(
        self,
        stage: Stage,
        layout: KvLayout,
        assist: AssistPrefill,
        connect: Connect,
        *,
        warm: WarmCaches | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        split, rank = checked(assist.split), assist.rank
        if split.layers != stage.prefilled or not 0 <= rank < split.helpers:
            raise InvalidValue(
                f"Helper {rank} of {split} has no part in a model of {stage.prefilled} layers."
            )
        self._split, self._clock = split, clock
        # The cached prefix comes as it is held; what helpers compute goes as was agreed.
        self._held, self._wire = RowWire(layout), RowWire(layout, assist.wire_bits)
        self._assist, self._warm = assist, warm
        self._work = helper_work(stage, layout, split, rank, warm)
        self._times = HelperTimes(clock)
        self._hashes: dict[int, bytes] = {}
        self._error: FleetError | None = None
        self._ended = False
        # Streams whose other ends have left, having all they need.
        self._left: set[str] = set()
        self._closed = False
        self._pipes: dict[str, FramePipe] = {}
        self._incoming: dict[str, Incoming] = {}
        self._writers: dict[str, FrameWriter] = {}
        try:
            self._open(connect, rank)
        except BaseException:
            self.close()
            raise

    def _open(self, connect: Connect, rank: int) -> None:
        split, held, wire = self._split, self._held.layout, self._wire
        warm = None if self._warm is None else self._warm.rows
        streams = {"home": frame_schedule.to_helper(split, rank, held, warm)}
        if rank:
            streams["in"] = frame_schedule.to_next(split, rank - 1, wire.sent)
        if split.has_next(rank):
            streams["out"] = iter(())
        for name, heads in streams.items():
            buffers = self._buffers if name == "in" else self._work.buffers
            incoming = self._incoming[name] = Incoming(name, heads, held, buffers)
            self._pipes[name] = connect(name, incoming.place)
        to_home, to_next = (each(split, rank, wire.sent) for each in _OUTGOING)
        self._writers["home"] = FrameWriter(self._pipes["home"], to_home, self._hashes, wire)
        if "out" in streams:
            self._writers["out"] = FrameWriter(self._pipes["out"], to_next, self._hashes, wire)

    def _buffers(self, head: FrameHeader) -> list[memoryview]:
        return self._wire.memory(head) or self._work.buffers(head)

    # ---- turns -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if ``step`` can do something or has an error to raise; takes in what has arrived."""
        self._receive()
        idle = not (self._error or self.finished or self._computable)
        self._times.waits.idle(idle)
        return not idle

    @property
    def finished(self) -> bool:
        """Everything is computed and sent."""
        return self._ended and all(
            name in self._left or pipe.backlog == 0 for name, pipe in self._pipes.items()
        )

    @property
    def due_s(self) -> float | None:
        """When, on the clock, ``step`` gives up what is waited for; None while nothing is."""
        since = self._times.waits.since
        return None if since is None else since + limits.SHARE_IDLE_S

    @property
    def progress(self) -> int:
        """Tokens that the work done so far amounts to."""
        return int(self._work.fraction * len(self._work.tokens))

    def step(self) -> int:
        """Compute what can be computed without waiting, for about ``SHARE_STEP_S``; returns the progress.

        Raises:
            PeerError: another machine is lost, or breaks the protocol. The message begins with its stream's
                name. Nothing more will come.
        """
        before = self.progress
        begun = self._clock()
        if not self.ready and self.due_s is not None and begun >= self.due_s:
            self._error = PeerLost(f"home: nothing came for {limits.SHARE_IDLE_S:.0f} s.")
        while self._error is None and self._computable:
            started = self._clock()
            self._work.compute(self._writers["home"], self._writers.get("out"))
            self._end()
            self._times.computed.add(started, self._clock())
            self._receive()
            if self._clock() - begun >= limits.SHARE_STEP_S:
                break
        if self._error is not None:
            raise self._error
        return self.progress - before

    @property
    def _computable(self) -> bool:
        queued = any(writer.backlog > limits.SHARE_QUEUED_BYTES for writer in self._writers.values())
        return self._work.computable and not queued

    def _end(self) -> None:
        """Send the end of the streams once everything is queued."""
        if self._work.computed and not self._ended:
            self._writers["home"].done()
            if "out" in self._writers:
                self._writers["out"].finish()
            self._ended = True

    def _receive(self) -> None:
        """Take in all frames that have arrived."""
        if self._closed or self._error is not None:
            return
        for name, pipe in self._pipes.items():
            # What comes before this helper's part is of use once its tokens and its prefix are here.
            early = name == "in" and self._incoming["home"].left
            if early or name in self._left:
                continue
            try:
                self._receive_from(name, pipe)
            except FleetError as error:
                if not self._over(name, pipe):
                    self._error = from_code(error.code, f"{name}: {error.message}", hint=error.hint)
                    return
                self._left.add(name)

    def _receive_from(self, name: str, pipe: FramePipe) -> None:
        incoming = self._incoming[name]
        while (frame := pipe.receive()) is not None:
            if not incoming.began and name == "home":
                self._hashes.update(frame_schedule.prefixes(self._split, bytes(frame.buffers[0])))
            incoming.take_frame(frame, self._hashes)
            self._times.received += frame.head.nbytes
            (self._wire if name == "in" else self._held).unpack(frame, self._work.row_buffers)
            self._work.take_frame(frame)

    def _over(self, name: str, pipe: FramePipe) -> bool:
        """True if nothing more is to be received or sent there, so that its other end may close."""
        if self._incoming[name].left:
            return False
        return name not in self._writers or (self._ended and pipe.backlog <= _TAIL_BYTES)

    def close(self) -> None:
        """Close the streams and forget everything. Idempotent."""
        self._closed = True
        for pipe in self._pipes.values():
            pipe.close()
        self._work.row_buffers.clear()
        self._work.caches.clear()
        self._work.whole.clear()

    # ---- results ---------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepTime]:
        """Where the time went until now, in seconds and bytes."""
        self._times.sent = sum(writer.sent for writer in self._writers.values())
        return self._times.steps()

    @property
    def warm(self) -> WarmCaches:
        """What the next turn of this conversation can go on from, here. Only once it is ``finished``."""
        layers, tokens = self._work.layers, self._work.tokens.stop
        rows = WarmRows(tokens, layers.start, layers.stop, self._hashes[tokens], exact=self._assist.exact)
        return WarmCaches(self._assist.home, self._assist.kv_bits, rows, dict(self._work.whole))
