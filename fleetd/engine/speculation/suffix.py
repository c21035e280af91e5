"""Drafts from the longest end of the answer that was there before: in the prompt, in the answer, or in past
answers of this worker, if those are remembered.

A draft is no longer than the match it rests on (SuffixDecoding, arXiv 2411.04975): a long match says much
about what follows, a short one little.

Past answers are kept only where the settings allow it, as token ids without any text, apart for each
key that requests bring, and bounded: the older half of a key's share goes at once, least used keys go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fleetd import limits
from fleetd.engine.speculation.automaton import BYTES_PER_TOKEN, ROOT, Automaton

SHORTEST = 3
_END = -1


class PastAnswers:
    """Past answers by key, newest in the second automaton of two; both together stay within the bound."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // BYTES_PER_TOKEN // 2
        self._keys: OrderedDict[str, tuple[Automaton, Automaton]] = OrderedDict()

    def of(self, key: str) -> tuple[Automaton, ...]:
        """The automata of this key's past answers; none if it has none."""
        return self._keys.get(key, ())

    def add(self, key: str, tokens: Sequence[int]) -> None:
        """Remember a complete answer; of one that is longer than the room for it, the beginning."""
        kept = tokens[: self._half - 1]
        if len(kept) <= SHORTEST:
            return
        older, newer = self._keys.pop(key, (Automaton(), Automaton()))
        if len(newer) + len(kept) >= self._half:
            older, newer = newer, Automaton()
        for token in kept:
            newer.append(token)
        newer.append(_END)  # no match goes from one answer into another
        self._keys[key] = older, newer
        while len(self) > 2 * self._half:
            self._keys.popitem(last=False)

    def __len__(self) -> int:
        """Tokens kept."""
        return sum(len(older) + len(newer) for older, newer in self._keys.values())

    @property
    def nbytes(self) -> int:
        return len(self) * BYTES_PER_TOKEN


class _Reader:
    """The longest end of one answer, as it grows, that occurs in past answers."""

    def __init__(self, past: Automaton) -> None:
        self._past = past
        self._state, self.matched = ROOT, 0

    def read(self, token: int) -> None:
        self._state, self.matched = self._past.step(self._state, self.matched, token)

    def next(self, width: int) -> list[int]:
        at = self._past.after(self._state)
        drafts = self._past.text[at : at + width]
        return drafts[: drafts.index(_END)] if _END in drafts else drafts


class SuffixSource:
    """A source over one answer's prompt, itself, and ``past``."""

    name = "suffix"

    def __init__(self, past: Sequence[Automaton] = ()) -> None:
        self._own = Automaton()
        self._readers = [_Reader(automaton) for automaton in past]
        self._skipped = -1

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        if not self._read(tokens):
            return []
        own = self._own
        matched, drafts = own.matched, own.text[own.matched_end : own.matched_end + min(width, own.matched)]
        for reader in self._readers:
            if reader.matched > matched and (found := reader.next(min(width, reader.matched))):
                matched, drafts = reader.matched, found
        return drafts if matched >= SHORTEST else []

    def committed(self, tokens: Sequence[int]) -> None:
        """Nothing to do: ``propose`` reads what is new."""

    def close(self) -> None:
        self._own, self._readers = Automaton(), []

    def _read(self, tokens: Sequence[int]) -> bool:
        """Take up some of what is new; False while there is more of it."""
        if self._skipped < 0:
            self._skipped = max(0, len(tokens) - limits.SPEC_INDEX_TOKENS)
        at = self._skipped + len(self._own)
        end = min(len(tokens), at + limits.SPEC_INDEX_STEP)
        for token in tokens[at:end]:
            self._own.append(token)
            for reader in self._readers:
                reader.read(token)
        return end == len(tokens)
