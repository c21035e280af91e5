"""What a pass over n tokens costs on this device with this model: measured, and kept up to date. Pure.

Kept as the seconds of a plain step and, for each width that was measured, how many of those a pass takes:
tv(n) / t1. Between widths it is a straight line. One curve serves all answers of a worker.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

# The share of a prediction error that is corrected at once: single measurements are noisy.
_BELIEVED = 0.2
# A pass further off than this factor says more about the machine than about the width.
_OFF = 3.0
# A plain step counts for less: all passes are held against it, and one that was held up would make them all
# look quick.
_STEP_OFF = 1.5
# Beyond the widest pass that was measured each further token is taken to cost as much as the last ones did,
# and no less than this part of a step: a try in vain is better than none.
_UNKNOWN = 0.05
# With each plain step the curve goes this part of the way back to what was measured at first: one pass that
# was held up must not stop all further ones for good.
_FORGETS = 0.005


class Costs:
    """The cost curve of one worker. ``seconds``: of a pass, by the tokens in it; it must have width 1."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.step_s = max(seconds[1], 1e-9)
        self._widths = sorted(seconds)
        # More tokens never take less time: where they seemed to, it was noise.
        self._ratios: list[float] = []
        for width in self._widths:
            last = self._ratios[-1] if self._ratios else 1.0
            self._ratios.append(max(last, seconds[width] / self.step_s) if width > 1 else 1.0)
        # The curve as it was measured at first.
        self._first = list(self._widths), list(self._ratios)

    def ratio(self, width: int) -> float:
        """tv(width) / t1: what a pass over ``width`` tokens costs in plain steps."""
        return _on_curve(self._widths, self._ratios, width)

    def add_pass(self, width: int, seconds: float) -> None:
        """Note that a pass over ``width`` tokens took ``seconds``.

        A plain step corrects the seconds of a step, a wider pass the ratio of its width.
        """
        expected = self.step_s * self.ratio(width)
        most = _STEP_OFF if width == 1 else _OFF
        off = min(most, max(1 / most, seconds / expected))
        change = 1 + _BELIEVED * (off - 1)
        if width == 1:
            self.step_s *= change
            for i, known in enumerate(self._widths):
                self._ratios[i] += _FORGETS * (_on_curve(*self._first, known) - self._ratios[i])
            return
        value = max(1.0, self.ratio(width) * change)
        at = bisect.bisect_left(self._widths, width)
        if at < len(self._widths) and self._widths[at] == width:
            self._ratios[at] = value
        else:
            self._widths.insert(at, width)
            self._ratios.insert(at, value)
        # Still a curve that does not fall: what was just seen is believed rather than its neighbours.
        for i in range(at + 1, len(self._ratios)):
            self._ratios[i] = max(self._ratios[i], value)
        for i in range(1, at):
            self._ratios[i] = min(self._ratios[i], value)

    @property
    def curve(self) -> dict[int, float]:
        """The curve as it is known now: width → tv / t1."""
        return dict(zip(self._widths, self._ratios, strict=True))


def _on_curve(widths: Sequence[int], ratios: Sequence[float], width: int) -> float:
    """The ratio at ``width``: on a straight line between two measured widths, and beyond the last one."""
    at = bisect.bisect_left(widths, width)
    if at == len(widths):
        slope = _UNKNOWN
        if at > 1:
            slope = max(slope, (ratios[-1] - ratios[-2]) / (widths[-1] - widths[-2]))
        return ratios[-1] + (width - widths[-1]) * slope
    if widths[at] == width:
        return ratios[at]
    part = (width - widths[at - 1]) / (widths[at] - widths[at - 1])
    return ratios[at - 1] + part * (ratios[at] - ratios[at - 1])
