"""Whole daemons on machines with a network of their own: they meet, pair, lose cables and packets."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns import Lab, why_not

# Daemons are started and looked at as in the tests of one machine's fleet.
sys.path.append(str(Path(__file__).parents[1] / "live"))

from live_daemon import SOON_S, LiveDaemon, until
from live_fleet import Verb, stays, view

pytestmark = [pytest.mark.one_loop]

NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    if reason := why_not():
        pytest.skip(f"FLEETS OF SEVERAL MACHINES ARE NOT TESTED: {reason}")


class LabFleet:
    """A daemon on each host of a lab."""

    def __init__(self, lab: Lab, root: Path, stack: ExitStack) -> None:
        self.lab = lab
        self._root = root
        self._stack = stack
        self._daemons: dict[str, LiveDaemon] = {}
        for name in NAMES:
            (root / f"{name}-models").mkdir()
            self._launch(name)
        for daemon in self._daemons.values():
            daemon.__enter__()

    def __getitem__(self, name: str) -> LiveDaemon:
        return self._daemons[name]

    def _launch(self, name: str) -> LiveDaemon:
        daemon = self._daemons[name] = LiveDaemon(
            self._root / name,
            self._root / f"{name}-models",
            enter=self.lab.hosts[NAMES.index(name)].command([]),
            FLEETD_FLEET_NAME=name,
            FLEETD_FLEET_LISTEN="*:8115",
            FLEETD_FLEET_MDNS="on",
        )
        self._stack.callback(daemon.kill)
        return daemon

    def start(self, name: str) -> None:
        self._launch(name).__enter__()

    def pair_all(self) -> None:
        for inviter, joiner in (("alpha", "beta"), ("beta", "gamma")):
            pair = Verb(self[inviter], "pair", "--yes")
            join = Verb(self[joiner], "join", pair.event("code")["code"], "--yes")
            assert join.end()[0] == 0
            assert pair.end()[0] == 0
        self.until_usable(*NAMES)

    def state(self, of: str, seen_by: str) -> str:
        states = {peer["name"]: peer["state"] for peer in view(self[seen_by])["peers"]}
        return str(states.get(of, "unknown"))

    def usable(self, *names: str) -> bool:
        return all(self.state(of, seen_by) == "usable" for seen_by in names for of in names if of != seen_by)

    def until_usable(self, *names: str, limit_s: float = SOON_S) -> float:
        return until(lambda: self.usable(*names), limit_s)


@pytest.fixture
def fleet() -> Iterator[LabFleet]:
    root = Path(tempfile.mkdtemp(prefix="fn-"))
    try:
        with Lab(len(NAMES)) as lab, ExitStack() as stack:
            yield LabFleet(lab, root, stack)
    finally:
        shutil.rmtree(root)


def test_three_machines_pair_and_one_that_loses_its_link_is_not_used(fleet: LabFleet) -> None:
    fleet.pair_all()
    (used,) = [path for peer in view(fleet["alpha"])["peers"] for path in peer["paths"] if path["in_use"]][:1]
    assert used["host"].startswith("10.213.9.")
    # Nobody says good-bye.
    lost = fleet.lab.hosts[NAMES.index("beta")]
    fleet.lab.cut(lost)
    until(lambda: fleet.state("beta", "alpha") != "usable")
    until(lambda: fleet.state("beta", "gamma") != "usable")
    fleet.until_usable("alpha", "gamma")
    fleet.lab.mend(lost)
    fleet.until_usable(*NAMES)


@pytest.mark.long
def test_a_machine_that_was_cut_off_for_long_comes_back(fleet: LabFleet) -> None:
    fleet.pair_all()
    lost = fleet.lab.hosts[NAMES.index("gamma")]
    fleet.lab.cut(lost)
    until(lambda: fleet.state("gamma", "alpha") == "unreachable")
    stays(lambda: fleet.usable("alpha", "beta"), 20.0)
    reason = next(peer["reason"] for peer in view(fleet["alpha"])["peers"] if peer["name"] == "gamma")
    assert lost.address in reason
    fleet.lab.mend(lost)
    # Calls are rarer by then, at most half a minute apart; so are questions by mDNS.
    fleet.until_usable(*NAMES, limit_s=35.0)


@pytest.mark.long
def test_a_pulled_cable_and_a_killed_machine(fleet: LabFleet) -> None:
    fleet.pair_all()
    cable = fleet.lab.hosts[NAMES.index("beta")]
    cable.link("down")
    until(lambda: fleet.state("beta", "alpha") != "usable")
    assert fleet.state("alpha", "gamma") == "usable"
    cable.link("up")
    fleet.until_usable(*NAMES)
    before = view(fleet["gamma"])["node_id"]
    fleet["gamma"].kill()
    until(lambda: fleet.state("gamma", "alpha") != "usable")
    fleet.start("gamma")
    fleet.until_usable(*NAMES)
    assert view(fleet["gamma"])["node_id"] == before


@pytest.mark.long
@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_lost_packets_make_no_false_deaths_and_keep_nobody_out(fleet: LabFleet, loss: float) -> None:
    fleet.lab.tell(loss=loss)
    fleet.pair_all()
    began = time.monotonic()
    # A packet that is lost three times in a row is silence for some moments, and no death.
    while time.monotonic() - began < 20.0:
        states = {fleet.state(of, by) for by in NAMES for of in NAMES if of != by}
        assert states <= {"usable", "quiet"}, states
        time.sleep(0.1)
    fleet["beta"].kill()
    fleet.start("beta")
    fleet.until_usable(*NAMES, limit_s=30.0)
