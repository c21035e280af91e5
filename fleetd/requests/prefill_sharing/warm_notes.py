"""What this machine's helpers may still have of its earlier prompts, by their own word."""

from __future__ import annotations

from collections import deque

from fleetd import limits
from fleetd.plan.prefill.split import WarmRows


class WarmNotes:
    """Node ids of helpers with the rows that they said they keep, newest last, by the model's digest."""

    def __init__(self) -> None:
        self._notes: dict[str, deque[tuple[str, WarmRows]]] = {}

    def note(self, digest: str, node_id: str, rows: WarmRows) -> None:
        """A helper keeps rows. What it kept of the same tokens before is replaced."""
        notes = self._notes.setdefault(digest, deque(maxlen=limits.SHARE_WARM_PROMPTS))
        self._drop(notes, node_id, rows)
        notes.append((node_id, rows))

    def gone(self, digest: str, node_id: str, rows: WarmRows) -> None:
        """A helper has them no longer."""
        self._drop(self._notes.get(digest, deque()), node_id, rows)

    def rows(self, digest: str) -> list[WarmRows]:
        """All that helpers may have, for the worker to compare with a prompt."""
        return [rows for _, rows in self._notes.get(digest, ())]

    def of(self, digest: str, matching: list[WarmRows]) -> tuple[tuple[str, WarmRows], ...]:
        """The most that each helper has of what is ``matching``."""
        best: dict[str, WarmRows] = {}
        for node_id, rows in self._notes.get(digest, ()):
            before = best.get(node_id)
            if rows in matching and (before is None or _size(rows) >= _size(before)):
                best[node_id] = rows
        return tuple(best.items())

    @staticmethod
    def _drop(notes: deque[tuple[str, WarmRows]], node_id: str, rows: WarmRows) -> None:
        if (node_id, rows) in notes:
            notes.remove((node_id, rows))


def _size(rows: WarmRows) -> int:
    return rows.tokens * (rows.last - rows.first)
