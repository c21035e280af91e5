"""Bytes of what a model keeps of one sequence, by its tokens: known before anything is allocated."""

from __future__ import annotations

import msgspec


class StateSizes(msgspec.Struct, frozen=True):
    """All over the layers that are held.

    ``token_bytes``: of each token, however many there are. ``window_bytes``: of each of the last ``window``
    tokens besides; where windows differ, the largest counts. ``state_bytes``: whatever the number of tokens.
    """

    token_bytes: int
    state_bytes: int = 0
    window_bytes: int = 0
    window: int = 0

    def __add__(self, other: StateSizes) -> StateSizes:
        return StateSizes(
            self.token_bytes + other.token_bytes,
            self.state_bytes + other.state_bytes,
            self.window_bytes + other.window_bytes,
            max(self.window, other.window),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token more, while no window is full."""
        return self.token_bytes + self.window_bytes

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of ``tokens``, without the room to grow that caches may have."""
        return tokens * self.token_bytes + self.whole(tokens)

    def whole(self, tokens: int) -> int:
        """The part of them that has no row for every token: it is sent, and kept at earlier tokens, whole."""
        return self.state_bytes + min(tokens, self.window) * self.window_bytes

    def fitting(self, n_bytes: int) -> int:
        """The most tokens of a sequence that takes at most ``n_bytes``."""
        left = n_bytes - self.state_bytes
        within = max(0, left) // max(1, self.token_bytes + self.window_bytes)
        if within < self.window:
            return within
        return (left - self.window * self.window_bytes) // max(1, self.token_bytes)
