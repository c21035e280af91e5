"""How fast each model runs here: measured at load, corrected by what every request really took.

Pure. Speeds are those of one request alone; a request that shared the engine looks slower than that, so slow
ones move the average less than fast ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetd import limits
from fleetd.plan import costs

# Fewer tokens say more about fixed costs than about speed.
PREFILL_TOKENS = 32
DECODE_TOKENS = 8
# Weight of one request in the moving average.
WEIGHT = 0.2
# The same for one that was slower than the average: it may have shared the engine.
WEIGHT_SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Tokens per second, of prefill on a short context; 0 where nothing is known.

    Prefill also takes ``prefill_context_s`` per token and token before it, and ``prefill_fixed_s`` per chunk.
    """

    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    prefill_context_s: float = 0.0
    prefill_fixed_s: float = 0.0

    @property
    def prefill(self) -> costs.PrefillSpeed:
        """For the planner."""
        return costs.PrefillSpeed.measured(self.prefill_tok_s, self.prefill_context_s, self.prefill_fixed_s)


class ModelSpeeds:
    """The speeds of this machine's models, by name."""

    def __init__(self) -> None:
        self._speeds: dict[str, MeasuredSpeed] = {}

    def seed(
        self,
        model: str,
        prefill_tok_s: float,
        decode_tok_s: float,
        prefill_context_s: float = 0.0,
        prefill_fixed_s: float = 0.0,
    ) -> None:
        """What a load measured. It replaces what was known: the device may compute otherwise than before."""
        measured = (prefill_tok_s, decode_tok_s, prefill_context_s, prefill_fixed_s)
        self._put(model, MeasuredSpeed(*(max(0.0, figure) for figure in measured)))

    def ran(
        self,
        model: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        prefill_s: float,
        decode_s: float,
        shared: bool = False,
    ) -> None:
        """What an answer took that ran to its end. Too little of something teaches nothing about it.

        ``shared``: others computed some of its prefill, which therefore says nothing about this machine.
        """
        known = speed = self.of(model)
        prefilled = prompt_tokens - cached_tokens
        if prefilled >= PREFILL_TOKENS and prefill_s > 0 and not shared:
            speed = _prefilled(speed, cached_tokens, prefilled, prefill_s)
        if completion_tokens >= DECODE_TOKENS and decode_s > 0:
            # From the first token to the last; the first one belongs to the prefill.
            seen = (completion_tokens - 1) / decode_s
            speed = replace(speed, decode_tok_s=_towards(speed.decode_tok_s, seen))
        if speed != known:
            self._put(model, speed)

    def of(self, model: str) -> MeasuredSpeed:
        return self._speeds.get(model, MeasuredSpeed())

    def _put(self, model: str, speed: MeasuredSpeed) -> None:
        self._speeds.pop(model, None)
        self._speeds[model] = speed
        # Models come and go; of more than this a card does not tell anyway.
        if len(self._speeds) > limits.CARD_MODELS:
            del self._speeds[next(iter(self._speeds))]


def _prefilled(known: MeasuredSpeed, cached: int, count: int, seconds: float) -> MeasuredSpeed:
    """Corrected by one prefill of ``count`` tokens behind ``cached`` others.

    What it took longer or shorter than expected is put down to context and to the rest as both share in the
    expected time, so that prompts of all lengths settle each on its own.
    """
    if not known.prefill_tok_s:
        return replace(known, prefill_tok_s=count / seconds)
    expected_s = known.prefill.total(1.0, range(cached, cached + count), costs.MEASURED_TOKENS)
    context_s = known.prefill_context_s * count * (cached + count / 2)
    share = min(1.0, context_s / expected_s)
    faster = expected_s / seconds
    return replace(
        known,
        prefill_tok_s=_towards(known.prefill_tok_s, known.prefill_tok_s * faster, 1 - share),
        prefill_context_s=known.prefill_context_s / _towards(1.0, faster, share),
    )


def _towards(known: float, seen: float, share: float = 1.0) -> float:
    if known == 0:
        return seen
    return known + share * (WEIGHT_SLOWER if seen < known else WEIGHT) * (seen - known)
