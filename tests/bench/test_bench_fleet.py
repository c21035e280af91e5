"""The fleet that benchmarks measure is one that daemons take for their own."""

from __future__ import annotations

from pathlib import Path

from bench.harness.fleet import pair
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile


def test_everybody_knows_everybody_and_may_see_prompts(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    ids = pair({name: tmp_path / name for name in names})
    for name in names:
        identity = Identity.load_or_create(tmp_path / name)
        assert identity.node_id == ids[name]
        members = Roster(identity, RosterFile(tmp_path / name / "roster").load()).members
        found = {member.name: (member.node_id, member.sees_prompts) for member in members.values()}
        assert found == {other: (ids[other], True) for other in names if other != name}
