"""Answers that clients come back to, in memory: found by an id, as are parts of them.

An answer is forgotten once it was not used for RESPONSE_KEPT_S. If there are too many, or they are too
large together, those go first that were not used for longest. Pure: the clock is an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleetd import limits

Answer = TypeVar("Answer")
AnswerPart = TypeVar("AnswerPart")


@dataclass(slots=True)
class _KeptAnswer(Generic[Answer, AnswerPart]):
    answer: Answer
    parts: Mapping[str, AnswerPart]
    n_bytes: int
    used_s: float


class KeptAnswers(Generic[Answer, AnswerPart]):
    """The answers of one daemon, which end with it. A ``client`` finds its own alone."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # By client and id, the one that was used last at the end.
        self._kept: dict[tuple[str, str], _KeptAnswer[Answer, AnswerPart]] = {}
        # By client and id of a part: the id of its answer.
        self._whole: dict[tuple[str, str], str] = {}
        self._bytes = 0

    @property
    def n_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, client: str, name: str, answer: Answer, parts: Mapping[str, AnswerPart], n_bytes: int
    ) -> None:
        """Keep an answer; one that is larger than all may be together is forgotten at once.

        Args:
            parts: by ids that no other answer's parts have.
        """
        self._kept[client, name] = _KeptAnswer(answer, parts, n_bytes, self._monotonic())
        self._whole |= {(client, part): name for part in parts}
        self._bytes += n_bytes
        self._forget()

    def find(self, client: str, name: str) -> Answer | None:
        """An answer, which is then kept for RESPONSE_KEPT_S from now."""
        found = self._use((client, name))
        return None if found is None else found.answer

    def part(self, client: str, name: str) -> AnswerPart | None:
        """A part of an answer. That counts as a use of the answer."""
        found = self._use((client, self._whole.get((client, name), "")))
        return None if found is None else found.parts[name]

    def remove(self, client: str, name: str) -> bool:
        """False if there is no such answer."""
        self._forget()
        known = (client, name) in self._kept
        if known:
            self._drop((client, name))
        return known

    def _use(self, key: tuple[str, str]) -> _KeptAnswer[Answer, AnswerPart] | None:
        self._forget()
        if (found := self._kept.pop(key, None)) is not None:
            self._kept[key] = found
            found.used_s = self._monotonic()
        return found

    def _forget(self) -> None:
        oldest_s = self._monotonic() - limits.RESPONSE_KEPT_S
        while self._kept:
            key, found = next(iter(self._kept.items()))
            few = len(self._kept) <= limits.RESPONSES_KEPT and self._bytes <= limits.RESPONSES_KEPT_BYTES
            if few and found.used_s > oldest_s:
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._kept.pop(key)
        self._bytes -= gone.n_bytes
        for part in gone.parts:
            del self._whole[key[0], part]
