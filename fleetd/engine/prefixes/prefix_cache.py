"""The prefix cache: KV of earlier prompts and answers, in RAM, found by the tokens they were computed from.

An entry's namespace says how its numbers came about: computed here or equal to that (``DENSE``), with
another accelerator's part in them (``EQUIVALENT``), or with tokens left out (``SPARSE``). Its origins say
which machines sent some of it, or of what it rests on: labels, each of which may be forgotten with all that
came under it. Every fetch gives a copy no longer than what was asked for, and one prompt token is always left
to compute: its logits are needed.

There are few entries and comparing tokens is quick, so a search looks at all of them; an index of nodes per
token would take more memory than some of the caches it finds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fleetd import limits
from fleetd.engine.failures import require
from fleetd.engine.measure.memory import NO_BOUND, RowBound
from fleetd.engine.sequence_state import checkpoints, rollback
from fleetd.engine.sequence_state.kinds import kind_of

DENSE = "dense"
# Another accelerator had a part in it: not for answers that must be exact.
EQUIVALENT = "equivalent"
# Tokens of the prompt were left out: only for a prompt that leaves out the same. Its tokens are
# ``sequence.ScheduledSequence.slot_tokens``.
SPARSE = "sparse"

# Labels of the machines that rows came from, or rest on rows of; none if all was computed here.
Origins = frozenset[str]
NO_ORIGINS: Origins = frozenset()

_Tokens = npt.NDArray[np.int64]


@dataclass(slots=True)
class Hit:
    """A private copy of the KV of ``tokens`` leading prompt tokens; ``cache`` is None if tokens is 0.

    ``front``: how many of them were computed for this prompt itself while the others came. ``origins``:
    labels of the machines that some of it came from.
    """

    tokens: int
    cache: list[Any] | None
    namespace: str = DENSE
    front: int = 0
    origins: Origins = NO_ORIGINS


class _PrefixEntry(msgspec.Struct, frozen=True):
    namespace: str
    tokens: _Tokens
    cache: list[Any]
    nbytes: int
    # Whether it also serves a prompt that shares only its beginning: a recurrent state or a window that has
    # moved on cannot be taken back.
    trimmable: bool
    # States at earlier tokens for what cannot be taken back: ``checkpoints.saved`` by token.
    states: dict[int, list[Any]] = msgspec.field(default_factory=dict)
    origins: Origins = NO_ORIGINS

    def serves(self, shared: int) -> int:
        """The most tokens, of ``shared`` leading ones, whose state can be had."""
        if self.trimmable or shared == len(self.tokens):
            return shared
        return max((at for at in self.states if at <= shared), default=0)

    def copy(self, tokens: int) -> list[Any]:
        """A private cache of the first ``tokens``, as many as it ``serves``."""
        stored = len(self.tokens)
        if tokens < stored and not self.trimmable:
            return checkpoints.restored(self.cache, stored, tokens, self.states[tokens])
        return [kind_of(layer).cut(layer, stored, tokens) for layer in self.cache]


@dataclass(slots=True)
class PrefixCache:
    """Bounded by bytes, by entries, and by ``rows``, which bounds what entries have on other machines of a
    group; least recently used goes first."""

    max_bytes: int
    max_entries: int = 64
    rows: RowBound = NO_BOUND
    nbytes: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    # By a running number, least recently used first.
    _entries: OrderedDict[int, _PrefixEntry] = field(default_factory=OrderedDict, init=False)
    _next: int = field(default=0, init=False)
    # Labels that were forgotten: prompts that began under them may still run.
    _forgotten: deque[str] = field(default_factory=lambda: deque(maxlen=limits.FORGOTTEN_ORIGINS), init=False)

    @property
    def state_bytes(self) -> int:
        """Memory for one prompt's states at earlier tokens."""
        return self.max_bytes // limits.CHECKPOINT_SHARE

    def fetch(self, prompt: list[int], *namespaces: str) -> Hit:
        """The longest stored prefix of ``prompt`` short of its last token; DENSE where none are named.

        Of two as long, the one in the namespace that is named first.
        """
        best, length = self._find(prompt, namespaces)
        if best is None:
            return Hit(0, None)
        self._entries.move_to_end(best)
        entry = self._entries[best]
        return Hit(length, entry.copy(length), entry.namespace, origins=entry.origins)

    def longest(self, prompt: list[int], *namespaces: str) -> int:
        """How many tokens ``fetch`` would give. Nothing is copied."""
        return self._find(prompt, namespaces)[1]

    def _find(self, prompt: list[int], namespaces: tuple[str, ...]) -> tuple[int | None, int]:
        head = np.array(prompt[:-1], dtype=np.int64)
        best, length, most = None, 0, 0
        for namespace in namespaces or (DENSE,):
            for key, entry in self._entries.items():
                served = entry.serves(_shared(entry.tokens, head)) if entry.namespace == namespace else 0
                # What another machine sent serves where it saves a block: else every prompt would rest on it,
                # because all begin with the same few tokens of the template.
                worth = served - limits.CACHE_BLOCK_TOKENS * bool(entry.origins)
                if worth > most:
                    best, length, most = key, served, worth
        return best, length

    def store(
        self,
        tokens: list[int],
        cache: list[Any],
        namespace: str = DENSE,
        states: dict[int, list[Any]] | None = None,
        origins: Origins = NO_ORIGINS,
    ) -> None:
        """Keep ``cache``, which holds exactly the KV of ``tokens``. The caller must not write to it again.

        ``states``: what ``checkpoints.saved`` gave at earlier tokens; left out where they do not fit.
        ``origins``: as in a Hit; nothing is kept under one that was forgotten.
        """
        size = sum(int(layer.nbytes) for layer in cache)
        if not tokens or size > self.max_bytes or not origins.isdisjoint(self._forgotten):
            return
        if not self.rows.fits(len(tokens)):
            return
        states = states or {}
        extra = sum(checkpoints.nbytes(state) for state in states.values())
        if size + extra > self.max_bytes:
            states, extra = {}, 0
        size += extra
        new = _PrefixEntry(
            namespace,
            np.array(tokens, dtype=np.int64),
            cache,
            size,
            rollback.can_go_back(cache),
            states,
            origins,
        )
        for key, old in list(self._entries.items()):
            shared = _shared(old.tokens, new.tokens) if old.namespace == namespace else 0
            served = shared == len(new.tokens) and (old.trimmable or shared == len(old.tokens))
            if served and old.origins <= origins:
                self._entries.move_to_end(key)  # what is there serves wherever this would
                return
            if shared == len(old.tokens) and new.trimmable:
                self._drop(key)
        self._entries[self._next] = new
        self._next += 1
        self.nbytes += size
        self._tokens += len(tokens)
        while len(self._entries) > self.max_entries or not self._rows_fit:
            self._drop(next(iter(self._entries)))
        self.trim(self.max_bytes)

    def trim(self, max_bytes: int) -> None:
        """Drop entries until at most ``max_bytes`` remain: running requests come first."""
        while self._entries and self.nbytes > max_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, labels: Collection[str]) -> None:
        """Drop what came under these labels, or rests on that; keep nothing more under them."""
        self._forgotten.extend(labels)
        for key in [key for key, entry in self._entries.items() if not entry.origins.isdisjoint(labels)]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.nbytes -= entry.nbytes
        self._tokens -= len(entry.tokens)

    @property
    def _rows_fit(self) -> bool:
        return self.rows.fits(self._tokens, len(self._entries))

    def validate(self) -> None:
        """Check the bounds and the count of bytes."""
        require(self.nbytes == sum(entry.nbytes for entry in self._entries.values()), "bytes are miscounted")
        require(self.nbytes <= self.max_bytes, f"{self.nbytes} of {self.max_bytes} bytes are kept")
        require(len(self._entries) <= self.max_entries, f"{len(self._entries)} entries are kept")
        require(self._rows_fit, f"{len(self._entries)} entries of {self._tokens} tokens are kept")

    def __len__(self) -> int:
        return len(self._entries)


def _shared(a: _Tokens, b: _Tokens) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    different = a[:n] != b[:n]
    at = int(different.argmax())
    return at if different[at] else n
