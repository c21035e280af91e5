"""Whether a load over several machines divides layers or deals them out, and how that is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import pytest
import tiny_architectures
from member_cards import FACTS, OWN, collect, machine
from member_cards import MODEL as CARD
from msgspec.structs import replace
from nested_fields import changed

from fleetctl.render.group_table import group_lines
from fleetd.control.group_view import DividedView, GroupView
from fleetd.control.model_change import ModelDone
from fleetd.engine.protocol import Loading
from fleetd.errors import FleetError, GroupLost, OutOfMemory, Overloaded, PeerLost
from fleetd.limits import GIB
from fleetd.models import model_sizes
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes, WeightRules
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
    tiny_architectures.write(path, "llama", num_hidden_layers=LAYERS, hidden_size=256, num_key_value_heads=4)
    return read_folder(path, name=MODEL, source="folder", revision=None)


def own() -> Card:
    return replace(OWN, models=[replace(CARD, state="installed")])


def other(name: str, *, room: int = 8 * GIB, accelerator: str = "cpu", **fields: Any) -> Member:
    found = machine(name, state="installed")
    facts = replace(FACTS, accelerator=accelerator)
    return replace(
        found, card=replace(found.card, usable_bytes=WORKING_BYTES + room, machine=facts), **fields
    )


def view(
    folder: ModelFolder,
    *others: Member,
    sum_s: float = 0.0,
    exact: bool = False,
    over: Sequence[str] = (),
    card: Callable[[], Card] = own,
    fabrics: Sequence[str] = (),
) -> GroupView:
    """What the planner says of these machines, which have measured a sum if it is not 0.

    ``fabrics``: what this machine offers on the links to all of them.
    """
    members, sums = Members(lambda: others, card), MeasuredSums()
    names = over or [each.name for each in others]
    sums.took(names, sum_s)
    ranks = RankPlanner(None, members, lambda *_: pytest.fail("nothing is promised"), lambda: 8 * GIB)  # type: ignore[arg-type]
    rules = WeightRules("cpu", "float32", available=False, budget_bytes=8 * GIB)
    prices = RankPrices(members, sums, ranks.check, lambda _: fabrics, exact=exact)
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
    # Two equal machines read at the same time what they read one after the other, with a hop of 1 ms.
    weights_s = (1 / found.tok_s - 0.001) / 2
    assert divided(found).weights_s == pytest.approx(weights_s)
    assert divided(found).tok_s == pytest.approx(1 / (weights_s + 2 * LAYERS * 1e-6))
    assert "in 8 sums of 0.001 ms (measured)" in divided(found).why
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


def on(accelerator: str, hidden_bytes: int = 0) -> Card:
    """This machine's card; ``hidden_bytes``: of a hidden state, 0 before the model was loaded."""
    card = own()
    model = changed(card.models[0], hidden_bytes=hidden_bytes)
    return replace(card, models=[model], machine=replace(FACTS, accelerator=accelerator))


@pytest.mark.parametrize(
    ("accelerator", "hidden_bytes", "machines", "sum_us"),
    [
        # 256 numbers at a megabyte per second: half of them there, half of them back. A CPU sums floats of
        # four bytes, also if the model computes with others there.
        ("metal", 0, 2, 2 * (256 + 75)),
        ("metal", 800, 2, 2 * (400 + 75)),
        ("cpu", 0, 2, 2 * (512 + 75)),
        ("cpu", 800, 2, 2 * (512 + 75)),
        ("cpu", 4096, 2, 2 * (2048 + 75)),
        # Three hops there and three back, each with a fourth.
        ("cpu", 0, 4, 6 * (256 + 75)),
    ],
)
def test_a_modelled_sum_is_of_one_hidden_state(
    folder: ModelFolder, accelerator: str, hidden_bytes: int, machines: int, sum_us: float
) -> None:
    others = [other(str(n), rtt_s=0.0, bytes_per_s=1e6) for n in range(machines - 1)]
    found = view(folder, *others, card=lambda: on(accelerator, hidden_bytes))
    assert divided(found).sum_s == pytest.approx(1e-6 * sum_us)


