"""The kinds of state that a layer keeps of a sequence, each as a class that says what can be done with it.

    kind           mlx-lm's cache       back to an earlier token            to a machine or a disk
    PlainRows      KVCache              any                                 rows
    PackedRows     PackedKVCache        any                                 rows
    QuantisedRows  QuantizedKVCache     any                                 rows
    JoinedRows     ConcatenateKVCache   any                                 no
    Window         RotatingKVCache      until it has moved, or a snapshot   whole
    Running        ArraysCache          a snapshot, or a mark               whole
    Several        CacheList            as its parts                        as its parts
    BatchRows      BatchKVCache,        of all sequences in step            no
                   PackedBatchKVCache
    StateKind      any other            a snapshot                          no

Rows past a cache's end are never read, so taking tokens back is exact. A window that has moved has lost its
oldest rows, and a state that was advanced cannot be gone back on. But the state before a pass can be kept, as
a mark, and all of the pass undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from fleetd.control.model_facts import StateSizes
from fleetd.engine.sequence_state import rings
from fleetd.engine.sequence_state.copies import beginning, copy_on_write
from fleetd.engine.sequence_state.packed_caches import PackedBatchKVCache, PackedKVCache
from fleetd.engine.sequence_state.shapes import (
    AnyShape,
    KvShape,
    PackedShape,
    QuantisedShape,
    RunningShape,
)
from fleetd.engine.sequence_state.write_index import write_index

ANY = 1 << 30


class StateKind:
    """What can be done with one kind of cache. An unknown one is used at its last token only: no more is
    known of it. ``cache`` is one of its kind everywhere."""

    # Rows of one sequence, and nothing else.
    plain = False
    # A stage of a model can keep it, and hand it over.
    shared = False
    # It can be written to a disk.
    stored = False
    # Attention reads it, and gives it keys and values in one call.
    attention = True

    def is_plain(self, cache: Any) -> bool:
        """``plain``; where one stands for several, of all of them."""
        return self.plain

    def widens(self, cache: Any) -> bool:
        """True if a pass over two tokens can be taken back by one, whatever is in there."""
        return False

    def repeats(self, cache: Any) -> bool:
        """True if ``repeat`` can extend it, or if it is as large behind any context."""
        return self.plain or self.needs_mark(cache)

    def repeat(self, cache: Any, context: int, seed: int) -> None:
        """Extend a cache that ``repeats`` and is not empty to ``context`` tokens: its rows again and again,
        with a little noise, so that no two are equal. A running state stays as it is."""
        if not self.plain:
            return
        keys = mx.random.split(mx.random.key(seed), 2)
        made = [
            _repeated(rows, context, key) for key, rows in zip(keys, cache.keys_and_values(), strict=True)
        ]
        self.fill(cache, made[0], made[1], context)
        mx.eval(made)

    def has_rows(self, cache: Any) -> bool:
        """True if it has a row per token, so that it can be cut at any."""
        return False

    def room(self, cache: Any) -> int:
        """Tokens that can be added and taken back again, bit for bit; 0 if none can."""
        return 0

    def needs_mark(self, cache: Any) -> bool:
        """True if what is added can only be taken back all at once, to a ``mark``."""
        return False

    def mark(self, cache: Any) -> Any:
        """What ``return_to`` needs to come back to where ``cache`` is now."""
        return None

    def return_to(self, cache: Any, mark: Any, tokens: int) -> None:
        """Undo the last ``tokens``, all that were added since ``mark``, and that ``room`` allowed."""
        if tokens:
            cache.trim(tokens)

    def can_go_back(self, cache: Any) -> bool:
        """True if it can be cut at any of its tokens now."""
        return False

    def held(self, cache: Any) -> int | None:
        """Tokens in there; None if it does not count them."""
        return int(cache.offset) if hasattr(cache, "offset") else None

    def end(self, cache: Any) -> int:
        """Where in its arrays the newest row ends."""
        return int(cache.offset)

    def set_held(self, cache: Any, tokens: int) -> None:
        """Let its first ``tokens`` rows count, which are there. Not of a window."""
        cache.offset = tokens

    def fill(self, cache: Any, keys: mx.array, values: mx.array, tokens: int) -> None:
        """Let it hold these keys and values, the first ``tokens`` of which count. Not of a window."""
        cache.keys, cache.values = keys, values
        self.set_held(cache, tokens)

    def window(self, cache: Any) -> int | None:
        """Tokens back that it keeps; None if it has no such bound."""
        return None

    def cut(self, cache: Any, stored: int, tokens: int) -> Any:
        """A private copy of a cache of ``stored`` tokens as it was after ``tokens``; see ``can_go_back``."""
        own = copy_on_write(cache)
        if tokens < stored:
            own.trim(stored - tokens)
        return own

    def compact(self, cache: Any) -> Any:
        """The same without room to grow."""
        return cache

    def saved(self, cache: Any) -> Any:
        """What ``restored`` needs besides a later cache to come back to this token; None if nothing."""
        return copy_on_write(cache)

    def restored(self, cache: Any, stored: int, tokens: int, state: Any) -> Any:
        """A private copy of a cache of ``stored`` tokens, as it was when ``state`` was saved."""
        return copy_on_write(state)

    def arrays(self, cache: Any) -> tuple[Any, ...]:
        """All that it keeps, with room to grow."""
        return cache.keys, cache.values

    def kept(self, cache: Any) -> Sequence[mx.array]:
        """All that it keeps, without."""
        return tuple(cache.keys_and_values())

    def rows(self, cache: Any, start: int, count: int) -> tuple[mx.array, ...] | None:
        """Keys and values of tokens [start, start + count), in all their arrays, if it has them."""
        return cache.keys[..., start : start + count, :], cache.values[..., start : start + count, :]

    def numbers(self, cache: Any, rows: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """What of ``rows`` enters attention: they themselves, if they are not quantised."""
        return rows

    def floats(self, cache: Any) -> tuple[Any, ...]:
        """Arrays (1, heads, rows, numbers), of a cache with rows, in which a number that is not finite
        shows."""
        return self.arrays(cache)

    def sizes(self, cache: Any) -> StateSizes:
        """What a cache of its kind takes for any number of tokens; this one holds a few."""
        return StateSizes(self._row_bytes(cache))

    def _row_bytes(self, cache: Any) -> int:
        """Bytes of a token."""
        if getattr(cache, "keys", None) is None:
            return 0
        return sum(array.nbytes // array.shape[2] for array in self.arrays(cache) if array is not None)

    def shape(self, cache: Any) -> AnyShape:
        """The shape of a cache that is not empty. Raises TypeError: it cannot be sent."""
        raise TypeError(f"a {type(cache).__name__} stays where it is")


class Rows(StateKind):
    """A row per token, so that it can be cut at any."""

    def has_rows(self, cache: Any) -> bool:
        return True

    def room(self, cache: Any) -> int:
        return ANY

    def can_go_back(self, cache: Any) -> bool:
        return True

    def saved(self, cache: Any) -> None:
        return None

    def restored(self, cache: Any, stored: int, tokens: int, state: None) -> Any:
        return self.cut(cache, stored, tokens)


class PlainRows(Rows):
    plain = shared = stored = True

    def widens(self, cache: Any) -> bool:
        return True

    def cut(self, cache: Any, stored: int, tokens: int) -> Any:
        # Without the longer one's room to grow: it would count again in the copy's own entry.
        return beginning(cache, tokens)

    def compact(self, cache: Any) -> Any:
        return beginning(cache, cache.offset)

    def shape(self, cache: Any) -> KvShape:
        return KvShape(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype)


class PackedRows(PlainRows):
    """``arrays`` and ``rows`` are words of quantised numbers; ``numbers`` makes numbers of them."""

    def fill(self, cache: PackedKVCache, keys: mx.array, values: mx.array, tokens: int) -> None:
        super().fill(cache, cache.packing.pack(keys), cache.packing.pack(values), tokens)

    def numbers(self, cache: PackedKVCache, rows: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        packing = cache.packing
        widths = packing.key_width, packing.value_width
        return tuple(packing.unpack(words, width) for words, width in zip(rows, widths, strict=True))

    def floats(self, cache: PackedKVCache) -> tuple[mx.array, ...]:
        packing = cache.packing
        widths = packing.key_width, packing.value_width
        each = zip(self.arrays(cache), widths, strict=True)
        return tuple(packing.ends(words, width) for words, width in each)

    def shape(self, cache: PackedKVCache) -> PackedShape:
        return PackedShape.of(cache.keys.shape[1], cache.packing)


class QuantisedRows(Rows):
    """Keys and values are three arrays each: packed numbers, scales, biases."""

    stored = True

    def arrays(self, cache: Any) -> tuple[Any, ...]:
        return (*(cache.keys or ()), *(cache.values or ()))

    def kept(self, cache: Any) -> Sequence[mx.array]:
        keys, values = cache.keys_and_values()
        return (*keys, *values)

    def rows(self, cache: Any, start: int, count: int) -> tuple[mx.array, ...]:
        return tuple(array[..., start : start + count, :] for array in self.arrays(cache))

    def shape(self, cache: Any) -> QuantisedShape:
        arrays = (*cache.keys, *cache.values)
        return QuantisedShape(
            cache.keys[0].shape[1],
            tuple((int(array.shape[3]), array.dtype) for array in arrays),
            cache.group_size,
            cache.bits,
        )


class JoinedRows(Rows):
    """Every addition makes new arrays, without room to grow."""


class Window(StateKind):
    shared = stored = True

    def room(self, cache: Any) -> int:
        # The row that fills the window is the last that displaces none.
        return max(0, int(cache.max_size) - int(cache.offset))

    def can_go_back(self, cache: Any) -> bool:
        return int(cache.offset) < int(cache.max_size)

    def end(self, cache: Any) -> int:
        # In a cache that rotates as in one that has not yet, the newest rows end where it writes next.
        return write_index(cache)

    def window(self, cache: Any) -> int:
        return int(cache.max_size)

    def sizes(self, cache: Any) -> StateSizes:
        return StateSizes(0, window_bytes=self._row_bytes(cache), window=self.window(cache))

    def kept(self, cache: Any) -> Sequence[mx.array]:
        # As they lie: on a CPU, the cache hands them out in the order of their tokens.
        return tuple(rows[..., : int(cache.offset), :] for rows in self.arrays(cache))

    def saved(self, cache: Any) -> Any:
        return rings.saved(cache)

    def rows(self, cache: Any, start: int, count: int) -> tuple[mx.array, mx.array] | None:
        return rings.rows(cache, start, count)

    def shape(self, cache: Any) -> KvShape:
        keys, values = cache.keys, cache.values
        return KvShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, int(cache.max_size))


class Running(StateKind):
    """MLX replaces such arrays and does not write into them, so a copy is a second name for memory that
    would have been freed."""

    shared = stored = True
    attention = False

    def room(self, cache: Any) -> int:
        return ANY

    def needs_mark(self, cache: Any) -> bool:
        return True

    def mark(self, cache: Any) -> Any:
        # The list is the cache's own, which writes into it.
        return list(cache.cache), cache.left_padding, cache.lengths

    def return_to(self, cache: Any, mark: Any, tokens: int) -> None:
        arrays, left_padding, lengths = mark
        cache.state = list(arrays), left_padding, lengths

    def arrays(self, cache: Any) -> tuple[Any, ...]:
        return tuple(cache.cache)

    def kept(self, cache: Any) -> Sequence[mx.array]:
        return tuple(cache.cache)

    def rows(self, cache: Any, start: int, count: int) -> None:
        return None

    def sizes(self, cache: Any) -> StateSizes:
        return StateSizes(0, state_bytes=int(cache.nbytes))

    def shape(self, cache: Any) -> RunningShape:
        if any(array is None for array in cache.cache):
            raise TypeError("a running state of which some arrays are not there yet")
        return RunningShape(tuple((tuple(array.shape), array.dtype) for array in cache.cache))


class Several(StateKind):
    """Several parts of one layer. They are asked one by one where they are sent somewhere."""

    attention = False

    def has_rows(self, cache: Any) -> bool:
        return all(kind_of(part).has_rows(part) for part in cache.caches)

    def room(self, cache: Any) -> int:
        return min(kind_of(part).room(part) for part in cache.caches)

    def needs_mark(self, cache: Any) -> bool:
        return any(kind_of(part).needs_mark(part) for part in cache.caches)

    def mark(self, cache: Any) -> list[Any]:
        return [kind_of(part).mark(part) for part in cache.caches]

    def return_to(self, cache: Any, mark: list[Any], tokens: int) -> None:
        for part, each in zip(cache.caches, mark, strict=True):
            kind_of(part).return_to(part, each, tokens)

    def can_go_back(self, cache: Any) -> bool:
        return all(kind_of(part).can_go_back(part) for part in cache.caches)

    def held(self, cache: Any) -> int | None:
        return first_held(cache.caches)

    def compact(self, cache: Any) -> Any:
        return CacheList(*(kind_of(part).compact(part) for part in cache.caches))

    def saved(self, cache: Any) -> list[Any] | None:
        if self.has_rows(cache):
            return None
        return [kind_of(part).saved(part) for part in cache.caches]

    def restored(self, cache: Any, stored: int, tokens: int, state: list[Any] | None) -> Any:
        if state is None:
            return self.cut(cache, stored, tokens)
        return CacheList(
            *(
                kind_of(part).restored(part, stored, tokens, each)
                for part, each in zip(cache.caches, state, strict=True)
            )
        )


class BatchRows(StateKind):
    """The rows of several sequences at once."""

    def widens(self, cache: Any) -> bool:
        return True

    def held(self, cache: Any) -> int:
        return write_index(cache)


_KINDS: dict[type, StateKind] = {
    KVCache: PlainRows(),
    PackedKVCache: PackedRows(),
    QuantizedKVCache: QuantisedRows(),
    ConcatenateKVCache: JoinedRows(),
    RotatingKVCache: Window(),
    ArraysCache: Running(),
    CacheList: Several(),
    BatchKVCache: BatchRows(),
    PackedBatchKVCache: BatchRows(),
}
_OTHER = StateKind()


def register(cache: type, kind: StateKind) -> None:
    """Tell of a class of caches that another package defines."""
    _KINDS[cache] = kind


def kind_of(cache: Any) -> StateKind:
    """The kind of a cache, by its very class: one derived from it may do otherwise."""
    return _KINDS.get(type(cache), _OTHER)


def first_held(caches: Sequence[Any]) -> int | None:
    """Tokens in there, as the first of them says that counts them."""
    found = (kind_of(cache).held(cache) for cache in caches)
    return next((tokens for tokens in found if tokens is not None), None)


def all_plain(caches: Sequence[Any]) -> bool:
    """True if nothing but plain rows is kept."""
    return all(kind_of(cache).is_plain(cache) for cache in caches)


def _repeated(rows: mx.array, context: int, key: mx.array) -> mx.array:
    times = -(-context // rows.shape[2])
    repeated = mx.concatenate([rows] * times, axis=2)[:, :, :context]
    noise = mx.random.normal(repeated.shape, key=key).astype(repeated.dtype)
    return repeated * (1 + noise / 8)
