"""How fast each model runs here: measured at load, corrected by what every request really took.

Pure. Speeds are those of one request alone; a request that shared the engine looks slower than that, so slow
ones move the average less than fast ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetd import limits

# Fewer tokens say more about fixed costs than about speed.
PREFILL_TOKENS = 32
DECODE_TOKENS = 8
# Weight of one request in the moving average.
WEIGHT = 0.2
# The same for one that was slower than the average: it may have shared the engine, or had a long context.
WEIGHT_SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second; 0 where nothing is known."""

    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0


class SpeedBook:
    """The speeds of this machine's models, by name."""

    def __init__(self) -> None:
        self._speeds: dict[str, Speed] = {}

    def seed(self, model: str, prefill_tok_s: float, decode_tok_s: float) -> None:
        """What a load measured. It replaces what was known: the device may compute otherwise than before."""
        self._put(model, Speed(max(0.0, prefill_tok_s), max(0.0, decode_tok_s)))

    def ran(
        self,
        model: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        prefill_s: float,
        decode_s: float,
    ) -> None:
        """What an answer took that ran to its end. Too little of something teaches nothing about it."""
        known = self.of(model)
        prefilled = prompt_tokens - cached_tokens
        prefill_tok_s, decode_tok_s = known.prefill_tok_s, known.decode_tok_s
        if prefilled >= PREFILL_TOKENS and prefill_s > 0:
            prefill_tok_s = _towards(prefill_tok_s, prefilled / prefill_s)
        if completion_tokens >= DECODE_TOKENS and decode_s > 0:
            # From the first token to the last; the first one belongs to the prefill.
            decode_tok_s = _towards(decode_tok_s, (completion_tokens - 1) / decode_s)
        if (speed := Speed(prefill_tok_s, decode_tok_s)) != known:
            self._put(model, speed)

    def of(self, model: str) -> Speed:
        return self._speeds.get(model, Speed())

    def _put(self, model: str, speed: Speed) -> None:
        self._speeds.pop(model, None)
        self._speeds[model] = speed
        # Models come and go; of more than this a card does not tell anyway.
        if len(self._speeds) > limits.CARD_MODELS:
            del self._speeds[next(iter(self._speeds))]


def _towards(known: float, seen: float) -> float:
    if known == 0:
        return seen
    return known + (WEIGHT_SLOWER if seen < known else WEIGHT) * (seen - known)
