"""Machines without the files of a model are in its group if they can fetch layers; speeds compare alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hub_outlines import outline
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.errors import DownloadFailed, NoMachine, PeerLost, ProtocolError
from fleetd.limits import GIB
from fleetd.models import hub_parts, model_sizes
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WORKING_BYTES, WeightRules
from fleetd.models.safetensors_write import PlannedTensor, write_safetensors
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan.group_cut import GroupCut, Shortage
from fleetd.requests.groups import messages
from fleetd.requests.groups.client import FleetGroup
from fleetd.requests.groups.machine_speeds import decode_tok_s
from fleetd.requests.groups.messages import StageQuestion
from fleetd.requests.groups.planning import FleetGroups, GroupPlan
from fleetd.requests.groups.server import StageServer
from fleetd.requests.members.members import Member, Members

DIGEST = "d" * 64
MODEL = ModelCard("own", DIGEST, shape=ModelShape(weights_bytes=10**9))
M4, M3_MAX = (
    MachineFacts(chip="Apple M4", accelerator="metal"),
    MachineFacts(chip="Apple M3 Max", accelerator="metal"),
)


def machine(name: str, facts: MachineFacts = M4, models: tuple[ModelCard, ...] = (), **fields: Any) -> Member:
    card = Card(name, 1, 1, name=name, machine=facts, models=list(models), usable_bytes=64 * GIB)
    known = {field: fields.pop(field) for field in ("part_bytes", "usable_bytes") if field in fields}
    return Member(replace(card, **known), name, **{"bytes_per_s": 1e9, "rtt_s": 0.001, **fields})


def measured(name: str, weights_bytes: int, tok_s: float, doubt: str = "") -> ModelCard:
    speed = MeasuredSpeed(decode_tok_s=tok_s, doubt=doubt)
    return ModelCard(name, name, shape=ModelShape(weights_bytes=weights_bytes), speed=speed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Eight layers of 1 MiB."""
    path = tmp_path_factory.mktemp("own")
    (path / "config.json").write_text('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2}')
    values = np.zeros((512, 512), np.float32)
    names = [*(f"layers.{n}.weight" for n in range(8)), "embed.weight"]
    plans = [PlannedTensor.whole(name, "F32", (512, 512), lambda: values) for name in names]
    write_safetensors(path / "model.safetensors", plans)
    return read_folder(path, name="own", source="folder", revision=None)


def planned(folder: ModelFolder, *others: Member) -> GroupPlan | None:
    """The plan of a machine that has room for five of the layers."""
    own = Card("here", 1, 1, machine=M4, models=[MODEL])
    members = Members(lambda: others, lambda: own)
    partners: Any = None
    rules = WeightRules("metal", budget_bytes=8 << 20)
    return FleetGroups(partners, members, lambda: rules).plan(folder, model_sizes.read(folder, rules))


def parts(found: GroupPlan | None) -> dict[str, int]:
    assert found is not None
    assert isinstance(found.found, GroupCut)
    return {part.machine.name: part.last - part.first for part in found.found.parts}


ROOMY = WORKING_BYTES + (64 << 20)


def test_a_machine_with_room_on_its_disk_can_hold_a_part_without_the_files(folder: ModelFolder) -> None:
    assert parts(planned(folder, machine("bare", part_bytes=GIB))) == {"this": 4, "bare": 4}
    assert planned(folder, machine("full", part_bytes=0)) is None
    assert planned(folder, machine("private", part_bytes=GIB, sees_prompts=False)) is None


def test_machines_that_have_the_files_come_first(folder: ModelFolder) -> None:
    fast, slow = machine("bare", M3_MAX, part_bytes=GIB), machine("has", models=(MODEL,))
    assert set(parts(planned(folder, fast, slow))) == {"this", "has"}
    cramped = machine("has", models=(MODEL,), usable_bytes=WORKING_BYTES + (1 << 20))
    assert "bare" in parts(planned(folder, fast, cramped))


def test_it_gets_no_more_layers_than_its_disk_has_room_for(folder: ModelFolder) -> None:
    found = planned(folder, machine("bare", part_bytes=3 << 20))
    assert parts(found) == {"this": 5, "bare": 3}
    assert found is not None
    assert isinstance(found.found, GroupCut)
    assert [part.machine.can_fetch for part in found.found.parts] == [None, 3]
    assert [part.fetches for part in found.view.parts] == [False, True]
    assert found.view.why.endswith("The layers of bare are fetched from this machine first.")
    none = planned(folder, machine("bare", part_bytes=1 << 20))
    assert none is not None
    assert isinstance(none.found, Shortage)


