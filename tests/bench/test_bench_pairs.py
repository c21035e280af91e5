"""Modelled pairs of machines: what the tables of docs/macs.md and docs/links.md rest on."""

from __future__ import annotations

import itertools

import pytest

from bench import pairs
from fleetd.models import catalog


@pytest.mark.parametrize("model", pairs.MODELS)
@pytest.mark.parametrize("helper", [pairs.MACBOOK, pairs.STUDIO, pairs.SPARK])
def test_a_faster_link_never_takes_longer_and_no_link_is_slower_than_none(
    model: str, helper: pairs.Machine
) -> None:
    fastest_first = sorted(pairs.LINKS, key=lambda name: -pairs.LINKS[name].bytes_per_s)
    plans = [pairs.together(pairs.STUDIO, helper, link, model, 4_000) for link in fastest_first]
    seconds = [plan.predicted_s for plan in plans]
    # The search for a cut is exact to a hundredth.
    assert all(later >= 0.99 * sooner for sooner, later in itertools.pairwise(seconds))
    assert max(seconds) <= pairs.alone_s(pairs.STUDIO, model, 4_000)


@pytest.mark.parametrize("model", pairs.MODELS)
def test_each_model_is_in_the_catalog_and_its_weights_fit_into_what_that_says(model: str) -> None:
    entry = catalog.find(model)
    assert entry is not None
    assert 0.5 < pairs.MODELS[model].weights_bytes / entry.memory_bytes < 1


def test_the_helper_never_gets_more_than_it_has_room_for() -> None:
    plan = pairs.together(pairs.STUDIO, pairs.MACBOOK, pairs.ETHERNET, "llama-3.3-70b", 16_000)
    assert plan.split is not None
    share = len(plan.split.layers_of(0)) / plan.split.layers
    assert (
        share * pairs.MODELS["llama-3.3-70b"].weights_bytes < pairs.MACBOOK.memory_gb * 1e9 * pairs.GPU_SHARE
    )


def test_a_group_is_as_fast_as_its_machines_read_weights_less_the_links() -> None:
    model, count, machine = "llama-3.3-70b", 2, pairs.Machine("48 GB, M4 Pro", 48, pairs.APPLE[4, "Pro"])
    fast, slow = (
        pairs.together_tok_s(model, count, machine, pairs.LINKS[name])
        for name in ("Thunderbolt 4 or 5, bridge", "Wi-Fi, next room, or a VPN")
    )
    whole = machine.hardware.decode_tok_s(int(39.7e9))
    assert 0.9 * whole < slow < fast < whole
    assert pairs.together_tok_s(model, 2, pairs.MACBOOK, pairs.LINKS[pairs.ETHERNET]) == 0.0


@pytest.mark.parametrize(("model", "home", "scorer"), pairs._SMART)
def test_scoring_of_a_long_prompt_is_a_small_part_of_what_it_saves(
    model: str, home: pairs.Machine, scorer: pairs.Machine | None
) -> None:
    plans = [pairs.smart_plan(model, home, scorer, tokens) for tokens in (8_000, 16_000, 128_000)]
    assert all(plan.worth_it for plan in plans)
    gains = [plan.dense_s / plan.predicted_s for plan in plans]
    assert gains == sorted(gains)
    if scorer is None and model == "llama-3.3-70b":
        assert plans[1].score_s < 0.2 * plans[1].predicted_s
