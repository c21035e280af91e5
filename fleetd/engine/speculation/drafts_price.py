"""What the drafts of a source take of this device."""

from __future__ import annotations

from dataclasses import dataclass, field

# The share of what a draft took, beside what was expected of it, that is believed at once.
_BELIEVED = 0.2
# A draft further off than this factor says more about the machine than about drafts.
_OFF = 3.0
# With each token that comes without a draft the price goes this part of the way back to what was measured at
# first: a source that has become dear is not asked, so nothing else would show that it is cheap again.
_FORGETS = 0.005


@dataclass(slots=True)
class DraftPrice:
    """A draft takes ``once_s`` seconds, and ``token_s`` for each of its tokens."""

    once_s: float
    token_s: float
    # Both as they were measured at first.
    _first: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._first = self.once_s, self.token_s

    @classmethod
    def between(cls, one_s: float, all_s: float, tokens: int) -> DraftPrice:
        """The price if a draft of one token takes ``one_s`` and one of ``tokens`` takes ``all_s``."""
        token_s = max(0.0, min(all_s - one_s, one_s)) / max(1, tokens - 1)
        return cls(max(0.0, one_s - token_s), token_s)

    def seconds(self, tokens: int) -> float:
        return self.once_s + tokens * self.token_s if tokens else 0.0

    def took(self, tokens: int, seconds: float) -> None:
        """A draft of ``tokens`` took ``seconds``."""
        off = min(_OFF, seconds / max(self.seconds(tokens), 1e-9))
        scale = 1 + _BELIEVED * (off - 1)
        self.once_s, self.token_s = scale * self.once_s, scale * self.token_s

    def forget(self, tokens: int) -> None:
        """``tokens`` came without a draft."""
        part = 1 - (1 - _FORGETS) ** tokens
        once_s, token_s = self._first
        self.once_s += part * (once_s - self.once_s)
        self.token_s += part * (token_s - self.token_s)
