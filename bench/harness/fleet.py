"""Daemons that are paired already, on one machine: as many machines of a fleet as a measurement needs."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.daemon import MODELS, Daemon
from bench.harness.samples import Closing, wait_for
from fleetd.control.prefill_plan import PlanView
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile

_WITHIN_S = 30.0
_POLL_S = 0.002
_PRICED_WITHIN_S, _PRICED_POLL_S = 120.0, 0.1


def pair(folders: Mapping[str, Path]) -> dict[str, str]:
    """Name → node id, after leaving in each identity folder what pairing every two machines leaves."""
    identities = {name: Identity.load_or_create(folder) for name, folder in folders.items()}
    for name, folder in folders.items():
        roster = Roster(identities[name])
        for other, identity in identities.items():
            if other != name:
                roster.admit(identity.certificate, other, True)
        RosterFile(folder / "roster").save(roster.records())
    return {name: identity.node_id for name, identity in identities.items()}


class Fleet(Closing):
    """Daemons by name, none of them started yet; all of it is gone afterwards.

    Args:
        daemons: those that can be started.
        others: members that are no daemons; ``identity_folder`` is theirs to use.
        models: name → the models folder, where it is not the one of all benchmarks.
    """

    def __init__(
        self,
        daemons: Iterable[str],
        others: Iterable[str] = (),
        *,
        models: Mapping[str, Path] | None = None,
        mdns: bool = True,
    ) -> None:
        self._daemons = list(daemons)
        self._models = models or {}
        self._mdns = mdns
        self._running: dict[str, Daemon] = {}
        self.root = Path(tempfile.mkdtemp(prefix="fleetd-bench-"))
        for name in (names := [*self._daemons, *others]):
            (self.root / name).mkdir(mode=0o700)
        self.ids = pair({name: self.identity_folder(name) for name in names})

    def identity_folder(self, name: str) -> Path:
        return self.root / name / "identity"

    def __getitem__(self, name: str) -> Daemon:
        return self._running[name]

    def start(
        self, name: str, *, enter: Sequence[str] = (), module: str = "fleetd", **settings: str
    ) -> Daemon:
        """Start it, also again, with more settings than the usual ones; returns when it is ready."""
        usual = {
            "FLEETD_FLEET_NAME": name,
            "FLEETD_FLEET_MDNS": "on" if self._mdns else "off",
            "FLEETD_MODELS_HUB_CACHE": str(self.root / "no-hub"),
        }
        models = self._models.get(name, MODELS)
        daemon = Daemon(home=self.root / name, models=models, enter=enter, module=module, **usual | settings)
        self._running[name] = daemon
        return daemon

    def start_all(self) -> None:
        for name in self._daemons:
            self.start(name)
        self.until_usable(*self._daemons)

    # ---- looking at it -----------------------------------------------------------------------------------

    def peer(self, at: str, of: str) -> dict[str, Any]:
        """What one machine sees of another."""
        return next(peer for peer in self[at].peers() if peer["node_id"] == self.ids[of])

    def until_usable(self, *names: str) -> float:
        """When each of these could use each other one, on the clock that all measurements share."""
        for at in names:
            for of in names:
                if at != of:
                    self._until(at, of, usable=True)
        return time.perf_counter()

    def until_unusable(self, at: str, of: str) -> float:
        self._until(at, of, usable=False)
        return time.perf_counter()

    def until_priced(
        self,
        at: str,
        helpers: Sequence[str],
        tokens: int,
        model: str = DEFAULT_MODEL,
        within_s: float = _PRICED_WITHIN_S,
    ) -> None:
        """Until one machine knows its links to the others, and has a price for the help of each of them.

        Before, it reads every prompt alone. ``tokens``: of the prompt that is priced.
        """
        told = b""

        def known() -> bool:
            nonlocal told
            told = self[at].control("POST", "/fleet/v1/plan", {"model": model, "tokens": tokens})
            plan = msgspec.json.decode(told, type=PlanView)
            ways = [o for o in plan.options if o.predicted_s is not None and o.kind != "remote"]
            priced = {name for o in ways for name in o.nodes}
            paths = [self.peer(at, name)["paths"] for name in helpers]
            linked = all(any(path["bytes_per_s"] is not None for path in each) for each in paths)
            return linked and priced.issuperset(helpers)

        def failure() -> str:
            return f"{at} never had a price for help:\n{self[at].peers()}\n{told!r}\n{self[at].log()}"

        wait_for(known, within_s, _PRICED_POLL_S, failure)

    def _until(self, at: str, of: str, *, usable: bool) -> None:
        def failure() -> str:
            seen = self.peer(at, of)
            return f"{at} sees {of} as {seen['state']} ({seen['reason']}):\n{self[at].log()}"

        wait_for(lambda: (self.peer(at, of)["state"] == "usable") is usable, _WITHIN_S, _POLL_S, failure)

    # ---- ending ------------------------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> float:
        """When the signal was sent."""
        sent = time.perf_counter()
        self[name].process.send_signal(number)
        return sent

    def close(self) -> None:
        for daemon in self._running.values():
            # A stopped process does not see the request to end.
            if daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
            daemon.close()
        shutil.rmtree(self.root, ignore_errors=True)
