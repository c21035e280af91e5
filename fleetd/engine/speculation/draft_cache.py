"""What a drafter's model keeps of a text, and how it goes back to an earlier token of it.

    the text      ─────────────────────┬───────┐ committed so far
    in the cache  ───────┬─────────────┼───────┼── guesses
    saved             settled        ahead     └ goes on otherwise from here: computed again from "settled"

Rows are cut at any token. A running state, or a window that has moved, is saved at two tokens: one that the
text has passed, so that nothing goes back behind it, and one ahead of it, which takes its place once the text
has passed that too. What was right beyond the saved token is computed again, in one pass.
"""

from __future__ import annotations

from typing import Any

from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.kinds import StateKind, kind_of
from fleetd.errors import ModelUnsupported

# States that are kept of a text besides those that its cache holds.
SAVED_STATES = 2


class DraftCache:
    """``tokens`` are those that ``layers`` hold.

    Raises ModelUnsupported if a layer keeps what cannot be copied here.
    """

    def __init__(self, layers: list[Any], tokens: list[int]) -> None:
        odd = {type(layer).__name__ for layer in layers if type(kind_of(layer)) is StateKind}
        if odd:
            raise ModelUnsupported(
                f"A model of this kind cannot draft: what it has read, in a {', '.join(sorted(odd))}, "
                "cannot be taken back."
            )
        self.layers, self.tokens = layers, tokens
        self._in_rows = not checkpoints.needed(layers)
        # By number of tokens, ascending.
        self._saved: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def go_back(self, length: int) -> None:
        """Go back to ``length`` tokens, or to the last saved state before them."""
        if length >= len(self.tokens):
            return
        state: list[Any] = [None] * len(self.layers)
        if not self._in_rows:
            self._saved = {at: kept for at, kept in self._saved.items() if at <= length}
            length = max(self._saved)
            state = self._saved[length]
        self.layers = checkpoints.gone_back(self.layers, len(self.tokens), length, state)
        del self.tokens[length:]

    def save(self, settled: int) -> None:
        """Save the state before tokens are added, unless enough are saved.

        ``settled``: leading tokens that are the text's own: the cache never goes back behind them.
        """
        if self._in_rows or len(self.tokens) in self._saved:
            return
        while len(self._saved) == SAVED_STATES and sorted(self._saved)[1] <= settled:
            del self._saved[min(self._saved)]
        if len(self._saved) < SAVED_STATES:
            self._saved[len(self.tokens)] = checkpoints.saved(self.layers)
