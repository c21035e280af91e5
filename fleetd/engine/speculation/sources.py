"""Where drafts come from: guesses at the tokens that an answer goes on with.

A wrong guess costs time and nothing else, so a source may be careless, but it must never wait: what it does
not know now is left to other sources, or to a plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Guesses for one answer. All calls come from the compute thread, between two passes."""

    @property
    def name(self) -> str:
        """The name shown in figures, from a closed list: "lookup", "suffix", "drafter", …"""

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        """Propose at most ``width`` tokens that may follow ``tokens`` (prompt and answer so far), or none.

        ``tokens`` grow between calls and never change; the sequence is only valid during the call.
        """

    def committed(self, tokens: Sequence[int]) -> None:
        """These tokens were added to the answer, drafted or not."""

    def close(self) -> None:
        """Called when the answer has ended. Idempotent."""
