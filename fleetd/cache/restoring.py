"""The beginning of a prompt comes from the disk: a thread looks for it, the caller decides, the thread reads.

    look ──► LOOKING ──► FOUND ── read ──► READING ──► DONE
                │          └── drop ───────────────────►│
                └── nothing there ────────────────────► ┘

Rows are read first, then the last snapshot whose rows have come, if the model needs one; if that is not
what it should be, the one before it. The caller's thread never touches the disk. It is woken at every change;
a disk that hangs is waited for no longer than ``due_s`` says.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Protocol

import msgspec

from fleetd import limits
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore, CacheUnavailable, NotKept
from fleetd.cache.index import FoundBlocks, RestoredPrompt

Targets = Callable[[int, BlockHeader], Sequence[memoryview]]


class StateTargets(Protocol):
    """Memory for a snapshot."""

    def targets(self, number: int, header: BlockHeader) -> Sequence[memoryview]:
        """Buffers for the snapshot at the end of block ``number``. Raises BlockDamaged for another header."""

    def check(self) -> None:
        """What came last is a snapshot. Raises BlockDamaged."""


class BlockNames(msgspec.Struct, frozen=True):
    """What a beginning may be called: its blocks, none if the model keeps no rows, and the snapshots at
    their ends, none if it needs none."""

    namespace: str
    names: Sequence[bytes]
    states: Sequence[bytes] = ()


class RestoreState(Enum):
    LOOKING = auto()
    FOUND = auto()
    READING = auto()
    DONE = auto()


@dataclass(eq=False)
class Restore:
    """The search for one prompt's beginning. The longest of ``candidates`` wins. ``due_s``: when
    it is waited for no longer, in monotonic seconds."""

    model: str
    candidates: Sequence[BlockNames]
    due_s: float
    state: RestoreState = RestoreState.LOOKING
    chosen: BlockNames = field(default_factory=lambda: BlockNames("", ()))
    found: FoundBlocks = field(default_factory=lambda: FoundBlocks(0, 0, 0.0))
    # Labels of the machines that what was read came from.
    origins: set[str] = field(default_factory=set)
    # Blocks that are in memory, those before ``first`` included, and how many of them end with the snapshot
    # that was read; how long reading took.
    blocks: int = 0
    state_blocks: int = 0
    seconds: float = 0.0
    given_up: bool = False
    _targets: Targets | None = None
    _states: StateTargets | None = None
    _first: int = 0
    _worth: float = 0.0


class BlockReader:
    """``open_store`` is called on the thread; ``wake`` by it, whenever a Restore changed."""

    def __init__(
        self,
        open_store: Callable[[], BlockStore],
        wake: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._wake = wake
        self._monotonic = monotonic
        self._work: queue.SimpleQueue[Callable[[BlockStore], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Set while a disk has kept someone waiting in vain.
        self._stuck = False

    # ---- on the caller's thread --------------------------------------------------------------------------

    def look(self, model: str, candidates: Sequence[BlockNames]) -> Restore:
        """Begin to look for the longest beginning."""
        restore = Restore(model, candidates, self._monotonic() + limits.CACHE_LOOKUP_S)
        if self._stuck or not any(each.names or each.states for each in candidates):
            restore.state = RestoreState.DONE
            return restore
        self._put(lambda store: self._look(store, restore))
        return restore

    def read(
        self, restore: Restore, first: int, worth: float, targets: Targets, states: StateTargets | None = None
    ) -> None:
        """Read the blocks that were found, from number ``first`` on, into ``targets``, and a snapshot into
        ``states``, which are called on the thread; ``worth``: as ``Index.price`` has it."""
        restore._targets, restore._states = targets, states
        restore._first, restore._worth = first, worth
        restore.blocks, restore.state = first, RestoreState.READING
        restore.due_s = self._monotonic() + limits.CACHE_BLOCK_S
        self._put(lambda store: self._read(store, restore))

    def give_up(self, restore: Restore) -> None:
        """Wait no longer: what is in memory by now counts, nothing that comes later."""
        if restore.state is not RestoreState.DONE and self._monotonic() >= restore.due_s:
            self._stuck = True
        restore.given_up, restore.state = True, RestoreState.DONE
        restore._targets = restore._states = None

    def count(self, restore: Restore, tokens: int, n_bytes: int, saved_s: float) -> None:
        """Count a restore that was of use."""
        read = RestoredPrompt(restore.model, tokens, n_bytes, restore.seconds, saved_s, restore.found.cached)
        self._put(lambda store: store.restored(read))

    def close(self) -> None:
        self._work.put(None)

    def _put(self, work: Callable[[BlockStore], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="block-reader", daemon=True)
            self._thread.start()
        self._work.put(work)

    # ---- on the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        store = self._open_store()
        while (work := self._work.get()) is not None:
            try:
                work(store)
            except (CacheUnavailable, NotKept):
                pass  # a miss; the writer tells people of it
            except Exception:
                # A bug, or memory that is short: what has come counts, and the next prompt is looked for.
                traceback.print_exc()
            self._stuck = False
        store.close()

    def _look(self, store: BlockStore, restore: Restore) -> None:
        try:
            for candidate in restore.candidates:
                found = store.find(candidate.names, candidate.states)
                if found.blocks > restore.found.blocks:
                    restore.chosen, restore.found = candidate, found
        finally:
            if not restore.given_up:
                restore.state = RestoreState.FOUND if restore.found.blocks else RestoreState.DONE
            self._wake()

    def _read(self, store: BlockStore, restore: Restore) -> None:
        begun, names = self._monotonic(), restore.chosen.names
        try:
            if names:
                self._read_rows(store, restore)
            else:
                restore.blocks = restore.found.blocks
            used = list(names[: restore.blocks])
            if restore.found.states:
                used += self._read_state(store, restore)
        finally:
            restore.seconds = self._monotonic() - begun
            # Before the caller hears of it: while they exist, MLX copies what it adds to.
            restore._targets = restore._states = None
            if not restore.given_up:
                restore.state = RestoreState.DONE
            self._wake()
        if not restore.given_up:
            store.price(used, restore._worth)

    def _read_rows(self, store: BlockStore, restore: Restore) -> None:
        targets = restore._targets
        for number in range(restore._first, restore.found.blocks):
            if targets is None or restore.given_up:
                return
            if (after := number + 1) < restore.found.blocks:
                store.read_soon(restore.chosen.names[after])
            header = store.read(restore.chosen.names[number], partial(targets, number))
            if header is None:
                return
            restore.origins.update(header.origins)
            if restore._targets is None:
                return  # given up: the caller has taken what was there
            # In this order: a caller that gives up between the two takes one block less.
            restore.due_s = self._monotonic() + limits.CACHE_BLOCK_S
            restore.blocks = number + 1

    def _read_state(self, store: BlockStore, restore: Restore) -> list[bytes]:
        """The last snapshot whose rows have come; returns its name, if there is one."""
        states = restore._states
        for blocks, _ in reversed(restore.found.states):
            if states is None or restore.given_up:
                break
            if blocks > restore.blocks:
                continue
            name = restore.chosen.states[blocks - 1]
            restore.due_s = self._monotonic() + limits.CACHE_BLOCK_S
            header = store.read(name, partial(states.targets, blocks - 1), states.check)
            if header is not None:
                restore.origins.update(header.origins)
                if not restore.given_up:
                    restore.state_blocks = blocks
                return [name]
        return []
