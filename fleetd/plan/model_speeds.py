"""How fast each model runs here: measured at load, corrected by the time of every request.

Pure. Speeds are those of one request alone. A request that shared the engine was slower than that, so slow
requests move the average less than fast ones. The older a figure is, and the less its calibration can be
believed, the more the next request counts.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.plan import costs

# Fewer tokens measure fixed costs more than speed.
PREFILL_TOKENS = 32
DECODE_TOKENS = 8
# Weight of one request in the moving average.
WEIGHT = 0.2
# The weight of a request that was slower than the average: it may have shared the engine.
WEIGHT_SLOWER = 0.05
# The weight of a request that corrects a calibration in doubt; after so many of them there is none. A faster
# prefill of a whole chunk replaces it: nothing makes a machine faster than it is.
WEIGHT_DOUBTFUL = 0.5
CONFIRMED = 3
# The weight that a request has at most because nothing has corrected the figure for long, and half of which
# it has after AGED_S.
WEIGHT_AGED = 0.5
AGED_S = 3600.0


class _KnownSpeed(msgspec.Struct, frozen=True):
    speed: MeasuredSpeed
    # When it was measured or last corrected, in monotonic seconds.
    at_s: float
    # How many requests have corrected it.
    requests: int = 0

    def weight(self, least: float, now_s: float) -> float:
        """The weight of the next request; ``least``: while the figure is new."""
        aged = WEIGHT_AGED * (1 - math.exp2(min(0.0, self.at_s - now_s) / AGED_S))
        return max(least, aged, WEIGHT_DOUBTFUL if self.speed.doubtful else 0.0)


class ModelSpeeds:
    """The speeds of this machine's models, by name. ``now_s``: monotonic seconds."""

    def __init__(self) -> None:
        self._speeds: dict[str, _KnownSpeed] = {}

    def seed(self, model: str, speed: MeasuredSpeed, *, now_s: float) -> None:
        """Replace the speed by the one measured now: the device may compute otherwise than before.

        A figure in doubt replaces none that is faster: nothing makes a machine faster than it is.
        """
        known = self._known(model, now_s)
        if speed.doubtful and known.speed.prefill_tok_s > speed.prefill_tok_s:
            decode_tok_s = max(known.speed.decode_tok_s, speed.decode_tok_s)
            self._put(model, replace(known, speed=replace(known.speed, decode_tok_s=decode_tok_s)))
        else:
            self._put(model, _KnownSpeed(speed, now_s))

    def ran(
        self,
        model: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        prefill_s: float,
        decode_s: float,
        now_s: float,
        shared: bool = False,
    ) -> None:
        """Correct the speeds by the times of a complete answer; too few tokens change nothing.

        Args:
            shared: other machines computed some of its prefill, so its time says nothing about this machine.
        """
        known = self._known(model, now_s)
        speed = known.speed
        faster, slower = known.weight(WEIGHT, now_s), known.weight(WEIGHT_SLOWER, now_s)
        prefilled = prompt_tokens - cached_tokens
        confirmed = prefilled >= PREFILL_TOKENS and prefill_s > 0 and not shared
        if confirmed:
            whole = speed.doubtful and prefilled >= costs.MEASURED_TOKENS
            speed = _prefilled(speed, cached_tokens, prefilled, prefill_s, 1.0 if whole else faster, slower)
        if completion_tokens >= DECODE_TOKENS and decode_s > 0:
            # ``decode_s`` is from the first token to the last; the first belongs to the prefill.
            seen = (completion_tokens - 1) / decode_s
            speed = replace(speed, decode_tok_s=_towards(speed.decode_tok_s, seen, faster, slower))
        if confirmed or speed != known.speed:
            self._corrected(model, known, speed, now_s, confirmed=confirmed)

    def part_ran(self, model: str, *, expected_s: float, took_s: float, now_s: float) -> None:
        """Correct prefill by a part of a prompt that other machines shared; ``expected_s`` is by its figures.

        Only upwards: beside the others' rows this machine may be slower than it is alone, but never faster.
        """
        known = self._known(model, now_s)
        if not known.speed.prefill_tok_s or not 0 < took_s <= expected_s:
            return
        grown = _towards(1.0, expected_s / took_s, known.weight(WEIGHT, now_s), 0.0)
        self._corrected(model, known, known.speed.slower_prefill(1 / grown), now_s, confirmed=True)

    def of(self, model: str) -> MeasuredSpeed:
        return self._known(model, 0.0).speed

    def _known(self, model: str, now_s: float) -> _KnownSpeed:
        return self._speeds.get(model) or _KnownSpeed(MeasuredSpeed(), now_s)

    def _corrected(
        self, model: str, known: _KnownSpeed, speed: MeasuredSpeed, now_s: float, *, confirmed: bool
    ) -> None:
        requests = known.requests + confirmed
        if requests >= CONFIRMED:
            speed = replace(speed, doubt="")
        self._put(model, _KnownSpeed(speed, now_s, requests))

    def _put(self, model: str, known: _KnownSpeed) -> None:
        self._speeds.pop(model, None)
        self._speeds[model] = known
        # Models come and go, and a card tells of no more than this.
        if len(self._speeds) > limits.CARD_MODELS:
            del self._speeds[next(iter(self._speeds))]


def _prefilled(
    known: MeasuredSpeed, cached: int, count: int, seconds: float, faster: float, slower: float
) -> MeasuredSpeed:
    """The speed, corrected by one prefill of ``count`` tokens behind ``cached`` others.

    The difference from the expected time is divided between the context's share and the rest in proportion to
    both, so that prompts of all lengths converge. ``faster``, ``slower``: the weights of such a prefill.
    """
    if not known.prefill_tok_s:
        return replace(known, prefill_tok_s=count / seconds)
    expected_s = costs.PrefillSpeed.of(known).total(1.0, range(cached, cached + count), costs.MEASURED_TOKENS)
    context_s = known.prefill_context_s * count * (cached + count / 2)
    share = min(1.0, context_s / expected_s)
    grown = expected_s / seconds
    return replace(
        known,
        prefill_tok_s=known.prefill_tok_s * _towards(1.0, grown, (1 - share) * faster, (1 - share) * slower),
        prefill_context_s=known.prefill_context_s / _towards(1.0, grown, share * faster, share * slower),
    )


def _towards(known: float, seen: float, faster: float, slower: float) -> float:
    if known == 0:
        return seen
    return known + (slower if seen < known else faster) * (seen - known)
