"""Keys and values of a prompt from another machine: asked for, received into the caches, checked, used.

    KvMissing ──► WAITING ── FetchBlocks(0) ──────────────────────────► DONE
                   └────── FetchBlocks(n), stream ──► RECEIVING ──►───┘

A thread receives; the compute thread says where to, and makes room layer by layer while others are asked. A
prompt never waits for more than one late block, nor for all of them longer than the daemon says: the blocks
that have come by then are used, and the rest is computed here. If a model cannot be cut at a token, two
snapshots come after the rows: the one at their end, and one before it, by which it is checked. If that is
sooner, the last block comes first, and the prompt is computed from its beginning towards them
(``front_prefill``).
"""

from __future__ import annotations

import math
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.cache import block_stream
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.fetched_check import FetchedCheck, in_turns
from fleetd.engine.prefixes.front_prefill import FrontPrefill
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT, Hit, Origins
from fleetd.engine.protocol import FetchBlocks, KvFetched, KvMissing, StreamTag
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot, BlockLayout, block_rows
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated, truncated
from fleetd.errors import FleetError, PeerError, PeerLate, PeerWrong
from fleetd.process.used_socket import shut_down
from fleetd.sealed.stream import SealedReceiver

_BLOCK = limits.CACHE_BLOCK_TOKENS
_OVER = object()


class FetchState(Enum):
    WAITING = auto()
    RECEIVING = auto()
    DONE = auto()


