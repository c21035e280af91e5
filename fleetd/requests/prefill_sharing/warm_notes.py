"""What this machine's helpers may still have of its earlier prompts, by their own word."""

from __future__ import annotations

from collections import deque

import msgspec

from fleetd import limits
from fleetd.plan.prefill.split import WarmRows


class WarmNote(msgspec.Struct, frozen=True):
    """``exact``: all that went into the rows is what this machine would have computed."""

    node_id: str
    rows: WarmRows
    exact: bool


class WarmNotes:
    """What helpers said they keep, newest last, by the model's digest."""

    def __init__(self) -> None:
        self._notes: dict[str, deque[WarmNote]] = {}

    def note(self, digest: str, node_id: str, rows: WarmRows, *, exact: bool = True) -> None:
        """A helper keeps rows. What it kept of the same tokens before is replaced."""
        notes = self._notes.setdefault(digest, deque(maxlen=limits.SHARE_WARM_PROMPTS))
        self._drop(notes, node_id, rows)
        notes.append(WarmNote(node_id, rows, exact))

    def gone(self, digest: str, node_id: str, rows: WarmRows) -> None:
        """A helper has them no longer."""
        self._drop(self._notes.get(digest, deque()), node_id, rows)

    def rows(self, digest: str) -> list[WarmRows]:
        """All that helpers may have, for the worker to compare with a prompt."""
        return [note.rows for note in self._notes.get(digest, ())]

    def of(
        self, digest: str, matching: list[WarmRows], *, exact: bool = False
    ) -> tuple[tuple[str, WarmRows], ...]:
        """The most that each helper has of what is ``matching``; ``exact``: of what is exact."""
        best: dict[str, WarmRows] = {}
        for note in self._notes.get(digest, ()):
            if note.rows not in matching or (exact and not note.exact):
                continue
            before = best.get(note.node_id)
            if before is None or _size(note.rows) >= _size(before):
                best[note.node_id] = note.rows
        return tuple(best.items())

    @staticmethod
    def _drop(notes: deque[WarmNote], node_id: str, rows: WarmRows) -> None:
        for note in [note for note in notes if (note.node_id, note.rows) == (node_id, rows)]:
            notes.remove(note)


def _size(rows: WarmRows) -> int:
    return rows.tokens * (rows.last - rows.first)
