"""What was decided about a conversation's messages, for its later turns.

    turn 1   system user                     decided, remembered
    turn 2   system user answer user         the first two as they were: the prefix cache has them
             └── aged ────┘└─ looked at ─┘

Were old messages shortened anew for every question, each turn would have another prefix to prefill.
Where a question plainly asks for what was dropped, everything is looked at again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fleetd import limits
from fleetd.compression.anchors import relevance
from fleetd.compression.document import Document
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.selection import Selection
from fleetd.compression.words import Range, sentences

_ENCODE = msgspec.json.Encoder(order="deterministic").encode
# How much better than all that is kept a dropped sentence must fit the question to be wanted back.
_WANTED_BACK = 1.5


class Aged(dict[int, tuple[Range, ...]]):
    """Kept ranges of earlier blocks, by block index. ``compressor``: the model that scored them, "" if
    none did. ``original_tokens`` and ``kept_tokens`` of these blocks, as they were counted then. ``sparse``:
    True if tokens were left out of prefill rather than text out of the prompt.
    """

    def __init__(
        self, selection: Selection | None = None, compressor: str = "", *, sparse: bool = False
    ) -> None:
        super().__init__(enumerate(selection.kept if selection is not None else ()))
        self.compressor = compressor
        self.sparse = sparse
        self.original_tokens = selection.original_tokens if selection is not None else 0
        self.kept_tokens = selection.kept_tokens if selection is not None else 0


class History:
    """Decisions by conversation. The least recently used goes first; entries and their ranges are bounded."""

    def __init__(
        self, entries: int = limits.SMART_HISTORIES, ranges: int = limits.SMART_HISTORY_RANGES
    ) -> None:
        self._entries = entries
        self._ranges = ranges
        self._known: OrderedDict[bytes, Aged] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, messages: Sequence[Mapping[str, Any]], policy: SmartPrefillPolicy) -> Aged:
        """What was decided about the longest known beginning of ``messages``; {} where none is known."""
        keys = _keys(messages, policy)
        for count in range(len(keys), 0, -1):
            known = self._known.get(keys[count - 1])
            if known is not None:
                self._known.move_to_end(keys[count - 1])
                return known
        return Aged()

    def keep(
        self,
        messages: Sequence[Mapping[str, Any]],
        policy: SmartPrefillPolicy,
        selection: Selection,
        compressor: str = "",
        *,
        sparse: bool = False,
    ) -> None:
        """Store a decision about all of ``messages``, including one to drop nothing."""
        weight = _weight(selection.kept)
        if not messages or weight > self._ranges:
            return
        key = _keys(messages, policy)[-1]
        self._weight -= _weight(self._known.pop(key, Aged()).values())
        self._known[key] = Aged(selection, compressor, sparse=sparse)
        self._weight += weight
        while len(self._known) > self._entries or self._weight > self._ranges:
            self._weight -= _weight(self._known.popitem(last=False)[1].values())


def still_serves(document: Document, aged: Mapping[int, Sequence[Range]]) -> bool:
    """True if the kept parts of aged blocks have the words of this question."""
    kept: list[str] = []
    dropped: list[str] = []
    for index, block in enumerate(document.blocks):
        ranges = aged.get(index, ((0, len(block.text)),))
        for span in sentences(block.text, 0, len(block.text)):
            start, end = document.flat(index, span)
            if any(a < end and start < b for a, b in document.questions):
                continue
            inside = any(a <= span[0] and span[1] <= b for a, b in ranges)
            (kept if inside else dropped).append(block.text[slice(*span)])
    if not dropped:
        return True
    fits = relevance(document.question, [*kept, *dropped])
    best_kept = max(fits[: len(kept)], default=0.0)
    best_dropped = max(fits[len(kept) :])
    return best_dropped <= _WANTED_BACK * best_kept or best_dropped <= 0


def _keys(messages: Sequence[Mapping[str, Any]], policy: SmartPrefillPolicy) -> list[bytes]:
    """A hash of the policy and of each prefix of ``messages``."""
    key = hashlib.blake2b(_ENCODE(policy), digest_size=16).digest()
    keys = []
    for message in messages:
        key = hashlib.blake2b(key + _ENCODE(message), digest_size=16).digest()
        keys.append(key)
    return keys


def _weight(kept: Iterable[Sequence[Range]]) -> int:
    return sum(1 + len(ranges) for ranges in kept)