class PeerFetch:
    """The fetch of one prompt's beginning, from the worker's question (KvMissing) to its report (KvFetched).

    Args:
        have: tokens of the prompt's beginning that memory and disk hold; ``held`` gives their caches.
        equivalent: whether blocks will do, too, in which another accelerator had a part.
        exact: whether the other machine's bytes must be those that are computed here, wherever chunks end.
        chunk: how many tokens a step may compute.
        room: whether there is memory for so many tokens twice, until the two ends of a prompt meet.
        wake: called on any thread when there is something to do.
        draw: which tokens are checked.

    ``hit``: the prompt's beginning once the fetch is done, None if no more of it came; ``tokens`` of it came,
    in ``seconds``. ``due_s``: when ``step`` is due at the latest.
    """

    def __init__(
        self,
        tier: DiskTier,
        request_id: str,
        tokens: list[int],
        have: int,
        held: Callable[[], Hit],
        *,
        equivalent: bool,
        exact: bool,
        chunk: Callable[[], int],
        room: Callable[[int], bool],
        wake: Callable[[], None],
        draw: random.Random,
    ) -> None:
        self.have = have
        self._held = held
        self.due_s = time.monotonic() + limits.FETCH_DECIDE_S
        self.tokens = 0
        self.seconds = 0.0
        self._tier, self._id, self._prompt = tier, request_id, tokens
        self._exact, self._chunk, self._room, self._wake, self._draw = exact, chunk, room, wake, draw
        self._first = have // _BLOCK
        asked = slice(self._first, self._first + limits.FETCH_BLOCKS)
        self._names = tier.names_for_others(tokens[:-1])[asked]
        self._equivalent_names = tier.names_for_others(tokens[:-1], EQUIVALENT)[asked] if equivalent else []
        # Of what comes: where the prefix cache keeps it.
        self._namespace = DENSE
        self._state = FetchState.WAITING
        self._decision: FetchBlocks | None = None
        self._sock: socket.socket | None = None
        self.hit: Hit | None = None
        self.front: FrontPrefill | None = None
        # The caches with a row per token, once ``_room_left`` has made room in them; what was held before;
        # and the snapshots in the order in which they come.
        self._parts: list[Any] = []
        self._room_left: Iterator[None] | None = self._make_room()
        self._before = Hit(0, None)
        self._snapshots: list[ArrivingSnapshot] = []
        self._thread: threading.Thread | None = None
        # Where parts of the stream go; None once nothing more is received.
        self._targets: block_stream.Targets | None = None
        # Whole blocks [_came_from, _blocks) that have come and serve; before the first has come, none.
        self._came_from = self._blocks = self._first
        self._checking: Iterator[None] | None = None
        self._error: FleetError | None = None
        self._begun_s = self._decided_s = time.monotonic()
        # From the decision to the first byte; 0 before that.
        self._opening_s = 0.0
        self._until_s = math.inf

    @property
    def worth_asking(self) -> bool:
        return len(self._names) * _BLOCK >= limits.FETCH_LEAST_TOKENS

    def question(self) -> KvMissing | None:
        """What is to be asked of other machines; None where what the model keeps cannot be told."""
        try:
            layout = self._tier.layout()
        except Exception:
            # It may compute a token to see that, which may fail. Then the prompt is computed.
            traceback.print_exc()
            return None
        cost, start = self._tier.cost, self._first * _BLOCK
        block_bytes = layout.header(0).nbytes
        computed_s = []
        for number in range(1, len(self._names) + 1):
            end = start + number * _BLOCK
            check_s = cost.check_s(end, number * block_bytes, states=bool(layout.states))
            computed_s.append(max(0.0, cost.seconds(self.have, end) - check_s))
        return KvMissing(
            self._id,
            list(self._names),
            computed_s,
            block_bytes,
            rows=bool(layout.rows),
            states=bool(layout.states),
            equivalent_names=self._equivalent_names,
        )

    # ---- on the compute thread ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if ``step`` has something to do."""
        if self._state is FetchState.DONE:
            return not self.computes
        met = self._state is FetchState.RECEIVING and self.front is not None and self.front.met
        return met or self._may_begin or self._makes_room or time.monotonic() >= self.due_s

    @property
    def _makes_room(self) -> bool:
        """True while there is memory to be made. What is here already is not copied before anything comes."""
        decided = self._decision is not None
        return (
            self._state is FetchState.WAITING and self._room_left is not None and (decided or not self._first)
        )

    @property
    def computes(self) -> bool:
        """True if a chunk of the prompt's beginning is to be computed now: see ``compute``."""
        if self.front is None or self._checking is not None:
            return False
        if self._state is FetchState.RECEIVING:
            return self.front.pays
        # Nothing more comes, and what has come serves once all before it is computed.
        return self._came_from < self._blocks and not self.front.met

    def compute(self) -> int:
        """Compute a chunk towards the blocks that come; returns its tokens."""
        return self.front.step() if self.front is not None else 0

    @property
    def _may_begin(self) -> bool:
        decision = self._decision
        if decision is None or self._state is not FetchState.WAITING:
            return False
        return not decision.blocks or (self._sock is not None and self._room_left is None)

    def decide(self, decision: FetchBlocks) -> None:
        """The daemon's answer; its stream comes before it or after."""
        if self._decision is None:
            self._decision = decision
            self._decided_s = time.monotonic() - decision.since_s
            self._until_s = self._decided_s + decision.within_s if decision.within_s else math.inf

    def take_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        """Take the stream on which the other machine sends."""
        self._sock, self._tag = sock, tag

    def step(self) -> bool:
        """Go on, if it is ready. True at the end; then ``hit`` is the prompt's beginning if more has come."""
        try:
            return self._step()
        except Exception as error:
            # What came may make a library raise anything: the prompt is computed instead.
            self._error = _wrong(error)
            self._end()
            return True

    def _step(self) -> bool:
        if self._may_begin:
            self._begin()
        elif self._state is FetchState.RECEIVING and self.front is not None and self.front.met:
            self._end()
        elif self._state is not FetchState.DONE and time.monotonic() >= self.due_s:
            self._give_up()
        elif self._makes_room and next(self._room_left or iter(()), _OVER) is _OVER:
            self._room_left = None
        if self._state is not FetchState.DONE or self.computes:
            return False
        if self._checking is None:
            self._checking = self._check()
        return next(self._checking, _OVER) is _OVER

    def cut_short(self) -> Hit | None:
        """End it now. What has come by now, or was computed meanwhile, if it is right; None if that is no
        more than what was held."""
        try:
            self._end()
            for _ in self._checking or self._check():
                pass
        except Exception as error:
            self._error = _wrong(error)
        return self.hit

    def close(self) -> None:
        """The request has ended."""
        self._end()

    def _end(self) -> None:
        """Receive nothing more."""
        if self._state is FetchState.RECEIVING:
            self.seconds = time.monotonic() - self._decided_s
        self._state, self._targets, self._room_left = FetchState.DONE, None, None
        if self._sock is not None and self._thread is not None:
            # Wakes the thread, which closes it.
            shut_down(self._sock)
        elif self._sock is not None:
            self._sock.close()

    @property
    def checks(self) -> bool:
        """True from when all has come until it is found right or wrong."""
        return self._checking is not None

    @property
    def _origins(self) -> Origins:
        """Those of what comes. A machine that the daemon did not name is none that is known."""
        return frozenset([self._decision.origin if self._decision is not None else ""])

    @property
    def elapsed_s(self) -> float:
        """Since the others were asked, with what checking took; ``seconds``: from the decision on,
        without."""
        return time.monotonic() - self._begun_s

    def report(self) -> KvFetched | None:
        """How the fetch ended; None if nothing was fetched."""
        if self._thread is None:
            return None
        code, reason = (self._error.code, self._error.message) if self._error is not None else ("", "")
        blocks = self.tokens // _BLOCK
        n_bytes = blocks * self._tier.layout().header(0).nbytes
        n_bytes += sum(snapshot.nbytes for snapshot in self._snapshots) if blocks else 0
        return KvFetched(self._id, blocks, n_bytes, self.seconds, code, reason, self._opening_s)

    def _begin(self) -> None:
        decision, sock = self._decision, self._sock
        if decision is None or not decision.blocks or sock is None:
            self._state = FetchState.DONE
            return
        layout, first, held = self._tier.layout(), self._first, self._before
        if held.tokens // _BLOCK < first:
            # What was here has gone meanwhile, and was not asked for.
            self.close()
            return
        # The rest of a beginning of other numbers is one of other numbers, too.
        self._namespace = EQUIVALENT if decision.equivalent else held.namespace
        blocks = min(decision.blocks, len(self._names))
        buffers = [RowBuffer(part) for part in self._parts]
        self._snapshots = [ArrivingSnapshot(layout) for _ in range(2 if layout.states else 0)]
        self._late_s = max(limits.FETCH_BLOCK_S, limits.FETCH_LATE * decision.block_s)
        self._state = FetchState.RECEIVING
        self._wait_on()

        self._targets = partial(self._memory_for, layout, buffers, blocks)
        receiver = SealedReceiver(sock, self._tag.key, self._tag.role)
        if decision.last_first and not self._snapshots:
            self._came_from = self._blocks = first + blocks
            self._begin_front(held, blocks, decision.block_s)
            numbers, came = range(blocks)[::-1], self._came_backwards
        else:
            # Rows serve one by one, or not without the last snapshot.
            in_rows = range(blocks if layout.rows else 0)
            useful = [first if self._snapshots else first + number + 1 for number in in_rows]
            useful += [first, first + blocks] if self._snapshots else []
            numbers, came = range(len(useful)), partial(self._came, useful)
        self._thread = threading.Thread(
            target=self._receive, args=(receiver, sock, numbers, came), name="block-fetch", daemon=True
        )
        self._thread.start()

    def _memory_for(
        self,
        layout: BlockLayout,
        buffers: Sequence[RowBuffer],
        blocks: int,
        number: int,
        header: BlockHeader,
    ) -> Sequence[memoryview]:
        """Where part ``number`` of the stream goes: ``blocks`` blocks of rows, if the model keeps rows, then
        two snapshots. Called on the thread. Raises BlockDamaged for another part than the one that is due."""
        first, in_rows = self._first, blocks if layout.rows else 0
        if number < in_rows:
            if header != layout.header(first + number):
                raise BlockDamaged("a block of another layout")
            return block_rows(buffers, first + number)
        at = header.tokens // _BLOCK - first
        later = number > in_rows
        if not (at == blocks if later else blocks - limits.FETCH_CHECK_BLOCKS <= at < blocks and at > 0):
            raise BlockDamaged("a snapshot of another place")
        if header.nbytes > layout.most_snapshot_bytes:
            raise BlockDamaged("a snapshot of longer windows")
        return self._snapshots[later].targets(first + at - 1, header)

    def _make_room(self) -> Iterator[None]:
        """Memory for the whole prompt, with what is here of it; yields after each turn. Before anything is
        known to come that is a layer: it may be for nothing."""
        layout = self._tier.layout()
        if self._first:
            self._before = self._held()
        cache = self._before.cache
        before = [None] * len(layout.rows) if cache is None else layout.in_rows(cache)

        def parts() -> Iterator[None]:
            for shape, prefix in zip(layout.rows, before, strict=True):
                self._parts.append(preallocated(shape, len(self._prompt), prefix))
                yield

        yield from in_turns(parts(), lambda: 0.0 if self._decision is None else limits.FETCH_TURN_S)

    def _wait_on(self) -> None:
        """Set the time until which the next part, and all of them, are waited for."""
        self.due_s = min(time.monotonic() + self._late_s, self._until_s)

    def _begin_front(self, held: Hit, blocks: int, block_s: float) -> None:
        """Let the prompt be computed from its beginning meanwhile, if there is memory for both ends."""
        if not self._room((self._first + blocks) * _BLOCK - held.tokens):
            return
        tier = self._tier
        cache = make_prompt_cache(tier.model) if held.cache is None else held.cache
        prefiller = Prefiller(tier.model, self._prompt, cache, held.tokens)
        self.front = FrontPrefill(
            prefiller, held.namespace, self._blocks, block_s, tier.cost, self._chunk, origins=held.origins
        )

    def _give_up(self) -> None:
        """What has come by now counts, nothing that comes later."""
        if self._state is FetchState.RECEIVING and self._error is None:
            self._error = PeerLate("Its keys and values came too late.")
        self._end()

    def _check(self) -> Iterator[None]:
        """Take what came if it is right; yields after each step. Raises as ``_checked``."""
        front = self.front
        if front is not None and front.computed:
            self.hit = front.read_so_far()
        first, last = self._came_from * _BLOCK, self._blocks * _BLOCK
        whole = first == self._first * _BLOCK if front is None else front.met
        if self._thread is None or first == last or last <= self.have or not whole:
            return
        # It may still write to the same rows; ``_targets`` is None, so it stops at the next block.
        self._thread.join()
        if front is not None:
            front.fill(self._parts, self._tier.layout().in_rows(front.prefiller.cache))
        right = yield from self._checked(first, last)
        self.tokens = last - first
        computed = right.front + (0 if front is None else max(0, first - front.held))
        origins = self._before.origins | self._origins
        self.hit = Hit(right.tokens, right.cache, self._namespace, computed, origins)

    def _checked(self, first: int, last: int) -> Generator[None, None, Hit]:
        """The caches of the first ``last`` tokens, of which those of tokens [first, last) came, and of what
        the check has computed behind them. Raises PeerWrong, BlockDamaged."""
        tier, exact = self._tier, self._exact and self._namespace == DENSE
        check = FetchedCheck(tier.model, self._prompt, self._chunk, exact=exact)

        def after(tokens: int, snapshot: ArrivingSnapshot) -> list[Any]:
            return snapshot.cache(tier.empty, [truncated(part, tokens) for part in self._parts])

        if not self._snapshots:
            yield from check.finite(self._parts, first, last)
            whole = ArrivingSnapshot(tier.layout()).cache(tier.empty, self._parts)
            end = last - limits.FETCH_SPOT_TOKENS
            drawn = self._draw.randint(first, end - limits.FETCH_SPOT_TOKENS)
            self._let_count(drawn)
            yield from check.rows(whole, drawn, self._parts)
            self._let_count(end)
            # What is left of most prompts is less than a block. Of more, others may compute a part.
            onward = len(self._prompt) - last <= _BLOCK
            done = yield from check.rows(whole, end, self._parts, onward=onward)
            return Hit(done, whole, front=done - last)
        earlier, later = self._snapshots
        theirs = after(last, later)
        yield from check.states(after(earlier.tokens, earlier), earlier.tokens, theirs, first, last)
        return Hit(last, theirs)

    def _let_count(self, tokens: int) -> None:
        for part in self._parts:
            kind_of(part).set_held(part, tokens)

    # ---- on the thread -----------------------------------------------------------------------------------

    def _receive(
        self,
        receiver: SealedReceiver,
        sock: socket.socket,
        numbers: Sequence[int],
        came: Callable[[int], bool],
    ) -> None:
        def targets(number: int, header: BlockHeader) -> Sequence[memoryview]:
            if self._targets is None:
                raise PeerLate("Its keys and values came too late.")
            self._opening_s = self._opening_s or time.monotonic() - self._decided_s
            return self._targets(number, header)

        error: FleetError | None = None
        parts, wanted = 0, True

        def counted(number: int) -> bool:
            nonlocal parts, wanted
            parts, wanted = parts + 1, came(number)
            return wanted

        try:
            with sock:
                block_stream.receive(receiver, numbers, targets, counted)
            # A snapshot is of no use without the other one.
            least = len(numbers) if self._snapshots else len(numbers) * limits.FETCH_BELIEVED
            if wanted and parts < least:
                error = PeerLate(f"It sent {parts} of the {len(numbers)} blocks that it said it keeps.")
        except FleetError as caught:
            error = caught
        except OSError as caught:
            error = PeerLate(f"The stream broke ({caught.strerror or caught}).")
        except Exception as caught:
            error = _wrong(caught)
        self._targets = None
        if self._state is FetchState.RECEIVING:
            self._error = error
            self.seconds = time.monotonic() - self._decided_s
            self._state = FetchState.DONE
            self._wake()

    def _came(self, useful: Sequence[int], number: int) -> bool:
        """``useful``: up to which block the prompt's serve once each part has come."""
        if self._state is not FetchState.RECEIVING:
            return False
        # In this order: if the compute thread gives up between the two, it takes one block less.
        self._wait_on()
        self._blocks = useful[number]
        return True

    def _came_backwards(self, number: int) -> bool:
        if self._state is not FetchState.RECEIVING:
            return False
        self._wait_on()
        self._came_from = self._first + number
        if self.front is None:
            return True
        goes_on = self.front.came(self._came_from)
        # Whether another chunk pays is asked again.
        self._wake()
        return goes_on


def _wrong(error: Exception) -> FleetError:
    if isinstance(error, PeerError):
        return error
    sent = str(error) if isinstance(error, BlockDamaged) else f"what cannot be used ({type(error).__name__})"
    return PeerWrong(f"It sent {sent}.")
