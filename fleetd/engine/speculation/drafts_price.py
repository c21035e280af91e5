"""What the drafts of a source take of this device."""

from __future__ import annotations

from dataclasses import dataclass

# The share of what a draft took, beside what was expected of it, that is believed at once.
_BELIEVED = 0.2


@dataclass(slots=True)
class DraftPrice:
    """A draft takes ``once_s`` seconds, and ``token_s`` for each of its tokens."""

    once_s: float
    token_s: float

    @classmethod
    def between(cls, one_s: float, all_s: float, tokens: int) -> DraftPrice:
        """The price if a draft of one token takes ``one_s`` and one of ``tokens`` takes ``all_s``."""
        token_s = max(0.0, min(all_s - one_s, one_s)) / max(1, tokens - 1)
        return cls(max(0.0, one_s - token_s), token_s)

    def seconds(self, tokens: int) -> float:
        return self.once_s + tokens * self.token_s if tokens else 0.0

    def took(self, tokens: int, seconds: float) -> None:
        """A draft of ``tokens`` took ``seconds``."""
        scale = 1 + _BELIEVED * (seconds / self.seconds(tokens) - 1)
        self.once_s, self.token_s = scale * self.once_s, scale * self.token_s
