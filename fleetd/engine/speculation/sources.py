"""Where drafts come from: guesses at the tokens that an answer goes on with.

A wrong guess costs time and nothing else, so a source may be careless, but it must never wait: what it does
not know now is left to other sources, or to a plain step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states of committed tokens, as the last pass of the target model computed them.

    The newest token is among them if its step has been computed: in a batch it has, after a verified pass it
    has not. Rows of earlier tokens may come again, and may be missing: of a prompt only its end is given, and
    only as much of that as was computed here.
    """

    # The index in the text of the token that row 0 belongs to.
    start: int
    # By layer, from 0: its output before the model's last norm, an mx.array of (rows, width). A layer that
    # gives several states for each token is left out.
    states: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """What a source may draft from."""

    # Prompt and answer so far. They grow between calls and never change; valid during the call only.
    tokens: Sequence[int]
    # Most tokens that are of use.
    width: int
    # Rows of all layers that any source of this answer asked for; None if none was asked for, or computed.
    hidden: HiddenRows | None = None
    # What the target model keeps of all tokens but the newest, as mlx-lm lists it: to read, not to change.
    # None if that is not at hand.
    cache: Sequence[Any] | None = None


class DraftSource(Protocol):
    """Guesses for one answer. All calls come from the compute thread, between two passes."""

    @property
    def name(self) -> str:
        """The name shown in figures, from a closed list: "lookup", "suffix", "drafter", …"""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices of the target model's layers whose hidden states ``propose`` needs; empty costs nothing."""

    def propose(self, context: Context) -> list[int]:
        """Propose at most ``context.width`` tokens that may follow ``context.tokens``, or none."""

    def committed(self, tokens: Sequence[int]) -> None:
        """These tokens were added to the answer, drafted or not."""

    def close(self) -> None:
        """Called when the answer has ended. Idempotent."""
