"""An hour of random faults against three real daemons; every answer is compared with an undisturbed one's."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("live", "p2p")]

import forked_programs
from chaos_run import ChaosRun, fleet
from netns import why_not
from tries import Tally

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.model, pytest.mark.timeout(5400)]

# On each network: both together are six hundred faults, some two hours on a machine that does nothing else.
SEED, FAULTS, MINUTES = 14, 300, 75


@pytest.mark.parametrize("network", ["proxies", "switch"])
def test_no_answer_is_wrong_hangs_or_leaves_anything_behind(
    network: str, embedded_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    if not forked_programs.AVAILABLE:
        pytest.skip("NO RANDOM FAULTS ARE TRIED: only Linux can fork daemons")
    if network == "switch" and (reason := why_not()):
        pytest.skip(f"NO PARTITIONS, LOSS OR REORDERING ARE TRIED: {reason}")
    tally, lines = Tally(), list[str]()
    with fleet(embedded_model.path.parent, network) as made:
        ChaosRun(made, tally, lines.append).through(SEED, FAULTS, time.monotonic() + MINUTES * 60)
    with capsys.disabled():
        sys.stdout.write(f"\n{tally.table()}\n{tally.parts_table()}\n")
    assert tally.failures == [], "\n".join(lines)
    assert tally.total.tries >= FAULTS, "the time was up"
    # Else the faults have missed what machines do for each other.
    assert min(tally.parts["all"][part] for part in ("fetched", "restored", "shared", "drafted")) > 0
