"""What a member's layers keep, as a cache in a sequence's list: it counts tokens, and tells what becomes of
the caches there.

So a ``RemoteRows`` stands for all layers of a member, and is copied, cut and batched by whoever does that
with the caches of this machine's own layers.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fleetd import limits
from fleetd.control.model_facts import StateSizes
from fleetd.engine.groups.messages import (
    ALL,
    Change,
    Copy,
    Extend,
    Extract,
    Filter,
    Forget,
    KeepState,
    MakeUp,
    Mark,
    Merge,
    PutBack,
    Return,
    Trim,
)
from fleetd.engine.sequence_state.kinds import ANY, StateKind, all_plain, kind_of, register
from fleetd.engine.sequence_state.parts import all_parts


class KeptThere(msgspec.Struct, frozen=True):
    """What a member's layers keep: the sizes of its windows, whether there are running states, and whether
    there is nothing but plain rows."""

    windows: tuple[int, ...] = ()
    running: bool = False
    plain: bool = False

    @classmethod
    def of(cls, empty: Sequence[Any]) -> KeptThere:
        """What layers with these empty caches keep; None is the cache of one that keeps nothing."""
        parts = all_parts(empty)
        windows = {window for part in parts if (window := kind_of(part).window(part)) is not None}
        running = any(kind_of(part).needs_mark(part) for part in parts)
        plain = all_plain([cache for cache in empty if cache is not None])
        return cls(tuple(sorted(windows)), running, plain)

    @property
    def in_rows(self) -> bool:
        """True if every layer has a row per token."""
        return not self.windows and not self.running


class CachesThere:
    """The caches of a member: numbers for them, and the changes that it is yet to be told of, in order.

    ``kept``: what its layers keep.
    """

    def __init__(self, kept: KeptThere) -> None:
        self.kept = kept
        self._numbers = itertools.count(1)
        # Appended to wherever a cache is thrown away.
        self.untold: deque[Change] = deque()

    def tell(self, change: Change) -> None:
        self.untold.append(change)

    def take_untold(self, send: Callable[[list[Change]], None]) -> list[Change]:
        """The changes that were not told yet, for the next message. Of very many all but the last are sent
        before it, as many as a message holds at a time."""
        while len(self.untold) > limits.GROUP_CHANGES:
            send([self.untold.popleft() for _ in range(limits.GROUP_CHANGES)])
        # Others may be added meanwhile, of caches that are thrown away.
        return [self.untold.popleft() for _ in range(len(self.untold))]

    def number(self) -> int:
        """One that is not in use."""
        return next(self._numbers)


class RemoteNote:
    """A mark, or a saved state, on another machine."""

    # It counts there.
    nbytes = 0

    def __init__(self, there: CachesThere) -> None:
        self.number = there.number()
        weakref.finalize(self, there.tell, Forget(self.number)).atexit = False


class RemoteRows:
    """What a member's layers keep of one sequence, or of a batch; as mlx-lm's caches are used.

    ``tokens``: that it holds; of a batch, its longest sequence's.
    """

    def __init__(self, there: CachesThere, tokens: int = 0) -> None:
        self.there, self.tokens, self.number = there, tokens, there.number()
        weakref.finalize(self, there.tell, Forget(self.number)).atexit = False

    def grow(self, tokens: int) -> None:
        self.tokens += tokens

    def copy(self, tokens: int = ALL) -> RemoteRows:
        """One of the first ``tokens``, or of all."""
        found = RemoteRows(self.there, min(tokens, self.tokens))
        if self.tokens:
            self.there.tell(Copy(self.number, found.number, tokens))
        return found

    def mark(self) -> RemoteNote:
        note = RemoteNote(self.there)
        self.there.tell(Mark(self.number, note.number))
        return note

    def return_to(self, mark: RemoteNote, tokens: int) -> None:
        self.there.tell(Return(self.number, mark.number, tokens))
        self.tokens -= tokens

    def saved(self) -> RemoteNote:
        note = RemoteNote(self.there)
        self.there.tell(KeepState(self.number, note.number))
        return note

    def restored(self, state: RemoteNote, stored: int, tokens: int) -> RemoteRows:
        found = RemoteRows(self.there, tokens)
        self.there.tell(PutBack(self.number, state.number, found.number, stored, tokens))
        return found

    def repeat(self, tokens: int) -> None:
        """Have its rows made up to ``tokens``; a running state stays as it is."""
        self.tokens = tokens
        self.there.tell(MakeUp(self.number, tokens))

    def __deepcopy__(self, _memo: dict[int, Any]) -> RemoteRows:
        return self.copy()

    # ---- as mlx-lm calls it ----------------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """Where the next token goes."""
        return self.tokens

    @property
    def state(self) -> tuple[()]:
        """Nothing that could be evaluated here."""
        return ()

    @property
    def nbytes(self) -> int:
        """What it takes there counts there."""
        return 0

    def next_positions(self) -> list[int]:
        """Positions of the tokens that come next; none if they follow those that are there."""
        return []

    def is_trimmable(self) -> bool:
        return not self.there.kept.running

    def trim(self, tokens: int) -> int:
        undone = min(tokens, self.tokens)
        if undone:
            self.tokens -= undone
            self.there.tell(Trim(self.number, self.tokens))
        return undone

    def empty(self) -> bool:
        return not self.tokens

    @classmethod
    def merge(cls, sequences: Sequence[RemoteRows]) -> RemoteBatch:
        there = sequences[0].there
        found = RemoteBatch(there, [each.tokens for each in sequences])
        there.tell(Merge([each.number for each in sequences], found.number))
        return found


class RemoteBatch(RemoteRows):
    """Rows of a batch. ``each``: the tokens of its sequences."""

    def __init__(self, there: CachesThere, each: Sequence[int]) -> None:
        super().__init__(there, max(each))
        self.each = [*each]

    def copy(self, tokens: int = ALL) -> RemoteBatch:
        found = RemoteBatch(self.there, self.each)
        self.there.tell(Copy(self.number, found.number, tokens))
        return found

    def grow(self, tokens: int) -> None:
        super().grow(tokens)
        self.each = [each + tokens for each in self.each]

    def trim(self, tokens: int) -> int:
        undone = super().trim(tokens)
        self.each = [each - undone for each in self.each]
        return undone

    def extend(self, other: RemoteBatch) -> None:
        self.there.tell(Extend(self.number, other.number))
        self.each += other.each
        self.tokens = max(self.each)

    def filter(self, rows: Sequence[int]) -> None:
        kept = [int(row) for row in rows]
        self.there.tell(Filter(self.number, kept))
        self.each = [self.each[row] for row in kept]
        self.tokens = max(self.each)

    def extract(self, row: int) -> RemoteRows:
        found = RemoteRows(self.there, self.each[row])
        self.there.tell(Extract(self.number, row, found.number))
        return found


class RemoteKind(StateKind):
    """All layers of a member together."""

    def is_plain(self, cache: RemoteRows) -> bool:
        return cache.there.kept.plain

    def widens(self, cache: RemoteRows) -> bool:
        return cache.there.kept.plain

    def repeats(self, cache: RemoteRows) -> bool:
        return not cache.there.kept.windows

    def repeat(self, cache: RemoteRows, context: int, seed: int) -> None:
        cache.repeat(context)

    def has_rows(self, cache: RemoteRows) -> bool:
        return cache.there.kept.in_rows

    def room(self, cache: RemoteRows) -> int:
        return min((max(0, window - cache.tokens) for window in cache.there.kept.windows), default=ANY)

    def needs_mark(self, cache: RemoteRows) -> bool:
        return cache.there.kept.running

    def mark(self, cache: RemoteRows) -> RemoteNote:
        return cache.mark()

    def return_to(self, cache: RemoteRows, mark: RemoteNote, tokens: int) -> None:
        if tokens:
            cache.return_to(mark, tokens)

    def can_go_back(self, cache: RemoteRows) -> bool:
        kept = cache.there.kept
        return not kept.running and all(cache.tokens < window for window in kept.windows)

    def cut(self, cache: RemoteRows, stored: int, tokens: int) -> RemoteRows:
        return cache.copy(ALL if tokens == cache.tokens else tokens)

    def compact(self, cache: RemoteRows) -> RemoteRows:
        return cache.copy(cache.tokens) if cache.tokens and self.can_go_back(cache) else cache

    def saved(self, cache: RemoteRows) -> RemoteNote | None:
        return None if self.has_rows(cache) else cache.saved()

    def restored(self, cache: RemoteRows, stored: int, tokens: int, state: RemoteNote | None) -> RemoteRows:
        if state is None:
            return self.cut(cache, stored, tokens)
        return cache.restored(state, stored, tokens)

    def arrays(self, cache: RemoteRows) -> tuple[()]:
        return ()

    def kept(self, cache: RemoteRows) -> tuple[()]:
        return ()

    def rows(self, cache: RemoteRows, start: int, count: int) -> None:
        return None

    def sizes(self, cache: RemoteRows) -> StateSizes:
        return StateSizes(0)


for _kind in (RemoteRows, RemoteBatch, RemoteNote):
    register(_kind, RemoteKind())


def divided(caches: Sequence[object], others: int) -> tuple[list[Any], list[RemoteRows]]:
    """A sequence's caches: this machine's own, and the last ones, an entry for each other machine.

    Raises TypeError if those are of layers of this machine.
    """
    count = len(caches) - others
    remote = []
    for each in caches[count:]:
        if not isinstance(each, RemoteRows):
            raise TypeError(f"another machine's rows are no {type(each).__name__}")
        remote.append(each)
    return list(caches[:count]), remote
