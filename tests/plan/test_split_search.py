"""The search for cuts, beside all cuts that there are: on small models, every one of them is priced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.plan import costs
from fleetd.plan.costs import LinkSpeed, PrefillSpeed, cautious
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import LAST_LAYER, PrefillSize, timeline
from fleetd.plan.prefill.search import CHUNKS, Search
from fleetd.plan.prefill.split import Split, SplitKind, checked, cut_bounds

SMALL = ModelShape(layers=10, sizes=StateSizes(24_576), hidden_bytes=1152)
LARGE = ModelShape(layers=16, sizes=StateSizes(98_304), hidden_bytes=6144)
# Each with its usual size of chunks, and the speed of the machine that answers.
MODELS = {
    "small": (SMALL, 256, PrefillSpeed(1e-3, 1e-6, 0.02)),
    "large": (LARGE, 512, PrefillSpeed(2e-3, 2e-8, 0.01)),
}
LINKS = {"10 Gbit/s": LinkSpeed(1.1e9, 3e-4), "1 Gbit/s": LinkSpeed(1.1e8, 5e-4)}
# How many times faster than home each helper is.
HELPERS = {
    "alike": (1.0,),
    "a third": (1 / 3,),
    "four times": (4.0,),
    "slow and fast": (0.5, 2.0),
    "slow and two alike": (1 / 3, 1.0, 1.0),
}


def chain(home: PrefillSpeed, faster: Sequence[float], link: LinkSpeed) -> list[HelperSpec]:
    names = "abc"[: len(faster)]
    return [HelperSpec(n, n, home.times(1 / f), link) for n, f in zip(names, faster, strict=True)]


def seconds(
    kind: SplitKind,
    prompt: PrefillSize,
    cuts: tuple[int, ...],
    chunk: int,
    helpers: list[HelperSpec],
    home: PrefillSpeed,
) -> float:
    split = checked(Split(kind, cuts, prompt.shape.layers, prompt.cached, prompt.tokens, chunk))
    return timeline(prompt, split, helpers, home).total_s


def least_s(prompt: PrefillSize, helpers: list[HelperSpec], home: PrefillSpeed) -> dict[str, float]:
    """The least time of each kind over all cuts between layers, and between chunks of many sizes."""
    count, found = len(helpers), dict[str, float]()
    found["layers"] = min(
        seconds("layers", prompt, (0, *cuts, prompt.shape.layers), chunk, helpers, home)
        for chunk in {*CHUNKS, prompt.chunk}
        for cuts in itertools.combinations(range(1, prompt.shape.layers + 1), count)
    )
    found["tokens"] = min(
        seconds("tokens", prompt, (0, *(chunk * n for n in ends), prompt.tokens), chunk, helpers, home)
        for chunk in range(80, prompt.chunk + 1, 1 if count == 1 else 16)
        for ends in itertools.combinations(range(1, -(-prompt.tokens // chunk)), count)
    )
    return found


@pytest.mark.parametrize("tokens", [600, 1500])
@pytest.mark.parametrize("helpers", HELPERS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("model", MODELS)
def test_no_cut_ends_a_fiftieth_sooner_than_the_one_that_is_found(
    model: str, link: str, helpers: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Caution makes plans slower on purpose: the search is for speeds that are known exactly.
    monkeypatch.setattr(costs, "MISJUDGED", 0.0)
    shape, chunk, home = MODELS[model]
    prompt = PrefillSize(shape, tokens - 1, 0, chunk, last_layer=LAST_LAYER)
    others = chain(home, HELPERS[helpers], LINKS[link])
    least, found = least_s(prompt, others, home), dict[str, float]()
    for kind, best in Search(prompt, others, HelperSpec("", "this", home)).found():
        total_s = seconds(kind, prompt, best.cuts, best.chunk, others, home)
        assert total_s == pytest.approx(best.timeline.total_s)
        found[kind] = min(total_s, found.get(kind, total_s))
    assert found["layers"] <= 1.02 * least["layers"]
    assert found["tokens"] <= 1.02 * least["tokens"]


# ---- Bounds of cuts --------------------------------------------------------------------------------------


@examples(200)
@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_a_cut_may_lie_where_some_chain_of_machines_has_it(
    data: st.DataObject, layers: int, count: int, whole: bool
) -> None:
    """Beside all cuts of which each machine has its layers."""
    part = st.tuples(st.integers(0, layers - 1), st.integers(1, layers)).filter(lambda p: p[0] < p[1])
    held = data.draw(st.lists(st.none() | part, min_size=count, max_size=count))
    parts = [one or (0, layers) for one in held]
    possible = [
        cuts
        for cuts in itertools.combinations(range(1, layers + 1), count)
        if (cuts[-1] == layers) is whole
        and all(
            first <= a and b <= last
            for (first, last), (a, b) in zip(parts, itertools.pairwise((0, *cuts)), strict=True)
        )
    ]
    expected = [(min(ends), max(ends)) for ends in zip(*possible, strict=True)] or None
    assert cut_bounds(layers, held, whole=whole) == expected


# ---- Caution ---------------------------------------------------------------------------------------------


def test_slow_machines_are_taken_for_slower_and_fast_ones_for_faster() -> None:
    speeds = [PrefillSpeed(1e-3), PrefillSpeed(2e-3), PrefillSpeed(4e-3)]
    fast, middle, slow = cautious(speeds, range(1000), 256)
    assert fast.token_s < speeds[0].token_s
    assert slow.token_s > speeds[2].token_s
    assert slow.token_s <= (1 + costs.MISJUDGED) * speeds[2].token_s
    assert abs(middle.token_s / speeds[1].token_s - 1) < slow.token_s / speeds[2].token_s - 1


def test_machines_that_are_alike_keep_their_speeds() -> None:
    assert cautious([PrefillSpeed(1e-3)] * 3, range(1000), 256) == [PrefillSpeed(1e-3)] * 3