def test_it_gets_no_more_layers_than_its_link_brings_in_time(folder: ModelFolder) -> None:
    layer = 1 << 20
    slow = machine("bare", part_bytes=GIB, bytes_per_s=3.5 * layer / limits.PART_FETCH_S)
    assert parts(planned(folder, slow)) == {"this": 5, "bare": 3}


# ---- a model that is on no machine as a whole ------------------------------------------------------------


@pytest.fixture
def in_part(folder: ModelFolder, tmp_path: Path) -> ModelFolder:
    return outline(folder.path, tmp_path / "models")


def planned_in_part(
    folder: ModelFolder, *others: Member, disk_bytes: int = GIB, over: tuple[str, ...] = ()
) -> GroupPlan | None:
    """The plan of a machine with memory for five of the layers, and none of them on its disk."""
    own = Card("here", 1, 1, machine=M4, part_bytes=disk_bytes)
    members = Members(lambda: others, lambda: own)
    partners: Any = None
    rules = WeightRules("metal", budget_bytes=8 << 20)
    return FleetGroups(partners, members, lambda: rules).plan(folder, model_sizes.read(folder, rules), over)


def test_a_model_in_part_is_cut_by_its_outline_and_every_machine_fetches(in_part: ModelFolder) -> None:
    found = planned_in_part(in_part, machine("bare", part_bytes=GIB, bytes_per_s=1.0))
    # The link does not count: nobody sends layers over it.
    assert parts(found) == {"this": 4, "bare": 4}
    assert found is not None
    assert found.from_hub
    assert found.digest == hub_parts.read(in_part.path).listing.digest
    assert [part.fetches for part in found.view.parts] == [True, True]
    assert found.view.why.endswith("The layers of this and bare are fetched from the hub first.")


def test_no_machine_gets_more_layers_of_it_than_its_disk_has_room_for(
    in_part: ModelFolder, folder: ModelFolder, tmp_path: Path
) -> None:
    roomy = machine("bare", part_bytes=GIB)
    # Embedding and head lie on this machine's disk as well.
    assert parts(planned_in_part(in_part, roomy, disk_bytes=4 << 20)) == {"this": 3, "bare": 5}
    with_two = outline(folder.path, tmp_path / "others", layers=range(2))
    assert parts(planned_in_part(with_two, roomy, disk_bytes=3 << 20)) == {"this": 4, "bare": 4}
    none = planned_in_part(in_part, machine("bare", part_bytes=3 << 20), disk_bytes=3 << 20)
    assert none is not None
    assert isinstance(none.found, Shortage)


def test_a_machine_with_all_files_of_that_commit_fetches_none(in_part: ModelFolder) -> None:
    whole = ModelCard(in_part.name, "w" * 64, in_part.revision, "hub")
    found = planned_in_part(in_part, machine("has", models=(whole,)))
    assert found is not None
    assert [part.fetches for part in found.view.parts] == [True, False]
    other = machine("other", models=(replace(whole, revision="f" * 40),))
    assert planned_in_part(in_part, other) is None
    with pytest.raises(NoMachine):
        planned_in_part(in_part, other, over=("other",))


def test_a_named_machine_that_failed_lately_is_asked_again(in_part: ModelFolder) -> None:
    own, digest = Card("here", 1, 1, machine=M4, part_bytes=GIB), hub_parts.read(in_part.path).listing.digest
    members = Members(lambda: [machine("bare", part_bytes=GIB)], lambda: own)
    partners: Any = None
    rules = WeightRules("metal", budget_bytes=8 << 20)
    groups = FleetGroups(partners, members, lambda: rules)
    members.failed("bare", "prefill", PeerLost("It has left."), digest)
    (bare,) = members.others("prefill")
    assert bare.why_left_out(digest)
    assert parts(groups.plan(in_part, model_sizes.read(in_part, rules), ("bare",))) == {"this": 4, "bare": 4}


