"""How fast a machine is usable for the others, and how fast it is not when it is gone."""

from __future__ import annotations

import signal

from bench.figures import Figure, Measured, at_most
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples

_HERE, _OTHER = "here", "other"


def measure(runs: int) -> Measured:
    seen = Samples()
    for _ in range(runs):
        with Fleet([_HERE, _OTHER]) as fleet:
            _one(fleet, seen)
    within = at_most(3.0)
    return Measured(
        [
            Figure("Start to usable peer on one LAN", "s", seen["usable_s"], at_most(1.0)),
            Figure("Daemon ready to usable peer", "s", seen["after_ready_s"]),
            Figure("Killed peer no longer scheduled", "s", seen["killed_s"], within, of="worst"),
            Figure("Peer that falls silent no longer scheduled", "s", seen["silent_s"], within, of="worst"),
            Figure(
                "Peer that says good-bye no longer scheduled",
                "ms",
                seen["leaving_ms"],
                at_most(200),
                of="worst",
            ),
            Figure("Killed peer started again, usable by the same id", "s", seen["back_s"], at_most(2.0)),
            Figure(
                "Peer that said good-bye started again, usable by the same id",
                "s",
                seen["returned_s"],
                at_most(2.0),
            ),
        ],
        _HOW,
    )


def _one(fleet: Fleet, seen: Samples) -> None:
    """The life of a machine as another one sees it, from their first meeting on."""
    fleet.start(_HERE)
    other = fleet.start(_OTHER)
    met_s = fleet.until_usable(_HERE, _OTHER) - other.begun
    seen.add(usable_s=met_s, after_ready_s=met_s - other.ready_s)

    killed = fleet.signal(_OTHER, signal.SIGKILL)
    seen.add(killed_s=fleet.until_unusable(_HERE, _OTHER) - killed)
    fleet[_OTHER].process.wait()
    seen.add(back_s=_started_again(fleet))

    stopped = fleet.signal(_OTHER, signal.SIGSTOP)
    seen.add(silent_s=fleet.until_unusable(_HERE, _OTHER) - stopped)
    fleet.signal(_OTHER, signal.SIGCONT)
    fleet.until_usable(_HERE, _OTHER)

    told = fleet.signal(_OTHER, signal.SIGTERM)
    seen.add(leaving_ms=1000 * (fleet.until_unusable(_HERE, _OTHER) - told))
    fleet[_OTHER].process.wait()
    seen.add(returned_s=_started_again(fleet))


def _started_again(fleet: Fleet) -> float:
    """Seconds from its start until both can use each other; by its id, which must be the same."""
    begun = fleet.start(_OTHER).begun
    return fleet.until_usable(_HERE, _OTHER) - begun


_HOW = (
    "Meeting: two paired daemons on loopback that know nothing of each other's addresses and find each other "
    "by mDNS. Usable: both show the other one in this state; asked every 2 ms. One runs; the other starts, "
    "is killed (SIGKILL), starts again with the same identity, falls silent (SIGSTOP: its sockets stay "
    "open), goes on, is told to stop (SIGTERM) with nothing running, and starts again. Times run from the "
    "start of the process or from the signal. A peer that is not usable gets no work."
)