@pytest.mark.parametrize(
    ("here", "there", "machines", "by"),
    [
        (["jaccl", "nccl"], ["nccl", "jaccl"], 2, "what RDMA usually takes"),
        (["jaccl", "nccl"], ["nccl"], 2, "what NCCL usually takes"),
        (["jaccl"], ["nccl"], 2, "the link"),
        # More than two use a ring.
        (["jaccl"], ["jaccl"], 4, "the link"),
    ],
)
def test_two_machines_that_both_have_a_fabric_are_priced_by_it(
    folder: ModelFolder, here: list[str], there: list[str], machines: int, by: str
) -> None:
    found = [other(str(n)) for n in range(machines - 1)]
    others = [replace(each, card=replace(each.card, collectives=there)) for each in found]
    seen = divided(view(folder, *others, fabrics=here))
    assert f"(modelled from {by})" in seen.why
    assert (seen.sum_s == 30e-6) == (by != "the link")


def test_what_others_measured_is_not_taken_for_these(folder: ModelFolder) -> None:
    sums = MeasuredSums()
    sums.took(["studio"], 1e-3)
    sums.took(["studio", "kitchen"], 0.0)
    assert sums.of(["studio"]) == 1e-3
    sums.took(["studio"], 0.0)
    assert sums.of(["studio"]) == 1e-3
    sums.took(["studio"], 2e-3)
    assert sums.of(["studio"]) == 2e-3
    assert sums.of(["kitchen", "studio"]) == 0.0


def test_a_daemon_whose_answers_have_to_be_exact_never_divides_by_itself(folder: ModelFolder) -> None:
    found = divided(view(folder, other("studio"), sum_s=1e-6, exact=True))
    assert not found.chosen
    assert "fleet.exactness is exact" in found.why
    slow = divided(view(folder, other("studio"), sum_s=1.0, exact=True))
    assert "Whole layers are as fast or faster" in slow.why


def test_what_cannot_be_divided_says_why(folder: ModelFolder) -> None:
    # Four heads are not for three machines.
    found = view(folder, other("studio"), other("kitchen"), over=["studio", "kitchen"])
    assert divided(found) == DividedView(why=divided(found).why)
    assert "cannot be divided between 3 machines" in divided(found).why
    assert divided(found).why in "\n".join(group_lines(found, None))


# ---- the room ----------------------------------------------------------------------------------------------


class CountedSizes:
    """Four layers of 1000 bytes and 16 for each token; 600 bytes outside them. On a CPU twice as much."""

    def each_layer(self, arithmetic: str) -> LayerBytes:
        times = 2 if arithmetic == "float32" else 1
        return LayerBytes((1000 * times,) * LAYERS, 600 * times, 16 * times)


def planner(
    *others: Member,
    room: int = 8 * GIB,
    card: Callable[[], Card] = own,
    promise: Callable[..., Any] = lambda *_: pytest.fail("nothing is promised"),
    sums: MeasuredSums | None = None,
) -> RankPlanner:
    return RankPlanner(None, Members(lambda: others, card), promise, lambda: room, sums)  # type: ignore[arg-type]


# Of two machines each holds 600 + 4 · 1000 / 2 bytes of weights, and 4 · 16 / 2 of a token. Three fourths of
# the room that is left are for tokens: of 128000 bytes, for 3000. On a CPU all of it is twice as much.
HALF, ROWS = 2600, 128000