def test_this_machine_brings_its_own_layers_from_the_same_commit(in_part: ModelFolder) -> None:
    rules = WeightRules("metal", budget_bytes=8 << 20)
    members = Members(
        lambda: [machine("bare", part_bytes=GIB)], lambda: Card("here", 1, 1, machine=M4, part_bytes=GIB)
    )
    orders: list[hub_parts.HubPartOrder] = []

    def group(**options: Any) -> FleetGroup:
        unused: Any = None
        found = FleetGroups(unused, members, lambda: rules, **options)(
            in_part, model_sizes.read(in_part, rules)
        )
        assert found is not None
        return found

    found, listing = group(bring=orders.append), hub_parts.read(in_part.path).listing
    assert found._hub == listing.at
    assert found._bring is not None
    found._bring(0, 4)
    assert orders == [
        hub_parts.HubPartOrder(listing.at.hub_id, listing.at.commit, listing.digest, 0, 4, own=True)
    ]
    bring = group()._bring
    assert bring is not None
    with pytest.raises(NoMachine, match="Nothing is fetched from the hub here"):
        bring(0, 4)


def test_attack_a_peer_names_something_else_as_a_repository() -> None:
    for hub_id in ("../../etc", "org/../name", "org/name/more", "https://else/where", "org"):
        asked = StageQuestion("own", DIGEST, "g1", 0, 2, 16, hub=hub_parts.HubCommit(hub_id, "0" * 40))
        with pytest.raises(ProtocolError):
            messages.decode(messages.encode(asked), StageQuestion)
    at = hub_parts.HubCommit("org/own", "0" * 40)
    good = StageQuestion("own", DIGEST, "g1", 0, 2, 16, hub=at)
    assert messages.decode(messages.encode(good), StageQuestion).hub == at
    for commit in ("main", "0" * 39, "../../../../../../../../../../../../../../"):
        bad = replace(good, hub=replace(at, commit=commit))
        with pytest.raises(ProtocolError):
            messages.decode(messages.encode(bad), StageQuestion)


# ---- speeds ----------------------------------------------------------------------------------------------


def speeds(*machines: Member) -> dict[str, float]:
    return dict(decode_tok_s([(each, MODEL) for each in machines]))


def test_published_figures_count_if_no_machine_has_measured_any() -> None:
    found = speeds(machine("m4", M4), machine("max", M3_MAX))
    assert found["max"] / found["m4"] == pytest.approx(300 / 120)


def test_a_measured_figure_replaces_the_published_one() -> None:
    m4 = speeds(machine("m4", M4))["m4"]
    slow = machine("slow", M4, (measured("large", 10**9, m4 / 2),))
    true = machine("true", M4, (measured("large", 10**9, m4),))
    found = speeds(slow, true)
    assert found["slow"] == pytest.approx(m4 / 2)
    assert found["true"] == pytest.approx(m4)


def test_a_measured_figure_is_not_compared_with_a_published_one() -> None:
    m4 = speeds(machine("m4", M4))["m4"]
    found = speeds(machine("slow", M4, (measured("large", 10**9, m4 / 2),)), machine("max", M3_MAX))
    assert found["max"] / found["slow"] == pytest.approx(300 / 120)


def test_the_largest_model_is_believed_and_no_doubtful_figure() -> None:
    m4 = speeds(machine("m4", M4))["m4"]
    models = (
        measured("small", 10**7, 1.0),
        measured("large", 10**9, m4 / 2),
        measured("larger", 2 * 10**9, m4, doubt="something else ran"),
    )
    assert speeds(machine("m4", M4, models))["m4"] == pytest.approx(m4 / 2)


def test_what_was_measured_in_another_arithmetic_does_not_count() -> None:
    other = replace(
        measured("large", 10**9, 1.0), shape=ModelShape(weights_bytes=10**9, cpu_arithmetic="int8")
    )
    assert speeds(machine("m4", M4, (other,))) == speeds(machine("m4", M4))


async def test_attack_a_machine_that_may_not_manage_this_one_makes_it_download(tmp_path: Path) -> None:
    """Its layers come from the machine that asks, which is told why."""

    class Models:
        models_dir = tmp_path

        def at_commit(self, at: hub_parts.HubCommit) -> None:
            return None

        def pull_part(self, order: hub_parts.HubPartOrder) -> None:
            raise AssertionError("it was fetched")

    unused: Any = None
    context: Any = SimpleNamespace(models=Models(), draining=lambda: False, card=lambda: unused)
    server = StageServer(unused, unused, context, pulls=lambda peer: peer == "confirmed")
    asked = StageQuestion("own", DIGEST, "g1", 0, 2, 16, hub=hub_parts.HubCommit("org/own", "0" * 40))
    with pytest.raises(DownloadFailed, match="only for machines that may manage it"):
        await server._folder("other", asked, unused)
    with pytest.raises(AssertionError, match="it was fetched"):
        await server._folder("confirmed", asked, unused)
