"""One prompt's prefill together with other machines: the home worker's side.

    home ── tokens, cached prefix ──► helper 0 ──► helper 1 ──► …
      ▲                                  │            │
      └────────── keys and values ───────┴────────────┘      and what the last of them hands on

To the scheduler it looks like ``Prefiller``: steps that compute, until the caches hold the prompt. But a step
may have to wait for a helper, so ``ready`` is asked first; and it may fail. Then the prompt is prefilled here
from ``done`` tokens on, with the bytes that it would have had without any helper.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT, NO_ORIGINS, Hit, Origins
from fleetd.engine.protocol import PrefillWithHelpers, StepTime
from fleetd.engine.sequence_state.parts import parts
from fleetd.engine.shared_prefill import frame_payloads, frame_schedule
from fleetd.engine.shared_prefill.frame_schedule import Incoming
from fleetd.engine.shared_prefill.frame_writer import FrameWriter
from fleetd.engine.shared_prefill.home_work import home_work
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.row_wire import RowWire
from fleetd.engine.shared_prefill.spot_check import WHAT_TO_SUSPECT, SpotCheck
from fleetd.engine.shared_prefill.step_times import HomeTimes
from fleetd.engine.streams.frames import Connect, FrameHeader, FramePipe
from fleetd.errors import FleetError, InvalidValue, PeerLate, PeerWrong, from_code
from fleetd.plan.prefill.split import Split, checked

_UNFORESEEN = random.SystemRandom()


class SharedPrefill:
    """See the module. ``tokens`` is the whole prompt, of which the last token is not computed here.
    ``namespace``: where the prefix cache keeps the finished ``cache``; ``origins``: whose it is.

    Args:
        stage: all layers of the model; ``layout`` is ``KvLayout.of`` it.
        prefix: private caches of the first ``share.split.cached`` tokens; None if that is 0.
        prefix_namespace, prefix_origins: of ``prefix``, in the prefix cache.
        connect: opens this share's streams. Its pipes wake the scheduler, which then asks ``ready`` again.
        draw: which later tokens are checked; no helper must be able to foresee it.
        any_chunks: whether this machine's bytes are the same wherever a prompt is cut into chunks
            (``Arithmetic.chunks``).
        clock: monotonic seconds.

    Raises:
        InvalidValue: the split is not one of this prompt and model.
    """

    def __init__(
        self,
        stage: Stage,
        layout: KvLayout,
        tokens: list[int],
        prefix: Sequence[Any] | None,
        share: PrefillWithHelpers,
        connect: Connect,
        *,
        prefix_namespace: str = DENSE,
        prefix_origins: Origins = NO_ORIGINS,
        any_chunks: bool = False,
        draw: random.Random = _UNFORESEEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        split = checked(share.split)
        _check_fits(split, len(tokens) - 1, stage.prefilled, cached=bool(prefix))
        ids = np.array(tokens[:-1], "<i4")
        self.tokens = tokens
        self._predicted_s, self._split, self._clock = share.predicted_s, split, clock
        self._warm = share.warm
        self._work = home_work(stage, layout, split, mx.array(ids)[None], prefix)
        self._hashes = frame_schedule.prefixes(split, ids.tobytes())
        self._error: FleetError | None = None
        self._finished = False
        self._closed = False
        self._times = HomeTimes(clock)
        self._allocated = threading.Event()
        self._pipes: dict[str, FramePipe] = {}
        self._incoming: dict[str, Incoming] = {}
        self._exact, self._draw = share.exact and any_chunks, draw
        self._held, self._wire = RowWire(layout), RowWire(layout, share.wire_bits)
        self._prefix_namespace, self._prefix_origins = prefix_namespace, prefix_origins
        # A helper that the daemon did not name is none that is known.
        self.origins = prefix_origins | frozenset(share.origins or [""])
        self.namespace = DENSE if share.exact and prefix_namespace == DENSE else EQUIVALENT
        self._check = SpotCheck(self._work.probes(), self._work, exact=self._exact)
        # Leading tokens from which later ones were drawn and checked; None once they were found wrong.
        self._drawn_of: int | None = split.cached
        self._later: Iterator[None] | None = None
        try:
            self._open(connect, ids.tobytes(), prefix)
            self._work.allocate()
        except BaseException:
            self.close()
            raise
        self._allocated.set()

    # ---- the shape of a Prefiller ----------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Leading tokens that ``cache`` holds: of helpers' numbers only such as are complete and checked.

        All of them count only after the check of later ones.
        """
        done = self._complete
        return done if self._drawn_of == done or done < self._split.tokens else self._split.cached

    @property
    def _complete(self) -> int:
        """Leading tokens that are here, and that nothing speaks against so far."""
        wrong = not self._check.passed or self._drawn_of is None
        return self._split.cached if wrong else self._work.done

    @property
    def cache(self) -> list[Any]:
        """One per layer, of ``done`` tokens, like those of a prefill here."""
        return self._work.caches_at(self.done)

    @property
    def verified(self) -> tuple[int, list[Any]]:
        """``done`` and ``cache``: what to go on from alone, after a check of later tokens."""
        self._check_later()
        return self.done, self.cache

    def read_so_far(self) -> Hit:
        """``verified``, under the namespace of its numbers and with their origins."""
        done, cache = self.verified
        if done > self._split.cached:
            return Hit(done, cache, self.namespace, origins=self.origins)
        return Hit(done, cache, self._prefix_namespace, origins=self._prefix_origins)

    @property
    def states(self) -> dict[int, list[Any]]:
        """What ``Prefiller.states`` gives, at the places where states are sent. Only once all is here."""
        return self._work.states

    @property
    def remaining(self) -> int:
        return self._split.tokens - self.done

    @property
    def progress(self) -> int:
        """Tokens that the work done so far amounts to, for people; ``done`` may lag behind it or jump."""
        if self.remaining == 0:
            return self._split.tokens
        new = self._split.tokens - self._split.cached
        estimate = self._split.cached + int(new * self._work.fraction)
        return min(max(self.done, estimate), self._split.tokens - 1)

    # ---- turns -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if ``step`` can do something or has an error to raise; takes in what has arrived."""
        self._receive()
        waits = not (self._error or self._work.computable or self._check.ready)
        idle = waits and self._complete < self._split.tokens
        self._times.waits.idle(idle)
        return not idle

    @property
    def due_s(self) -> float | None:
        """When, on the clock, ``step`` gives up what is waited for; None while nothing is."""
        since = self._times.waits.since
        if since is None:
            return None
        # Only waiting counts: a machine that is busy with other prompts must not blame its helpers.
        allowed = limits.SHARE_LATE * self._predicted_s * self._work.next_fraction + limits.SHARE_GRACE_S
        return since + allowed - self._times.waits.total_s

    def step(self, chunk_tokens: int = 0) -> int:
        """Compute what can be computed without waiting, for about ``SHARE_STEP_S``; returns the progress.

        Args:
            chunk_tokens: of no effect: the split says how the prompt is cut.

        Raises:
            PeerError: a helper is lost, late, wrong, or breaks the protocol. The message begins with its
                stream's name. ``verified`` says what is left of the work; nothing more will come.
        """
        before = self.progress
        begun = self._clock()
        if not self.ready and self.due_s is not None and begun >= self.due_s:
            waited = self._times.waits.until(begun)
            self._error = PeerLate(
                f"helper{self._work.behind()}: waiting took {waited:.1f} s of a prefill "
                f"that was to take {self._predicted_s:.1f} s."
            )
        while self._error is None and self._unit():
            self._receive()
            if self._clock() - begun >= limits.SHARE_STEP_S:
                break
        if self._error is not None:
            self._check_later()
        elif self._complete == self._split.tokens:
            self._check_later(limits.SHARE_STEP_S)
        if self._error is not None:
            raise self._error
        if self.remaining == 0:
            self._finish()
        return self.progress - before

    def _unit(self) -> bool:
        """One bounded piece of work; False if there is none.

        The check comes first if every complete chunk counts once the check has passed. If nothing counts
        before the end, the check waits until there is nothing else to do.
        """
        begun = self._clock()
        if self._check.ready and (self._work.checked_first or not self._work.computable):
            self._check.step()
            self._times.checked.add(begun, self._clock())
        elif self._work.computable:
            self._work.compute()
            self._times.computed(begun, last=self._work.computed)
        else:
            return False
        return True

    def _check_later(self, most_s: float = math.inf) -> None:
        """Check a few tokens of those that are here, drawn only now; if they are wrong, nothing counts.

        Returns after about ``most_s``; ``done`` grows once a later call has come to the end.
        """
        done, begun = self._complete, self._clock()
        if self._drawn_of in (None, done):
            return
        if self._later is None:
            self._later = self._later_checks(done)
        try:
            for _ in self._later:
                if self._clock() - begun >= most_s:
                    return
        except FleetError as error:
            self._error, self._drawn_of = error, None
            return
        finally:
            self._times.later.add(begun, self._clock())
        self._later, self._drawn_of = None, done

    def _later_checks(self, done: int) -> Iterator[None]:
        """Layer after layer: the last ones that came, then drawn ones. Raises PeerWrong.

        The second check takes about as long as the first tokens' did, or longer by as many tokens as it has
        more. Where both are more than a hundredth of the prefill, it is left out in as many cases as make
        them a hundredth on average.
        """
        if (end := self._work.end_probe(done, self._draw)) is not None:
            yield from self._checked([SpotCheck([end[0]], end[1], exact=self._exact)])
        checks = [
            SpotCheck([probe], rows, exact=self._exact)
            for probe, rows in self._work.later_probes(done, self._draw)
        ]
        longer = sum(check.tokens for check in checks) / max(1, self._check.tokens)
        share_s = limits.SHARE_LATER_SHARE * self._predicted_s - self._times.later.seconds
        if self._times.checked.seconds * max(1.0, longer) * self._draw.random() > share_s:
            return
        yield from self._checked(checks)

    def _checked(self, checks: Sequence[SpotCheck]) -> Iterator[None]:
        for check in checks:
            while check.ready:
                check.step_layer()
                yield
            check.settle()

    def _finish(self) -> None:
        """All has arrived: end the streams. Until now, open streams showed helpers that home is alive."""
        if not self._finished:
            self._finished = True
            self._times.finished()
            for pipe in self._pipes.values():
                pipe.finish()

    def _receive(self) -> None:
        """Take in all frames that have arrived, and compare their rows with the spot check's."""
        if self._closed or self._error is not None:
            return
        try:
            for name, pipe in self._pipes.items():
                self._receive_from(name, pipe)
            self._check.settle()
        except FleetError as error:
            self._error = error
        if all(pipe.backlog == 0 for pipe in self._pipes.values()):
            self._times.sent()

    def _receive_from(self, name: str, pipe: FramePipe) -> None:
        incoming = self._incoming[name]
        rank = self._split.helpers - 1 if name == "in" else int(name.removeprefix("helper"))
        try:
            # What a stream does after its last frame is no longer of interest.
            while incoming.left and (frame := pipe.receive()) is not None:
                incoming.take_frame(frame, self._hashes)
                self._times.received += frame.head.nbytes
                if not frame_payloads.finite(frame, self._wire.sent):
                    raise PeerWrong("It sent numbers that are none (NaN or infinite).", hint=WHAT_TO_SUSPECT)
                self._wire.unpack(frame, self._work.row_buffers)
                self._work.take_frame(rank, frame)
        except FleetError as error:
            raise from_code(error.code, f"helper{rank}: {error.message}", hint=error.hint) from error

    # ---- streams ---------------------------------------------------------------------------------------

    def _open(self, connect: Connect, payload: bytes, prefix: Sequence[Any] | None) -> None:
        """Open all streams, and send the helpers what they need: they begin while room is made here."""
        split, held, sent = self._split, self._held.layout, self._wire.sent
        spread = [] if prefix is None else self._work.stage.spread(prefix)
        for rank in range(split.helpers):
            name = f"helper{rank}"
            incoming = Incoming(name, frame_schedule.to_home(split, rank, sent), sent, self._buffers)
            self._incoming[name] = incoming
            pipe = self._pipes[name] = connect(name, incoming.place)
            warm = self._warm[rank] if self._warm else None
            first, *cached = frame_schedule.to_helper(split, rank, held, warm)
            # The cached prefix is queued at once and not copied: packed, it would be there twice.
            out = FrameWriter(pipe, [first, *cached], self._hashes, self._held)
            out.tokens(payload)
            for head in cached:
                out.cache(parts(spread[head.layer])[head.part])
            self._times.to_send += out.sent
        if split.has_next(split.helpers - 1):
            heads = frame_schedule.to_next(split, split.helpers - 1, sent)
            incoming = self._incoming["in"] = Incoming("in", heads, sent, self._buffers)
            self._pipes["in"] = connect("in", incoming.place)

    def _buffers(self, head: FrameHeader) -> list[memoryview]:
        # On a reader's thread, which may be early.
        self._allocated.wait()
        return self._wire.memory(head) or self._work.buffers(head)

    def close(self) -> None:
        """Close the streams; ``verified`` stays as it is. Idempotent."""
        self._closed = True
        self._allocated.set()
        for pipe in self._pipes.values():
            pipe.close()
        self._work.row_buffers.clear()

    # ---- results ---------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepTime]:
        """Where the time went until now, in seconds and bytes."""
        return self._times.steps()

    @property
    def prefixes(self) -> list[bytes]:
        """The hash of the tokens whose rows each helper has had in the end, as WarmRows has it."""
        ends = (self._split.tokens_of(rank).stop for rank in range(self._split.helpers))
        return [self._hashes[end] for end in ends]


def _check_fits(split: Split, tokens: int, layers: int, *, cached: bool) -> None:
    """Raises InvalidValue if a split is not one of this prompt and model.

    Args:
        tokens: of the prompt, without the last one.
        layers: of the model, as a prefill has them.
        cached: a prefix of the prompt is there.
    """
    if (split.tokens, split.layers) != (tokens, layers):
        raise InvalidValue(f"{split} is not for {tokens + 1} tokens and {layers} layers.")
    if bool(split.cached) != cached:
        raise InvalidValue(f"{split} counts on a cached prefix that is not there, or not on one that is.")
