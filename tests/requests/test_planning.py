"""What the planner is told of machines: from cards and engines, measured, modelled, or held in part."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FACTS
from msgspec.structs import replace
from nested_fields import changed
from sharing_fakes import own_card

from fleetd.engine.protocol import Ready
from fleetd.limits import GIB
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.prefill import choice
from fleetd.requests.members.members import Member
from fleetd.requests.placement import planner_facts

M4 = MachineFacts(chip="Apple M4", accelerator="metal")
M4_MAX = MachineFacts(chip="Apple M4 Max", accelerator="metal")
MODEL: Ready = changed(
    FACTS,
    layers=32,
    weights_bytes=4 * GIB,
    outside_bytes=GIB // 2,
    hidden_bytes=8192,
    hidden_width=4096,
    prefill_tok_s=300.0,
)
UNKNOWN: dict[str, Any] = {"prefill_tok_s": 0.0}


def card(name: str = "mini", machine: MachineFacts = M4, usable: int = 0, **model: Any) -> Card:
    return replace(own_card(name, **model), machine=machine, available_bytes=16 * GIB, usable_bytes=usable)


def loaded(of: Card) -> ModelCard:
    """Its model, as its engine knows it."""
    return planner_facts.loaded_here(of.models[0], MODEL)


def helper(of: Card, pace: float = 1.0) -> choice.HelperSpec:
    member = Member(of, of.name, "", True, 0.001, 1e9)
    return planner_facts.helper(member, loaded(card("home")), pace)


def here(of: Card) -> Member:
    return Member(of, "this", here=True)


def home(of: Card) -> choice.HelperSpec:
    return planner_facts.home(here(of), loaded(of))


def test_a_loaded_model_has_room_for_what_its_engine_may_take() -> None:
    assert helper(card()).room_bytes == 16 * GIB
    assert helper(card(kv_budget_bytes=GIB)).room_bytes == GIB
    assert helper(card(kv_budget_bytes=64 * GIB)).room_bytes == 16 * GIB


def test_a_cold_one_has_room_for_what_is_left_beside_a_running_program() -> None:
    cold = helper(card(usable=3 * GIB, state="installed", kv_budget_bytes=0))
    assert (cold.loaded, cold.held, cold.room_bytes) == (False, None, 3 * GIB - WORKING_BYTES)
    assert cold.load_s > 0


def test_a_prompt_that_sparse_prefill_has_cut_is_for_one_machine() -> None:
    cut = planner_facts.prompt(MODEL.shape, 8000, 0, 256, kept=4096)
    assert cut.tokens == 4095
    assert cut.shape.unshareable == "A prompt that sparse prefill has cut is prefilled by one machine."
    assert planner_facts.prompt(MODEL.shape, 8000, 0, 256).shape.unshareable == ""


def test_some_layers_are_a_help_without_a_load() -> None:
    part = helper(card(usable=GIB, state="installed", part_last=14, kv_budget_bytes=GIB))
    assert (part.loaded, part.load_s, part.held, part.room_bytes) == (True, 0.0, (0, 14), GIB)
    assert not part.modelled
    # Whoever has all of it has no need of them.
    assert helper(card(part_last=14)).held is None


@pytest.mark.parametrize("part", [(3, 3), (5, 2)], ids=str)
def test_layers_on_a_hostile_card_that_are_none_help_nobody(part: tuple[int, int]) -> None:
    first, last = part
    assert not helper(card(state="installed", part_first=first, part_last=last)).loaded


def test_layers_beyond_the_model_on_a_hostile_card_make_no_split() -> None:
    far = helper(card(state="installed", part_first=0, part_last=4000))
    near = home(card("home", prefill_tok_s=100.0))
    for option in choice.options(planner_facts.prompt(MODEL.shape, 4096, 0, 256), near, [far]):
        assert option.split is None or option.split.cuts[-1] == MODEL.shape.layers


@pytest.mark.parametrize(
    ("theirs", "ours", "refused"),
    [("int8", "float32", True), ("int8", "int8", False), ("int8", "", False), ("", "float32", False)],
)
def test_cpus_that_multiply_in_different_arithmetics_do_not_help_each_other(
    theirs: str, ours: str, refused: bool
) -> None:
    own = changed(loaded(card("home")), cpu_arithmetic=ours)
    member = Member(card(cpu_arithmetic=theirs), "mini", "", True, 0.001, 1e9)
    refusal = planner_facts.helper(member, own).refusal
    assert (refusal is not None and refusal.code == "dtype") is refused


def test_a_shape_that_another_machine_told_keeps_the_arithmetic_of_this_one() -> None:
    bare, other = card("home", cpu_arithmetic="int8"), card("other")
    shape = replace(MODEL.shape, cpu_arithmetic="float32", unshareable="")
    loaded_there = replace(other, models=[replace(other.models[0], shape=shape)])
    member = Member(loaded_there, "other", "", True, 0.001, 1e9)
    assert planner_facts.as_told(bare.models[0], [member]).shape == replace(shape, cpu_arithmetic="int8")


def test_a_machine_that_nobody_measured_keeps_the_pace_of_this_one() -> None:
    """By the makers' figures the Max is 16/4.2 times as fast, whatever both really make of this model."""
    own = card("home", prefill_tok_s=100.0)
    pace = planner_facts.pace(here(own), loaded(own))
    unknown = helper(card(machine=M4_MAX, **UNKNOWN), pace)
    assert unknown.modelled
    assert home(own).speed.seconds(1.0, 0, 256) / unknown.speed.seconds(1.0, 0, 256) == pytest.approx(
        16 / 4.2, rel=0.2
    )
    # It says nothing against a measurement, and needs one itself.
    assert helper(card(), pace) == helper(card())
    assert planner_facts.pace(here(card("home", **UNKNOWN)), card(**UNKNOWN).models[0]) == 1
    for tok_s in (1e-6, 1e9):
        odd = card("home", prefill_tok_s=tok_s)
        assert 0.1 <= planner_facts.pace(here(odd), loaded(odd)) <= 10


def test_a_context_that_nobody_measured_is_taken_from_the_makers_figures() -> None:
    chip = chip_speeds.hardware_of(M4.chip, M4.accelerator, 0)
    measured = {"prefill_tok_s": 100.0, "prefill_fixed_s": 0.1}
    context_s = chip.prefill_context_s(MODEL.shape.layers, MODEL.shape.hidden_width)
    assert context_s > 0
    for found in (home(card(**measured)), helper(card(**measured))):
        assert found.speed == PrefillSpeed.measured(100.0, context_s, 0.1)
    assert helper(card(**measured, prefill_context_s=1e-9)).speed == PrefillSpeed.measured(100.0, 1e-9, 0.1)


def test_the_engine_knows_its_speed_before_its_card_does() -> None:
    found = home(card(**UNKNOWN))
    assert not found.modelled
    assert found.speed.token_s == pytest.approx(1 / 300, rel=0.3)


def test_a_prompt_is_what_decoding_does_not_compute() -> None:
    asked = planner_facts.prompt(MODEL.shape, 100, 100, 32)
    assert (asked.tokens, asked.cached, asked.shape.outside_bytes) == (99, 99, GIB // 2)