@pytest.mark.parametrize(
    ("here", "there", "tokens"),
    [
        (("metal", HALF + ROWS), ("metal", HALF + 2 * ROWS), 3000),
        (("metal", HALF + 2 * ROWS), ("metal", HALF + ROWS), 3000),
        (("cpu", 2 * (HALF + ROWS)), ("metal", HALF + 2 * ROWS), 3000),
        (("metal", HALF + 2 * ROWS), ("cpu", 2 * (HALF + ROWS)), 3000),
        # No more than two contexts of 4096 tokens.
        (("metal", 8 * GIB), ("metal", 8 * GIB), 8192),
        # 2048 tokens take 65536 bytes; those are three fourths of 87382 and a little more than of 87381.
        (("metal", HALF + 87382), ("metal", 8 * GIB), 2048),
        (("metal", HALF + 87381), ("metal", 8 * GIB), "This machine has no room for one of 2 parts"),
        (("metal", 8 * GIB), ("metal", 0), "studio has no room for one of 2 parts"),
        (("metal", 8 * GIB), ("metal", -WORKING_BYTES), "studio has no room for one of 2 parts"),
    ],
)
def test_there_are_as_many_tokens_as_have_room_on_each_machine(
    folder: ModelFolder, here: tuple[str, int], there: tuple[str, int], tokens: int | str
) -> None:
    accelerator, room = here
    ranks = planner(
        other("studio", accelerator=there[0], room=there[1]), room=room, card=lambda: on(accelerator)
    )
    if isinstance(tokens, str):
        with pytest.raises(OutOfMemory, match=tokens):
            ranks.check(folder, ["studio"], CountedSizes())  # type: ignore[arg-type]
        return
    found = ranks.check(folder, ["studio"], CountedSizes())  # type: ignore[arg-type]
    assert found.tokens == tokens
    assert (found.room_bytes, found.on_cpu) == (room, accelerator == "cpu")
    assert [each.name for each in found.others] == ["studio"]


def test_a_model_with_a_short_context_needs_room_for_no_more_than_that(folder: ModelFolder) -> None:
    short = replace(folder, config={**folder.config, "max_position_embeddings": 96})
    # 96 tokens take 3072 bytes: three fourths of 4096.
    ranks = planner(other("studio", accelerator="metal"), room=HALF + 4096, card=lambda: on("metal"))
    assert ranks.check(short, ["studio"], CountedSizes()).tokens == 96  # type: ignore[arg-type]


# The weights of one of two parts, and 3000 tokens.
@pytest.mark.parametrize(("accelerator", "n_bytes"), [("metal", 2600 + 96000), ("cpu", 5200 + 192000)])
def test_this_machine_promises_what_its_rank_takes(
    folder: ModelFolder, accelerator: str, n_bytes: int
) -> None:
    promised: list[tuple[str, int, int]] = []

    def promise(what: str, n_bytes: int, room_bytes: int, held: Callable[[], int]) -> Any:
        promised.append((what, n_bytes, room_bytes))
        return nullcontext()

    room, sums = 2 * (HALF + ROWS), MeasuredSums()
    studio = other("studio", accelerator="metal", room=HALF + ROWS)
    made = planner(studio, room=room, card=lambda: on(accelerator), promise=promise, sums=sums)
    with closing(made(folder, ["studio"], CountedSizes())) as ranks:  # type: ignore[arg-type]
        ranks._promise()
        assert promised == [(f"Rank 0 of 2 of {MODEL}", n_bytes, room)]
        ranks._measured(1e-3)
    assert sums.of(["studio"]) == 1e-3


@pytest.mark.parametrize(
    ("changes", "names", "digest", "why"),
    [
        ({}, ["studio", "kitchen"], "d", "cannot be divided between 3 machines"),
        ({}, ["kitchen"], "d", "kitchen has left the fleet"),
        ({"sees_prompts": False}, ["studio"], "d", "studio may not see prompts"),
        ({}, ["studio"], "", "does not know yet which files"),
    ],
)
def test_who_cannot_help_is_refused_by_name(
    folder: ModelFolder, changes: dict[str, Any], names: list[str], digest: str, why: str
) -> None:
    card = replace(own(), models=[replace(CARD, digest=digest)])
    with pytest.raises(FleetError, match=why):
        planner(other("studio", **changes), card=lambda: card).check(folder, names, CountedSizes())  # type: ignore[arg-type]


def test_a_machine_that_has_just_failed_is_asked_all_the_same_if_it_is_named(folder: ModelFolder) -> None:
    ranks = planner(other("studio"))
    ranks._members.failed("studio", "prefill", PeerLost("It has left."))
    (studio,) = ranks._members.others("prefill")
    assert studio.why_left_out("d")
    assert ranks.check(folder, ["studio"], CountedSizes()).others  # type: ignore[arg-type]


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
