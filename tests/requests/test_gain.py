"""What the ledger keeps of what was saved: by drafts, by smart prefill, and by other machines."""

from __future__ import annotations

import pytest

from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Speculated, Trace
from fleetd.requests.accounts import gain_of
from fleetd.requests.ledger import Gain

DRAFTS = Speculated(saved_s=1.0)


@pytest.mark.parametrize(
    ("trace", "gain"),
    [
        (Trace(), Gain()),
        (Trace(saved_s=1.0, speculation=DRAFTS), Gain(1.0, 1.0)),
        (Trace(saved_s=5.0, chosen=OptionView("layers"), outcome="shared"), Gain(5.0, shared=True)),
        (
            Trace(saved_s=5.0, chosen=OptionView("smart"), speculation=DRAFTS, outcome="smart"),
            Gain(5.0, 1.0, 4.0),
        ),
        (Trace(saved_s=3.0, chosen=OptionView("remote"), there=Trace(speculation=DRAFTS)), Gain(3.0, 1.0)),
    ],
)
def test_a_gain_is_split_by_what_made_it(trace: Trace, gain: Gain) -> None:
    assert gain_of(trace) == gain
