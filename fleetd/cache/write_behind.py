"""Blocks are written after the fact, by a thread of their own, and never in the way of what is computed.

What waits is bounded in bytes: a prompt that would be too much is not kept on the disk this time. It comes
again with its next turn. While the worker computes, the thread works a small part of the time.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.cache import block_names
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore, CacheUnavailable, NotKept, PromptBlocks


class StateToWrite(msgspec.Struct, frozen=True):
    """A snapshot, evaluated: what a model keeps besides rows."""

    header: BlockHeader
    buffers: Sequence[memoryview]


class BlocksToWrite(msgspec.Struct, frozen=True):
    """All blocks of one prompt, first to last: most of them may be on the disk already.

    ``headers`` and ``buffers``: of the block of that number; ``buffers`` may be called on any thread. Blocks
    without bytes are not written. ``row_bytes``: what the rows keep in memory while they wait. ``worth``: as
    ``Index.price`` has it. ``states``: snapshots at the ends of blocks of these numbers. ``origins``: labels
    of the machines that some of it came from.
    """

    model: str
    names: Sequence[bytes]
    worth: float
    row_bytes: int
    header: Callable[[int], BlockHeader]
    buffers: Callable[[int], Sequence[memoryview]]
    states: Mapping[int, StateToWrite] = msgspec.field(default_factory=dict)
    origins: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """What it keeps in memory while it waits."""
        return self.row_bytes + sum(state.header.nbytes for state in self.states.values())


class WriterFigures(msgspec.Struct, frozen=True):
    """``note``: why nothing is written at the moment; "" if it is."""

    queued_bytes: int = 0
    written_bytes: int = 0
    written_blocks: int = 0
    # Prompts of which nothing was kept, or not all: the queue was full, the disk refused, the process ended.
    dropped: int = 0
    note: str = ""


@dataclass
class WriteBehind:
    """``open_store`` is called on the thread. ``put``, ``paced``, ``write_now`` and ``drop`` are for the
    compute thread."""

    open_store: Callable[[], BlockStore]
    most_bytes: int
    monotonic: Callable[[], float] = time.monotonic
    # True while the worker computes.
    paced: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._waiting: deque[BlocksToWrite] = deque()
        self._changed = threading.Condition()
        self._queued_bytes = self._written_bytes = self._written_blocks = self._dropped = 0
        self._note = ""
        self._again_at = 0.0
        self._closing_at: float | None = None
        self._writing = False
        self._thread: threading.Thread | None = None
        # Set where a pause must end early; ``_urgent``: until nothing is queued.
        self._hurry = threading.Event()
        self._urgent = False

    def put(self, prompt: BlocksToWrite) -> bool:
        """Queue a prompt's blocks. False if there is no room for them in the queue."""
        with self._changed:
            # The same prompt at its answer's end has all that it had after its prefill.
            replaced = [waiting for waiting in self._waiting if _continues(prompt, waiting)]
            for earlier in replaced:
                # All but its snapshots: a later state cannot be cut to theirs.
                prompt = replace(prompt, states={**earlier.states, **prompt.states})
            queued_bytes = self._queued_bytes - sum(earlier.nbytes for earlier in replaced) + prompt.nbytes
            if self._closing_at is not None or queued_bytes > self.most_bytes:
                # Of a prompt that is too long its beginning stays.
                self._dropped += 1
                return False
            for earlier in replaced:
                self._waiting.remove(earlier)
            self._waiting.append(prompt)
            self._queued_bytes = queued_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="block-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def write_now(self) -> None:
        """Write what is queued without pauses, though the worker computes: another machine asks for it."""
        with self._changed:
            if self._waiting or self._writing:
                self._urgent = True
                self._hurry.set()

    def drop(self) -> None:
        """Let go of what waits: the system is short of memory."""
        with self._changed:
            self._dropped += len(self._waiting)
            self._queued_bytes -= sum(waiting.nbytes for waiting in self._waiting)
            self._waiting.clear()

    def flush(self, within_s: float) -> bool:
        """Wait until nothing is queued, at most so long. False if something still is."""
        self._hurry.set()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._writing, within_s)
        self._hurry.clear()
        return done

    def close(self, within_s: float = limits.CACHE_FLUSH_S) -> None:
        """Write what is queued, as much as can be written in this time, and end."""
        with self._changed:
            self._closing_at = self.monotonic() + within_s
            self._changed.notify_all()
        self._hurry.set()
        if self._thread is not None:
            # A disk that hangs must not hold the process: what it has begun is swept at the next start.
            self._thread.join(within_s)

    @property
    def figures(self) -> WriterFigures:
        with self._changed:
            return WriterFigures(
                self._queued_bytes, self._written_bytes, self._written_blocks, self._dropped, self._note
            )

    # ---- on the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        store = self.open_store()
        try:
            while (prompt := self._next()) is not None:
                kept = self._write(store, prompt)
                with self._changed:
                    self._writing = False
                    self._queued_bytes -= prompt.nbytes
                    self._dropped += not kept
                    # Or a finished prompt's arrays would stay in memory until the next one comes.
                    prompt = None
                    self._changed.notify_all()
        finally:
            store.close()

    def _next(self) -> BlocksToWrite | None:
        with self._changed:
            while not self._waiting:
                if self._closing_at is not None:
                    return None
                if self._urgent:
                    self._urgent = False
                    self._hurry.clear()
                self._changed.wait()
            self._writing = True
            return self._waiting.popleft()

    def _write(self, store: BlockStore, prompt: BlocksToWrite) -> bool:
        """False if not all of it is on the disk now."""
        if self.monotonic() < self._again_at:
            return False
        try:
            states = {number: block_names.state_name(prompt.names[number]) for number in prompt.states}
            blocks = store.prompt(prompt.names, prompt.worth, states)
            for number in range(len(prompt.names)):
                if number >= blocks.here and (header := prompt.header(number)).nbytes:
                    if not self._in_time():
                        return False
                    header, buffers = replace(header, origins=prompt.origins), partial(prompt.buffers, number)
                    self._wrote(store.write(blocks, number, prompt.model, header, buffers, self._pause))
                if (state := prompt.states.get(number)) is not None:
                    if not self._in_time():
                        return False
                    self._wrote(self._write_state(store, blocks, number, prompt, state))
            if blocks.here < len(prompt.names):
                # What went for them has moved the clock on.
                store.price([*prompt.names, *states.values()], prompt.worth)
        except NotKept:
            return False
        except CacheUnavailable as error:
            self._again_at = self.monotonic() + limits.CACHE_AGAIN_S
            with self._changed:
                self._note = str(error)
            return False
        except Exception:
            # A bug, or memory that is short: the next prompt is written.
            traceback.print_exc()
            return False
        return True

    def _write_state(
        self, store: BlockStore, blocks: PromptBlocks, number: int, prompt: BlocksToWrite, state: StateToWrite
    ) -> int:
        header = replace(state.header, origins=prompt.origins)
        return store.write(
            blocks, number, prompt.model, header, lambda: state.buffers, self._pause, state=True
        )

    def _in_time(self) -> bool:
        return self._closing_at is None or self.monotonic() < self._closing_at

    def _wrote(self, n_bytes: int) -> None:
        with self._changed:
            self._written_bytes += n_bytes
            self._written_blocks += n_bytes > 0
            self._note = ""

    def _pause(self, worked_s: float) -> None:
        if self.paced and not self._hurry.is_set():
            self._hurry.wait(worked_s * (1 / limits.CACHE_WRITE_SHARE - 1))


def _continues(prompt: BlocksToWrite, earlier: BlocksToWrite) -> bool:
    """True if writing ``prompt`` writes all of ``earlier``."""
    n = len(earlier.names)
    return 0 < n <= len(prompt.names) and prompt.names[n - 1] == earlier.names[-1]
