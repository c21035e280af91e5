"""What one more machine would give, by the planner's own prices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_plan_service import LAYERS, OneMachine, card, chosen, other

from fleetd.control.prefill_plan import AddedQuestion, AddedView
from fleetd.errors import InvalidValue, ModelNotFound, ModelUnsupported
from fleetd.limits import GIB
from fleetd.plan.known_machines import MACHINES
from fleetd.requests.placement.added_machine import added_member, held_bytes

MINI = "Mac mini M4, 16 GB"


def ask(fleet: OneMachine, machine: str = MINI, **question: Any) -> AddedView:
    return asyncio.run(fleet.service.added(AddedQuestion("m", machine, **question)))


def test_one_more_machine_shortens_every_prompt_that_it_helps_with() -> None:
    view = ask(OneMachine(card("home", {})), link="thunderbolt")
    assert (view.model, view.machine, view.link) == ("m", MINI, "thunderbolt")
    assert [point.tokens for point in view.points] == [1024, 2048, 4096]
    for point in view.points:
        assert point.added_s is not None
        assert point.added_s < point.fleet_s == point.alone_s
        assert MINI in point.nodes


def test_alone_and_the_fleet_as_it_is_are_what_is_planned_for_such_prompts() -> None:
    fleet = OneMachine(card("home", {}), other("studio", {"prefill_tok_s": 300.0}))
    for point in ask(fleet, "").points:
        planned = fleet.plan(point.tokens)
        local = next(option for option in planned.options if option.kind == "local")
        assert point.alone_s == pytest.approx(local.predicted_s)
        assert point.fleet_s <= (chosen(planned).predicted_s or 0) + 1e-9
        assert point.added_s is None


def test_what_still_has_to_be_loaded_is_compared_as_if_it_were() -> None:
    cold = OneMachine(card("home", {"state": "installed"}), other("studio", {"state": "installed"}))
    warm = OneMachine(card("home", {"state": "loaded"}), other("studio", {}))
    for first, second in zip(ask(cold).points, ask(warm).points, strict=True):
        assert first.fleet_s == pytest.approx(second.fleet_s)


def test_a_slower_link_never_gives_more() -> None:
    fleet = OneMachine(card("home", {}))
    links = [ask(fleet, link=link).points for link in ("thunderbolt", "wired", "wifi")]
    for fast, middle, slow in zip(*links, strict=True):
        assert (fast.added_s or 0) <= (middle.added_s or 0) <= (slow.added_s or 0)


def test_an_unknown_machine_is_refused_with_its_neighbours() -> None:
    with pytest.raises(InvalidValue, match="No machine is known as 'Mac mini M4, 17 GB'") as refused:
        ask(OneMachine(card("home", {})), "Mac mini M4, 17 GB")
    assert "Did you mean 'Mac mini M4, 16 GB'" in refused.value.hint


def test_a_model_that_was_never_loaded_or_is_not_here_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="this daemon has not loaded m yet") as refused:
        ask(OneMachine(card("home", {"hidden_bytes": 0, "layers": 0, "state": "installed"})))
    assert refused.value.hint == "Load it once: `fleetctl models load m`."
    with pytest.raises(ModelUnsupported, match="It keeps no rows"):
        ask(OneMachine(card("home", {"unshareable": "It keeps no rows.", "state": "installed"})))
    with pytest.raises(ModelNotFound):
        ask(OneMachine(card("home", None)))


@given(st.sampled_from(MACHINES), st.sampled_from([1, 4, 20, 80, 400]))
def test_no_machine_is_taken_to_hold_more_than_its_memory(machine: Any, weights_gib: int) -> None:
    (own,) = card("home", {}).models
    weights = weights_gib * GIB
    shape = replace(own.shape, weights_bytes=weights, outside_bytes=GIB // 2, layer_bytes=weights // LAYERS)
    member = added_member(machine, "wired", replace(own, shape=shape))
    (there,) = member.card.models
    assert held_bytes(there) < machine.memory_bytes or there.part_last == 0
    assert (there.state == "loaded") == (there.part_last == 0 and held_bytes(there) == weights)
    assert member.card.available_bytes <= machine.memory_bytes
