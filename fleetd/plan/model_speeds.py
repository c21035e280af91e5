"""How fast each model runs here: measured at load, corrected by the time of every request.

Pure. Speeds are those of one request alone. A request that shared the engine was slower than that, so slow
requests move the average less than fast ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetd import limits
from fleetd.plan import costs

# Fewer tokens measure fixed costs more than speed.
PREFILL_TOKENS = 32
DECODE_TOKENS = 8
# Weight of one request in the moving average.
WEIGHT = 0.2
# The weight of a request that was slower than the average: it may have shared the engine.
WEIGHT_SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Tokens per second; of prefill, on a short context. 0 until measured.

    Prefill also takes ``prefill_context_s`` for each pair of a token and one before it, and
    ``prefill_fixed_s`` for each chunk.
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
        """Replace the speeds by those that a load measured: the device may compute otherwise than before."""
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
        """Correct the speeds by the times of a complete answer; too few tokens change nothing.

        Args:
            shared: other machines computed some of its prefill, so its time says nothing about this machine.
        """
        known = speed = self.of(model)
        prefilled = prompt_tokens - cached_tokens
        if prefilled >= PREFILL_TOKENS and prefill_s > 0 and not shared:
            speed = _prefilled(speed, cached_tokens, prefilled, prefill_s)
        if completion_tokens >= DECODE_TOKENS and decode_s > 0:
            # ``decode_s`` is from the first token to the last; the first belongs to the prefill.
            seen = (completion_tokens - 1) / decode_s
            speed = replace(speed, decode_tok_s=_towards(speed.decode_tok_s, seen))
        if speed != known:
            self._put(model, speed)

    def of(self, model: str) -> MeasuredSpeed:
        return self._speeds.get(model, MeasuredSpeed())

    def _put(self, model: str, speed: MeasuredSpeed) -> None:
        self._speeds.pop(model, None)
        self._speeds[model] = speed
        # Models come and go, and a card tells of no more than this.
        if len(self._speeds) > limits.CARD_MODELS:
            del self._speeds[next(iter(self._speeds))]


def _prefilled(known: MeasuredSpeed, cached: int, count: int, seconds: float) -> MeasuredSpeed:
    """The speed, corrected by one prefill of ``count`` tokens behind ``cached`` others.

    The difference from the expected time is divided between the context's share and the rest in proportion to
    both, so that prompts of all lengths converge.
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
