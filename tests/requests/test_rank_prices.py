"""Whether a load over several machines divides layers or deals them out, and how that is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import tiny_architectures
from member_cards import FACTS, OWN, collect, machine
from member_cards import MODEL as CARD
from msgspec.structs import replace

from fleetctl.render.group_table import group_lines
from fleetd.control.group_view import DividedView, GroupView
from fleetd.control.model_change import ModelDone
from fleetd.engine.protocol import Loading
from fleetd.errors import FleetError, GroupLost, Overloaded
from fleetd.limits import GIB
from fleetd.models import model_sizes
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WORKING_BYTES, WeightRules
from fleetd.p2p.membership.cards import Card
from fleetd.requests.groups.planning import FleetGroups
from fleetd.requests.managing.operations import ModelOperations
from fleetd.requests.members.members import Member, Members
from fleetd.requests.ranks.planning import RankPlanner
from fleetd.requests.ranks.prices import MeasuredSums, RankPrices

MODEL, LAYERS = CARD.name, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("tiny")
    tiny_architectures.write(path, "llama", num_hidden_layers=LAYERS, hidden_size=256)
    return read_folder(path, name=MODEL, source="folder", revision=None)


def own() -> Card:
    return replace(OWN, models=[replace(CARD, state="installed")])


def other(name: str, *, room: int = 8 * GIB) -> Member:
    found = machine(name, state="installed")
    return replace(found, card=replace(found.card, usable_bytes=WORKING_BYTES + room, machine=FACTS))


def view(
    folder: ModelFolder, *others: Member, sum_s: float = 0.0, exact: bool = False, over: Sequence[str] = ()
) -> GroupView:
    """What the planner says of these machines, which have measured a sum if it is not 0."""
    members, sums = Members(lambda: others, own), MeasuredSums()
    names = over or [each.name for each in others]
    sums.took(names, sum_s)
    ranks = RankPlanner(None, members, lambda *_: pytest.fail("nothing is promised"), lambda: 8 * GIB)  # type: ignore[arg-type]
    rules = WeightRules("cpu", "float32", available=False, budget_bytes=8 * GIB)
    prices = RankPrices(members, sums, ranks.check, exact=exact)
    groups = FleetGroups(None, members, lambda: rules, divided=prices)  # type: ignore[arg-type]
    found = groups.planned(folder, model_sizes.read(folder, rules), names)
    assert found is not None
    return found


def divided(found: GroupView) -> DividedView:
    assert found.divided is not None
    return found.divided


def test_layers_are_divided_where_the_sums_cost_less_than_is_saved(folder: ModelFolder) -> None:
    found = view(folder, other("studio"), sum_s=1e-6)
    assert divided(found).chosen
    assert divided(found).measured
    assert divided(found).tok_s > found.tok_s > 0
    assert (divided(found).sums, divided(found).sum_s) == (2 * LAYERS, 1e-6)
    assert "rounds in another way" in divided(found).why
    shown = "\n".join(group_lines(found, 100))
    assert "SPLIT" in shown
    assert f"{found.tok_s:.1f}" in shown
    assert f"{divided(found).tok_s:.1f}" in shown


def test_layers_are_dealt_out_where_a_sum_takes_long(folder: ModelFolder) -> None:
    found = view(folder, other("studio"), sum_s=1.0)
    assert not divided(found).chosen
    assert divided(found).tok_s < found.tok_s
    assert "Whole layers are as fast or faster" in divided(found).why


def test_before_a_ring_was_there_its_sums_are_modelled_from_the_link(folder: ModelFolder) -> None:
    near, far = other("studio"), replace(other("studio"), rtt_s=0.1)
    assert not divided(view(folder, near)).measured
    assert divided(view(folder, near)).sum_s < divided(view(folder, far)).sum_s
    assert "modelled from the link" in divided(view(folder, far)).why


def test_what_others_measured_is_not_taken_for_these(folder: ModelFolder) -> None:
    sums = MeasuredSums()
    sums.took(["studio"], 1e-3)
    sums.took(["studio", "kitchen"], 0.0)
    assert sums.of(["studio"]) == 1e-3
    assert sums.of(["kitchen", "studio"]) == 0.0


def test_a_daemon_whose_answers_have_to_be_exact_never_divides_by_itself(folder: ModelFolder) -> None:
    found = divided(view(folder, other("studio"), sum_s=1e-6, exact=True))
    assert not found.chosen
    assert "fleet.exactness is exact" in found.why


def test_what_cannot_be_divided_says_why(folder: ModelFolder) -> None:
    # Four heads are not for three machines.
    found = view(folder, other("studio"), other("kitchen"), over=["studio", "kitchen"])
    assert divided(found) == DividedView(why=divided(found).why)
    assert "cannot be divided between 3 machines" in divided(found).why
    assert divided(found).why in "\n".join(group_lines(found, None))


# ---- the load ----------------------------------------------------------------------------------------------


class SplitPool:
    """Notes how models are loaded. ``refuses``: what dividing fails with."""

    def __init__(self, refuses: FleetError | None = None) -> None:
        self.splits: list[str | None] = []
        self._refuses = refuses

    async def loading(
        self, folder: ModelFolder, *, over: Sequence[str] | None, split: str | None
    ) -> AsyncGenerator[Loading, None]:
        self.splits.append(split)
        yield Loading("reading", 1, 2)
        if split == "tensors" and self._refuses is not None:
            raise self._refuses


class OneFolderStore:
    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder

    def resolve(self, ref: str) -> ModelFolder:
        return self._folder

    in_part = resolve


def loaded(
    folder: ModelFolder,
    pool: SplitPool,
    *,
    split: Any = None,
    chosen: bool = True,
    over: Sequence[str] = ("beta",),
) -> ModelDone:
    planned = GroupView(tok_s=1.0, divided=DividedView(chosen=chosen, why="It is faster."))

    async def _as_planned(*_: Any) -> GroupView:
        return planned

    operations: Any = ModelOperations(
        OneFolderStore(folder),  # type: ignore[arg-type]
        pool,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        lambda ref: pytest.fail("nothing is pulled"),
        lambda: None,
        _as_planned,
    )
    events = asyncio.run(collect(operations.run("load", MODEL, over or None, split)))
    assert isinstance(events[-1], ModelDone)
    assert not any(isinstance(event, ModelDone) for event in events[:-1])
    return events[-1]


@pytest.mark.parametrize(("chosen", "split"), [(True, "tensors"), (False, "layers")])
def test_a_load_that_names_no_way_takes_the_planners_and_says_why(
    folder: ModelFolder, chosen: bool, split: str
) -> None:
    pool = SplitPool()
    assert loaded(folder, pool, chosen=chosen) == ModelDone(name=MODEL, split=split, why="It is faster.")  # type: ignore[arg-type]
    assert pool.splits == [split]


def test_a_way_that_is_named_is_taken(folder: ModelFolder) -> None:
    pool = SplitPool()
    assert loaded(folder, pool, split="layers") == ModelDone(name=MODEL)
    assert pool.splits == ["layers"]


def test_a_model_of_one_machine_is_not_priced(folder: ModelFolder) -> None:
    pool = SplitPool()
    assert loaded(folder, pool, over=()) == ModelDone(name=MODEL)
    assert pool.splits == [None]


def test_if_dividing_fails_layers_are_dealt_out_and_that_is_said(folder: ModelFolder) -> None:
    pool = SplitPool(GroupLost("beta: The ring could not be formed."))
    done = loaded(folder, pool)
    assert pool.splits == ["tensors", "layers"]
    assert done.split == "layers"
    assert done.why == "Dividing every layer failed: beta: The ring could not be formed."


def test_a_failure_is_told_where_the_way_was_named_or_the_other_would_fail_too(folder: ModelFolder) -> None:
    with pytest.raises(GroupLost):
        loaded(folder, SplitPool(GroupLost("beta has left.")), split="tensors")
    with pytest.raises(Overloaded):
        loaded(folder, SplitPool(Overloaded("It is in use.")))
