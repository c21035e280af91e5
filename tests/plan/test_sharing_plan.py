"""The choice of helpers: never slower than staying here, valid, steady, with reasons against the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed

from bench import pairs
from fleetd import limits
from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.limits import GIB
from fleetd.plan.prefill import choice, schedule, step_names
from fleetd.plan.prefill.choice import (
    BUSY_FROM,
    HYSTERESIS,
    HelperSpec,
    LinkSpeed,
    Load,
    PlanChoice,
    PrefillOption,
    PrefillSize,
    PrefillSpeed,
    choose,
    options,
    plan_prefill,
)
from fleetd.plan.prefill.split import checked
from fleetd.plan.refusals import Refusal
from fleetd.plan.route import ADVANTAGE, CAUTION, DOUBT

SHAPE = ModelShape(weights_bytes=5 * GIB, layers=32, sizes=StateSizes(131072), hidden_bytes=8192)
PROMPT = PrefillSize(SHAPE, 8192, 0, 512)
SPEED = PrefillSpeed(token_s=1e-3, context_s=1e-8, fixed_s=0.01)
HOME = HelperSpec("", "this", SPEED)
LAN = LinkSpeed(1.1e9, 3e-4)


def helper(node_id: str = "a", faster: float = 1.0, link: LinkSpeed = LAN, **fields: Any) -> HelperSpec:
    return replace(HelperSpec(node_id, node_id, SPEED.times(1 / faster), link), **fields)


def chosen(
    *helpers: HelperSpec,
    prompt: PrefillSize = PROMPT,
    previous: PrefillOption | None = None,
    home: HelperSpec = HOME,
) -> PlanChoice:
    return choose(options(prompt, home, helpers), previous)


def of(found: Sequence[PrefillOption], kind: str, *helpers: str) -> PrefillOption:
    (option,) = [o for o in found if o.kind == kind and set(o.helpers) == set(helpers)]
    return option


def why(choice: PlanChoice, node_id: str, kind: str = "any") -> tuple[str, str]:
    option = of(choice.rejected, kind, node_id)
    return option.code, option.reason


# ---- All of them -----------------------------------------------------------------------------------------


def test_a_plan_is_what_the_machines_in_it_are() -> None:
    """Exact if all of them are, modelled if one is."""
    found = options(PROMPT, HOME, [helper("a"), helper("b", exact=False, modelled=True, doubtful=True)])
    assert {frozenset(each.helpers) for each in found} == {frozenset(names) for names in ("", "a", "b", "ab")}
    for each in found:
        other = "b" in each.helpers
        assert (each.exact, each.modelled, each.doubtful) == (not other, other, other)
    narrow = options(replace(PROMPT, sent_bits=8), HOME, [helper("a", narrows=True)])
    assert [(each.exact, each.wire_bits) for each in narrow if each.helpers] == [(False, 8)] * (
        len(narrow) - 1
    )
    home = replace(HOME, modelled=True, doubtful=True)
    assert all(each.modelled for each in options(PROMPT, home, [helper("a")]))
    assert all(each.doubtful for each in options(PROMPT, home, [helper("a")]) if each.helpers)


def test_a_machine_s_other_requests_make_it_slower() -> None:
    """Here each by 0.3, as for routing; a helper takes turns with each of them."""
    (alone,), (beside,) = (options(PROMPT, replace(HOME, running=running), []) for running in (0, 2))
    assert beside.predicted_s == pytest.approx(1.6 * alone.predicted_s)
    slow, busy = (options(PROMPT, HOME, [each]) for each in (helper("a", 1 / 3), helper("a", running=2)))
    for kind in ("tokens", "layers"):
        assert of(busy, kind, "a").predicted_s == pytest.approx(of(slow, kind, "a").predicted_s)


def test_the_longest_load_is_waited_for_once() -> None:
    cold = [helper(name, loaded=False, load_s=load_s) for name, load_s in (("a", 0.5), ("b", 1.5))]
    both = [each for each in options(PROMPT, HOME, cold) if len(each.helpers) == 2]
    assert both
    for each in both:
        assert each.load_s == 1.5
        assert each.steps[0] == (step_names.LOADED, 1.5)
        assert sum(seconds for _, seconds in each.steps) == pytest.approx(each.predicted_s)


def test_the_three_that_help_most_are_combined_however_long_their_loads() -> None:
    fast = [helper(name, 2.0, loaded=False, load_s=9.0) for name in "bcd"]
    found = options(PROMPT, HOME, [helper("a", 0.5), *fast])
    combined = {frozenset(each.helpers) for each in found if len(each.helpers) > 1}
    assert combined == {frozenset(names) for names in ("bc", "bd", "cd", "bcd")}


def test_only_what_has_a_price_has_the_time_of_the_first_token_in_it() -> None:
    home = replace(HOME, first_token_s=0.5)
    refused = helper("b", refusal=Refusal("draining", "b is stopping."))
    for before, after in zip(
        options(PROMPT, HOME, [helper("a"), refused]),
        options(PROMPT, home, [helper("a"), refused]),
        strict=True,
    ):
        assert after.predicted_s == pytest.approx(before.predicted_s + 0.5 if before.priced else 0.0)
        assert (step_names.DECODED in dict(after.steps)) is before.priced


LOCAL = PrefillOption("local", predicted_s=10.0)
MADE = next(each for each in options(PROMPT, HOME, [helper("a")]) if each.split is not None)


def made(seconds: float, name: str = "a", **fields: Any) -> PrefillOption:
    """A plan with one helper and this price."""
    return replace(MADE, helpers=(name,), names=(name,), predicted_s=seconds, steps=(), **fields)


# Reading it here takes 10 s, and a plan has to take a tenth less.
@pytest.mark.parametrize(
    ("option", "kept", "taken"),
    [
        (made(8.9), False, True),
        (made(9.1), False, False),
        # By published figures it is taken to be half as long again, and by doubtful ones a fifth.
        (made(5.9, modelled=True), False, True),
        (made(6.1, modelled=True), False, False),
        (made(7.4, doubtful=True), False, True),
        (made(7.6, doubtful=True), False, False),
        # It was the plan of the prompt before.
        (made(9.9), True, True),
        (made(10.1), True, False),
        # It cannot be taken, whatever it takes.
        (made(1.0, code="cold"), False, False),
        (PrefillOption("any", helpers=("a",)), False, False),
        # To round has to be worth something, too.
        (made(8.9, wire_bits=8), False, True),
        (made(9.1, wire_bits=8), False, False),
    ],
)
def test_what_is_clearly_sooner_than_this_machine_alone(
    option: PrefillOption, kept: bool, taken: bool
) -> None:
    found = choose([LOCAL, option], option if kept else None)
    assert found.best == (option if taken else LOCAL)
    # That this machine's own speed is a guess makes no other one faster.
    guessed = replace(LOCAL, modelled=True)
    assert choose([guessed, option], option if kept else None).best == (option if taken else guessed)


@pytest.mark.parametrize(
    ("whole", "rounded", "taken"),
    [
        (made(8.0), made(7.1, "b", wire_bits=8), True),
        (made(8.0), made(7.3, "b", wire_bits=8), False),
        # By figures that can be believed it is sooner than 7.5 s, but not than the 5 s that are told.
        (made(5.0, modelled=True), made(6.0, "b", wire_bits=8), False),
        (made(5.0, modelled=True), made(4.9, "b", wire_bits=8), True),
    ],
)
def test_rows_are_rounded_only_if_that_is_clearly_sooner_than_not_to(
    whole: PrefillOption, rounded: PrefillOption, taken: bool
) -> None:
    assert choose([LOCAL, whole, rounded]).best == (rounded if taken else whole)


def test_what_was_not_chosen_comes_by_its_price_and_what_has_none_at_the_end() -> None:
    none = PrefillOption("any", helpers=("z",), code="short", reason="It is short.")
    found = choose([LOCAL, none, made(12.0, "b"), made(5.0), made(7.0, "c")])
    assert [option.helpers for option in found.rejected] == [("c",), (), ("b",), ("z",)]


# ---- Which one -------------------------------------------------------------------------------------------


def test_alone_everything_stays_here() -> None:
    choice = chosen()
    assert choice.best.kind == "local"
    assert choice.rejected == ()
    assert choice.best.predicted_s == pytest.approx(SPEED.total(1.0, range(8192), 512))


def test_an_equal_helper_takes_about_half() -> None:
    choice = chosen(helper())
    (local,) = [o for o in choice.rejected if o.kind == "local"]
    assert 1.8 < local.predicted_s / choice.best.predicted_s < 2
    assert choice.best.split is not None
    begin, cut, end = choice.best.split.cuts
    assert 0.4 < (cut - begin) / (end - begin) < 0.6


@pytest.mark.parametrize("faster", [0.25, 0.5, 1, 2, 4, 8])
def test_unequal_machines_come_near_the_sum_of_their_rates(faster: float) -> None:
    prompt, speed = replace(PROMPT, tokens=60_000), PrefillSpeed(1e-3, 0.0, 0.01)
    other = helper(speed=speed.times(1 / faster))
    choice = chosen(other, prompt=prompt, home=replace(HOME, speed=speed))
    alone_s = of([choice.best, *choice.rejected], "local").predicted_s
    assert alone_s / choice.best.predicted_s > 0.93 * (1 + faster)


@pytest.mark.parametrize("slower", [2, 3, 4])
def test_a_slow_machine_whose_speed_is_misjudged_by_a_tenth_hardly_delays_anybody(slower: float) -> None:
    """By the schedule, over what machines of those speeds could give."""
    prompt = PrefillSize(ModelShape(layers=30, sizes=StateSizes(46_080), hidden_bytes=2304), 3999, 0, 256)
    own, link = PrefillSpeed(2.1e-3, 1.8e-6, 0.03), LinkSpeed(5e8, 2e-4)
    thought = helper(speed=own.times(slower), link=link)
    found = of(options(prompt, replace(HOME, speed=own), [thought]), "tokens", "a").split
    assert found is not None
    alone_s, worst = own.total(1.0, prompt.new, prompt.chunk), 1.0
    for off in (0.9, 0.95, 1.0, 1.05, 1.1):
        really = replace(thought, speed=own.times(slower * off))
        took_s = schedule.timeline(prompt, found, [really], own).total_s
        worst = min(worst, alone_s / took_s / (1 + 1 / (slower * off)))
    assert worst > 0.915


def test_layers_cost_what_they_take_and_the_last_one_little() -> None:
    """Cut in the middle, home has less to do than its helper."""
    prompt = changed(PROMPT, layers=30, last_layer=schedule.LAST_LAYER)
    shares = [prompt.share(range(a, b)) for a, b in ((0, 15), (15, 29), (29, 30))]
    assert shares == pytest.approx([15 / 29.1, 14 / 29.1, 0.1 / 29.1])
    assert sum(shares) == pytest.approx(1.0)
    assert schedule.share_of(range(15, 30), 30) == pytest.approx(sum(shares[1:]))


def test_three_helpers_are_better_than_two_are_better_than_one() -> None:
    prompt = replace(PROMPT, tokens=60_000)
    times = [chosen(*map(helper, "abc"[:n]), prompt=prompt).best.predicted_s for n in range(4)]
    assert times[0] / times[1] > 1.9
    assert times[0] / times[2] > 2.7
    assert times[0] / times[3] > 3.5


def test_a_short_prompt_is_divided_by_tokens_where_layers_have_too_few_chunks() -> None:
    prompt = replace(PROMPT, tokens=2048, exact_chunks=True)
    choice = chosen(helper(), prompt=prompt)
    assert choice.best.kind == "tokens"
    assert why(choice, "a", "layers")[0] == "slower"


def test_weights_that_do_not_fit_twice_are_divided_by_layers() -> None:
    """A machine that has to load, and has room for half of it."""
    small = helper(loaded=False, load_s=1.0, room_bytes=3 * GIB)
    found = options(PROMPT, HOME, [small])
    assert {o.kind for o in found} == {"local", "layers"}
    (layers,) = [o for o in found if o.kind == "layers"]
    assert layers.split is not None
    assert len(layers.split.layers_of(0)) < 16


def test_rows_take_room_too() -> None:
    rows = PROMPT.shape.sizes.token_bytes * PROMPT.tokens
    for room, most in ((rows, 1.0), (rows // 2, 0.5), (rows // 8, 0.125)):
        for option in options(PROMPT, HOME, [helper(faster=8, room_bytes=room)]):
            if option.split is not None:
                begin, cut, end = option.split.cuts
                assert (cut - begin) / (end - begin) <= most


def test_a_helper_many_times_faster_does_all_of_it() -> None:
    choice = chosen(helper(faster=200), home=replace(HOME, speed=SPEED.times(4)))
    assert choice.best.kind == "whole"
    assert choice.best.split is not None
    assert choice.best.split.cuts == (0, 32, 32)


def test_only_the_rest_of_a_cached_prompt_is_shared() -> None:
    prompt = replace(PROMPT, cached=4096)
    best = chosen(helper(), prompt=prompt).best
    assert best.split is not None
    assert (best.split.cached, best.split.tokens) == (4096, 8192)
    assert dict(best.steps)["prefix sent"] > 0.2


def test_exact_chunks_are_kept() -> None:
    prompt = replace(PROMPT, chunk=384, exact_chunks=True)
    assert {o.split.chunk for o in options(prompt, HOME, [helper()]) if o.split} == {384}


# ---- Never slower ----------------------------------------------------------------------------------------

speeds = st.builds(
    PrefillSpeed, st.floats(1e-5, 1e-2), st.just(0.0) | st.floats(1e-9, 1e-6), st.floats(0, 0.2)
)
links = st.builds(LinkSpeed, st.floats(1e5, 1e10), st.floats(0, 0.1))


def test_states_at_earlier_tokens_are_sent_where_that_takes_hardly_longer() -> None:
    """Chunks end there in any case: they are those of a prefill without helpers."""
    places = (256, 4096, 7936, 8100)
    hybrid = changed(PROMPT, state_bytes=100_000_000, places=places, states=3)
    sent = []
    for rate in (1e10, 1e9, 1e8):
        other = helper(link=LinkSpeed(rate, 1e-4))
        found = of(options(hybrid, HOME, [other]), "layers", "a")
        without = of(options(replace(hybrid, states=0), HOME, [other]), "layers", "a")
        assert found.split is not None
        assert found.split.places == places
        assert without.predicted_s <= found.predicted_s <= 1.05 * without.predicted_s
        sent.append(found.split.sent)
    assert sent[0] == 3
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < 3


@st.composite
def prompts(draw: st.DrawFn) -> PrefillSize:
    new, cached = draw(st.integers(1, 40_000)), draw(st.just(0) | st.integers(0, 20_000))
    return PrefillSize(
        ModelShape(
            weights_bytes=draw(st.integers(10**6, 10**11)),
            layers=draw(st.integers(1, 80)),
            sizes=StateSizes(draw(st.integers(100, 500_000))),
            hidden_bytes=draw(st.integers(100, 20_000)),
        ),
        tokens=cached + new,
        cached=cached,
        chunk=draw(st.sampled_from([32, 256, 512, 2048])),
        exact_chunks=draw(st.booleans()),
    )


@st.composite
def helpers(draw: st.DrawFn, at_most: int = 3) -> list[HelperSpec]:
    count = draw(st.integers(1, at_most))
    return [
        HelperSpec(
            name,
            name,
            draw(speeds),
            draw(links),
            loaded=draw(st.booleans()),
            load_s=draw(st.sampled_from([0.5, 10.0])),
            room_bytes=draw(st.just(1 << 62) | st.integers(0, 10**11)),
            running=draw(st.integers(0, 3)),
            modelled=draw(st.booleans()),
        )
        for name in "abc"[:count]
    ]


@st.composite
def holders(draw: st.DrawFn, layers: int) -> list[HelperSpec]:
    """Machines of which most have only some layers."""
    found = []
    for machine in draw(helpers()):
        first = draw(st.just(0) | st.integers(0, layers - 1))
        held = draw(st.none() | st.just((first, draw(st.integers(first + 1, layers)))))
        found.append(replace(machine, held=held, loaded=machine.loaded or held is not None))
    return found


@examples(60)
@given(prompts(), speeds, helpers())
def test_the_chosen_way_is_never_slower_and_every_way_is_valid(
    prompt: PrefillSize, speed: PrefillSpeed, others: list[HelperSpec]
) -> None:
    home = replace(HOME, speed=speed)
    found = options(prompt, home, others)
    choice = choose(found)
    local = of(found, "local")
    assert local.predicted_s == pytest.approx(speed.total(1.0, prompt.new, prompt.chunk))
    if choice.best is not local:
        assert choice.best.predicted_s <= ADVANTAGE * local.predicted_s
        assert not choice.best.code
    assert len(choice.rejected) == len(found) - 1
    for option in found:
        assert sum(seconds for _, seconds in option.steps) == pytest.approx(option.predicted_s)
        if option.split is None:
            assert option.kind == "local" or option.code
            continue
        checked(option.split)
        assert option.split.helpers == len(option.helpers) == len(option.names)
        assert (option.split.tokens, option.split.cached) == (prompt.tokens, prompt.cached)
        assert option.split.layers == prompt.shape.layers
        assert (option.kind == "whole") == (not option.split.layers_of(option.split.helpers))
        assert not prompt.exact_chunks or option.split.chunk == prompt.chunk
    for rejected in choice.rejected:
        assert rejected.code
        assert rejected.reason.endswith("."), rejected.reason
    prices = [o.predicted_s for o in choice.rejected if o.priced]
    assert prices == sorted(prices)


@examples(60)
@given(prompts(), speeds, helpers())
def test_what_does_not_fit_is_not_offered(
    prompt: PrefillSize, speed: PrefillSpeed, others: list[HelperSpec]
) -> None:
    room = {machine.node_id: machine for machine in others}
    for option in options(prompt, replace(HOME, speed=speed), others):
        if (split := option.split) is None:
            continue
        for rank, node_id in enumerate(option.helpers):
            machine, layers = room[node_id], len(split.layers_of(rank)) / split.layers
            rows = prompt.shape.sizes.token_bytes * split.tokens_of(rank).stop * layers
            weights = 0 if machine.loaded else prompt.shape.weights_bytes * layers
            assert rows + weights <= machine.room_bytes * 1.0001


@examples(100)
@given(prompts(), speeds, st.data())
def test_nobody_is_given_layers_that_it_does_not_have(
    prompt: PrefillSize, speed: PrefillSpeed, data: st.DataObject
) -> None:
    others = data.draw(holders(prompt.shape.layers))
    held = {machine.node_id: machine.held or (0, prompt.shape.layers) for machine in others}
    found = options(prompt, replace(HOME, speed=speed), others)
    for option in found:
        if (split := option.split) is None:
            continue
        checked(split)
        for rank, node_id in enumerate(option.helpers):
            layers, (first, last) = split.layers_of(rank), held[node_id]
            assert first <= layers.start < layers.stop <= last
    assert all(option.reason for option in choose(found).rejected)


@examples(60)
@given(prompts(), speeds, helpers(), st.randoms(use_true_random=False))
def test_equal_questions_have_equal_answers(
    prompt: PrefillSize, speed: PrefillSpeed, others: list[HelperSpec], random: Any
) -> None:
    home, shuffled = replace(HOME, speed=speed), list(others)
    random.shuffle(shuffled)
    assert options(prompt, home, others) == options(prompt, home, shuffled)


@examples(60)
@given(prompts(), speeds, helpers())
def test_one_helper_more_never_makes_it_slower(
    prompt: PrefillSize, speed: PrefillSpeed, others: list[HelperSpec]
) -> None:
    home = replace(HOME, speed=speed)
    usable = [replace(machine, modelled=False) for machine in others]
    fewer, more = (chosen(*some, prompt=prompt, home=home).best for some in (usable[:-1], usable))
    assert more.predicted_s <= fewer.predicted_s * (1 + 1e-9)


@examples(60)
@given(prompts(), speeds, helpers(at_most=2), st.floats(1, 1000), st.floats(0, 1))
def test_a_faster_link_never_makes_it_slower(
    prompt: PrefillSize, speed: PrefillSpeed, others: list[HelperSpec], wider: float, nearer: float
) -> None:
    """But for the grain of the search: cuts are tried near where machines are balanced."""
    home = replace(HOME, speed=speed)

    def cheapest(machines: Sequence[HelperSpec]) -> float:
        return min(o.predicted_s for o in options(prompt, home, machines) if o.priced)

    better = [
        replace(m, link=LinkSpeed(m.link.bytes_per_s * wider, m.link.rtt_s * nearer))
        for m in others
        if m.link
    ]
    assert cheapest(better) <= cheapest(others) * 1.03


@pytest.mark.parametrize("tokens", [1000, 2000, 3333])
@pytest.mark.parametrize("slower", [1.0, 1.3, 2.9])
def test_chunks_are_fitted_to_where_balanced_machines_are_cut(tokens: int, slower: float) -> None:
    """Nobody waits long for the other: with chunks of 256 only, it could be half a chunk."""
    speed = PrefillSpeed(3e-3, 1e-6, 0.08)
    short = replace(PROMPT, tokens=tokens, chunk=256)
    others = [replace(helper("a", 1, LAN), speed=speed.times(slower))]
    split = next(o for o in options(short, replace(HOME, speed=speed), others) if o.kind == "tokens").split
    assert split is not None
    theirs, own = speed.times(slower), speed
    theirs_s = theirs.total(1.0, split.tokens_of(0), split.chunk)
    own_s = own.total(1.0, split.tokens_of(1), split.chunk)
    assert abs(theirs_s - own_s) <= 0.15 * own_s
    assert split.chunk <= 256
    exact = replace(short, exact_chunks=True)
    kept = next(o for o in options(exact, replace(HOME, speed=speed), others) if o.kind == "tokens").split
    assert kept is not None
    assert kept.chunk == 256


@pytest.mark.parametrize("tokens", [1000, 64_000])
@pytest.mark.parametrize("speed", [SPEED, PrefillSpeed(1e-4, 1e-9, 1e-3), PrefillSpeed(1e-2, 1e-6, 1.0)])
def test_planning_is_quick(tokens: int, speed: PrefillSpeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules priced, each in some 20 µs whatever the prompt's length: 8 ms in all."""
    priced: Counter[str] = Counter()
    for way in ("layers", "tokens"):
        original = getattr(schedule.Chain, way)

        def counted(self: Any, *args: Any, way: str = way, original: Any = original) -> Any:
            priced[way] += 1
            return original(self, *args)

        monkeypatch.setattr(schedule.Chain, way, counted)
    others = [
        replace(helper("a", 1, LAN), speed=speed),
        replace(helper("b", 1, LinkSpeed(1e8, 1e-3)), speed=speed.times(0.5)),
        replace(helper("c", 1, LinkSpeed(1.2e8, 1e-3)), speed=speed.times(3)),
    ]
    options(changed(PROMPT, tokens=tokens, layers=64), replace(HOME, speed=speed), others)
    assert priced["layers"] <= 150
    assert priced["tokens"] <= 250


# ---- Refusals --------------------------------------------------------------------------------------------


def test_a_prompt_that_cannot_be_shared_says_why() -> None:
    choice = chosen(helper(), prompt=changed(PROMPT, unshareable="Its layers are not alike."))
    assert choice.best.kind == "local"
    assert why(choice, "a") == ("unshareable", "Its layers are not alike.")


@pytest.mark.parametrize(("new", "shared"), [(limits.SHARE_LEAST_TOKENS - 1, False), (2000, True)])
def test_what_counts_is_what_is_new_of_a_prompt(new: int, shared: bool) -> None:
    prompt = replace(PROMPT, tokens=8192, cached=8192 - new)
    choice = chosen(helper(link=LinkSpeed(1e10, 1e-4)), prompt=prompt)
    assert (choice.best.kind != "local") is shared
    if not shared:
        assert why(choice, "a")[0] == "short"


@pytest.mark.parametrize("code", ["private", "unusable", "other_files", "dtype", "draining", "failed"])
def test_what_the_caller_knows_of_a_machine_rules_it_out(code: Any) -> None:
    choice = chosen(helper("studio", refusal=Refusal(code, "studio is out.")))
    assert choice.best.kind == "local"
    assert why(choice, "studio") == (code, "studio is out.")
    assert "studio" in why(choice, "studio")[1]


def test_attack_who_tells_figures_by_which_nothing_can_be_planned_is_left_out_alone() -> None:
    hostile = replace(helper("b"), speed=PrefillSpeed(token_s=1e200, context_s=1e-6))
    with pytest.raises(OverflowError):
        options(PROMPT, HOME, [hostile])
    choice = plan_prefill(PROMPT, HOME, [helper("a"), hostile])
    assert choice.best == chosen(helper("a")).best
    assert why(choice, "b") == ("unusable", "b tells figures by which nothing can be planned.")


def test_a_machine_that_nobody_has_a_way_to_is_no_help() -> None:
    choice = chosen(helper(link=LinkSpeed(0.0)))
    assert choice.best.kind == "local"
    assert why(choice, "a", "tokens")[0] == "slow_link"


def test_a_busy_helper_gets_less_and_a_very_busy_one_nothing() -> None:
    idle, busy = (of(options(PROMPT, HOME, [helper(running=n)]), "tokens", "a") for n in (0, 1))
    assert idle.split is not None
    assert busy.split is not None
    assert busy.split.cuts[1] < idle.split.cuts[1]
    assert busy.predicted_s > idle.predicted_s
    assert why(chosen(helper(running=BUSY_FROM)), "a")[0] == "busy"


def test_what_keeps_this_machine_busy_makes_help_worth_more() -> None:
    slow = LinkSpeed(4e8, 1e-3)
    idle, busy = (chosen(helper(faster=0.3, link=slow), home=replace(HOME, running=n)).best for n in (0, 2))
    assert idle.split is not None
    assert busy.split is not None
    assert busy.split.cuts[1] > idle.split.cuts[1]


def test_nobody_computes_for_long_at_a_time() -> None:
    """Chunks through layers: a second of an idle machine, a quarter of one that has other work."""
    for running, bound_s in ((0, 1.0), (1, 0.25)):
        others = [helper(running=running)]
        (layers,) = [o for o in options(PROMPT, HOME, others) if o.kind == "layers"]
        assert layers.split is not None
        share = len(layers.split.layers_of(0)) / 32
        assert SPEED.times(1 + running).seconds(share, 8192, layers.split.chunk) <= bound_s


def test_a_machine_without_room_says_how_much_it_has() -> None:
    code, sentence = why(chosen(helper("mini", room_bytes=GIB // 100)), "mini")
    assert code == "no_room"
    assert "0.0 GB" in sentence


def test_a_slow_link_says_what_would_do_and_that_does() -> None:
    choice = chosen(helper(link=LinkSpeed(5e6, 1e-3)))
    assert choice.best.kind == "local"
    code, sentence = why(choice, "a", "tokens")
    assert code == "slow_link"
    found = re.search(r"carries ([\d.]+) MB/s; ([\d.]+) MB/s would do", sentence)
    assert found is not None, sentence
    assert float(found[1]) == 5
    assert chosen(helper(link=LinkSpeed(1.02e6 * float(found[2]), 1e-3))).best.kind != "local"


@given(st.floats(1e3, 2e7), st.floats(1e-3, 1e-2))
def test_the_rate_that_would_do_is_within_a_hundredth_and_found_in_few_steps(
    bytes_per_s: float, token_s: float
) -> None:
    slow = helper(link=LinkSpeed(bytes_per_s, 1e-3))
    home = replace(HOME, speed=PrefillSpeed(token_s))
    target_s = ADVANTAGE * home.speed.total(1.0, PROMPT.new, PROMPT.chunk)
    wide = of(options(PROMPT, home, [replace(slow, link=LinkSpeed(1e15, 1e-3))]), "tokens", "a")
    assert wide.split is not None
    split, priced = wide.split, list[float]()

    def total_s(rate: float) -> float:
        link = LinkSpeed(rate, 1e-3)
        return schedule.timeline(PROMPT, split, [replace(slow, link=link)], home.speed).total_s

    if not total_s(1e15) <= target_s < total_s(bytes_per_s):
        return

    def counted(*asked: Any) -> Any:
        priced.append(asked[2][0].link.bytes_per_s)
        return schedule.timeline(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "timeline", counted)
        found = choice._least_rate(PROMPT, split, slow, home.speed, target_s)
    assert total_s(found) <= target_s < total_s(found / 1.011)
    assert len(priced) <= 16


def test_no_more_machines_take_part_than_a_split_may_have() -> None:
    """All are as fast, and each further one would make it faster."""
    several = [helper(name) for name in "abcdef"]
    best = chosen(*several).best
    assert len(best.helpers) + 1 == limits.SHARE_MACHINES
    assert max(len(option.helpers) for option in options(PROMPT, HOME, several)) + 1 == limits.SHARE_MACHINES


def test_a_far_link_says_how_far() -> None:
    choice = chosen(helper(link=LinkSpeed(1e12, 2.0)))
    assert choice.best.kind == "local"
    assert why(choice, "a", "tokens")[0] == "slow_link"
    assert "2000 ms" in why(choice, "a", "tokens")[1]


def test_a_cold_helper_is_not_waited_for_but_told_to_load() -> None:
    choice = chosen(helper("studio", loaded=False, load_s=9.0))
    assert choice.best.kind == "local"
    option = of(choice.rejected, "tokens", "studio")
    assert option.code == "cold"
    assert dict(option.steps)["loaded"] == 9.0
    assert "studio would have to load" in option.reason
    assert choice.warm == (Load("studio"),)


def test_a_helper_loads_some_layers_where_the_prefix_cache_would_leave_too_little_beside_all() -> None:
    """The prompt's keys and values take 1 GiB, and the prefix cache a quarter of what the model leaves."""
    prompt = replace(PROMPT, exact_chunks=False)
    for room, whole in ((5.0 + 1 / 0.75, True), (5.0 + 0.99 / 0.75, False)):
        cold = helper(loaded=False, load_s=9.0, room_bytes=int(room * GIB) + 1)
        option = of(options(prompt, HOME, [cold]), "layers", "a")
        (load,) = option.cold
        assert (load.last == 0) is whole


def test_a_cold_helper_that_would_be_no_use_is_left_alone() -> None:
    assert chosen(helper(loaded=False, load_s=9.0, link=LinkSpeed(1e6))).warm == ()
    # With a warm one at hand it has to be better than that.
    slow = helper("slow", faster=0.05, loaded=False, load_s=9.0)
    assert chosen(helper("warm"), slow).warm == ()
    fast = helper("fast", faster=4, loaded=False, load_s=9.0)
    assert chosen(helper("warm"), fast).warm == (Load("fast"),)


# ---- Some layers only ------------------------------------------------------------------------------------


def test_a_machine_with_some_layers_computes_at_most_those() -> None:
    prompt = replace(PROMPT, tokens=60_000)
    for last, expected in ((4, 4), (15, 15), (31, 16)):
        found = options(prompt, HOME, [helper(held=(0, last))])
        assert [option.kind for option in found] == ["local", "layers"]
        assert found[1].split is not None
        assert found[1].split.cuts[1] == pytest.approx(expected, abs=1)
        assert found[1].split.cuts[1] <= last


def test_layers_that_others_have_to_come_before_help_only_with_those() -> None:
    prompt = replace(PROMPT, tokens=60_000)
    late = helper("late", held=(12, 32))
    choice = chosen(late, prompt=prompt)
    assert choice.best.kind == "local"
    assert why(choice, "late") == (
        "part",
        "late has layers 12-31 only: others would have to compute what is before.",
    )
    # Its link is the slowest, and still it comes last.
    early = helper("early", held=(0, 14), link=LinkSpeed(2e9, 3e-4))
    best = chosen(late, early, prompt=prompt).best
    assert (best.kind, best.helpers) == ("layers", ("early", "late"))
    assert best.split is not None
    assert 12 <= best.split.cuts[1] <= 14
    # A machine that has all of them fills any gap; a gap that nobody fills is none's.
    assert chosen(late, helper("all"), prompt=prompt).best.helpers == ("all", "late")
    apart = chosen(late, helper("early", held=(0, 11)), prompt=prompt)
    assert len(apart.best.helpers) == 1


def test_machines_with_half_each_do_all_of_it_for_a_slow_one() -> None:
    halves = [helper("a", 50, held=(0, 16)), helper("b", 50, held=(16, 32))]
    best = chosen(*halves, home=replace(HOME, speed=SPEED.times(4))).best
    assert (best.kind, best.helpers) == ("whole", ("a", "b"))
    assert best.split is not None
    assert best.split.cuts == (0, 16, 32, 32)


def test_what_a_cold_machine_should_load_is_what_it_has_room_for() -> None:
    rows = PROMPT.shape.sizes.token_bytes * PROMPT.tokens
    cold = helper("mini", loaded=False, load_s=5.0)
    for room, most in ((rows + 5 * GIB, 0), (5 * GIB, 26), (3 * GIB, 15), (GIB, 5)):
        choice = chosen(replace(cold, room_bytes=room))
        assert choice.best.kind == "local"
        (load,) = choice.warm
        assert (load.node_id, load.first) == ("mini", 0)
        assert (load.last == 0) == (most == 0)
        assert load.last <= most
        weights = PROMPT.shape.weights_bytes * (load.last or 32) / 32
        assert weights + rows * (load.last or 32) / 32 <= room
        if load.last:
            reason = of(choice.rejected, "layers", "mini").reason
            assert f"would have to load layers 0-{load.last - 1} first (5.0 s)" in reason


def test_an_embedding_takes_room_on_whoever_begins() -> None:
    cold = helper("mini", loaded=False, load_s=5.0, room_bytes=3 * GIB)
    (bare,), (ends,) = (
        chosen(cold, prompt=changed(PROMPT, outside_bytes=size)).warm for size in (0, 2 * GIB)
    )
    # A gibibyte is left, and each layer takes less.
    assert 0 < ends.last < bare.last
    assert chosen(cold, prompt=changed(PROMPT, outside_bytes=3 * GIB)).warm == ()


# ---- Clearly faster, and steady --------------------------------------------------------------------------


def priced(kind: Any, seconds: float, *helpers: str, **fields: Any) -> PrefillOption:
    split = of(options(PROMPT, HOME, [helper()]), "tokens", "a").split if kind != "local" else None
    return PrefillOption(kind, helpers, helpers, split, seconds, (("computed", seconds),), **fields)


def test_a_tenth_is_asked_of_another_machine() -> None:
    local = priced("local", 10.0)
    assert choose([local, priced("tokens", 8.99, "a")]).best.kind == "tokens"
    choice = choose([local, priced("tokens", 9.01, "a")])
    assert choice.best is local
    assert why(choice, "a", "tokens") == (
        "margin",
        "10 % faster than staying here, too little to ask another machine: 10 % would do.",
    )


def test_the_first_token_is_in_the_price_of_every_way() -> None:
    """It takes the same time however the prompt was prefilled, so less is saved of the whole."""
    before = [o for o in options(PROMPT, HOME, [helper("studio")]) if o.priced]
    after = [o for o in options(PROMPT, replace(HOME, first_token_s=0.5), [helper("studio")]) if o.priced]
    assert len(before) > 1
    for was, now in zip(before, after, strict=True):
        assert now.predicted_s == pytest.approx(was.predicted_s + 0.5)
        assert now.predicted_s == pytest.approx(sum(seconds for _, seconds in now.steps))
        assert now.steps[-1] == ("first token", 0.5)


def test_speeds_that_nobody_measured_have_to_promise_more() -> None:
    local = priced("local", 10.0)
    choice = choose([local, priced("tokens", 7.0, "a", modelled=True)])
    assert choice.best is local
    assert why(choice, "a", "tokens")[0] == "unmeasured"
    assert choose([local, priced("tokens", 9 / CAUTION - 0.1, "a", modelled=True)]).best.kind == "tokens"


def test_speeds_measured_beside_other_work_have_to_promise_a_quarter_instead_of_a_tenth() -> None:
    local = priced("local", 10.0)
    assert pytest.approx(0.75) == ADVANTAGE / DOUBT
    choice = choose([local, priced("tokens", 7.6, "a", doubtful=True)])
    assert choice.best is local
    assert why(choice, "a", "tokens") == (
        "doubtful",
        "24 % faster, by speeds that are in doubt.",
    )
    assert choose([local, priced("tokens", 7.6, "a")]).best.kind == "tokens"
    assert choose([local, priced("tokens", 7.4, "a", doubtful=True)]).best.kind == "tokens"


@pytest.mark.parametrize("doubted", ["home", "helper"])
def test_either_machines_doubtful_speed_makes_their_plans_doubtful(doubted: str) -> None:
    home = replace(HOME, doubtful=doubted == "home")
    found = options(PROMPT, home, [helper("a", doubtful=doubted == "helper"), helper("b")])
    for option in found:
        involved = doubted == "home" or "a" in option.helpers
        assert option.doubtful is (involved and option.kind != "local")
    # Two equal machines save far more than a quarter, so they still share.
    assert choose(found).best.kind != "local"


def test_two_ways_that_are_alike_do_not_take_turns() -> None:
    local, layers = priced("local", 10.0), priced("layers", 5.0, "a")
    close, better = priced("tokens", 4.6, "a"), priced("tokens", 4.4, "a")
    assert choose([local, layers, close]).best is close
    choice = choose([local, layers, close], previous=layers)
    assert choice.best is layers
    assert why(choice, "a", "tokens")[0] == "kept"
    assert choose([local, layers, better], previous=layers).best is better


def test_what_was_chosen_before_is_left_when_it_is_slower_than_staying() -> None:
    before = priced("tokens", 5.0, "a")
    assert choose([priced("local", 10.0), priced("tokens", 9.5, "a")], before).best.kind == "tokens"
    assert choose([priced("local", 10.0), priced("tokens", 10.1, "a")], before).best.kind == "local"
    assert HYSTERESIS == ADVANTAGE, "else it could be chosen although it is slower"


# ---- Keys and values in 8 bits ---------------------------------------------------------------------------

NARROW = replace(PROMPT, shape=replace(SHAPE, wire_token_bytes=131072 * 68 // 128, wire_bits=8))
# Bytes per second in which a helper of ``SPEED`` makes rows.
ROWS = 131072 / SPEED.token_s


def test_rows_are_sent_in_fewer_bits_where_a_link_is_what_is_waited_for() -> None:
    slow = helper(link=LinkSpeed(0.4 * ROWS, 1e-3), narrows=True)
    best = chosen(slow, prompt=NARROW).best
    assert (best.wire_bits, best.exact, best.kind != "local") == (8, False, True)
    plain = chosen(slow).best
    assert best.predicted_s <= ADVANTAGE * plain.predicted_s
    assert f"{choice.described(best)}".endswith("with a, rows in 8 bits")
    # It is priced by the bytes that travel.
    assert best.split is not None
    line = schedule.timeline(replace(NARROW, sent_bits=8), best.split, [slow], HOME.speed)
    assert line.total_s == best.predicted_s


@pytest.mark.parametrize("bytes_per_s", [1.1e9, 5e9])
def test_over_a_fast_link_nothing_is_rounded(bytes_per_s: float) -> None:
    found = chosen(helper(link=LinkSpeed(bytes_per_s, 3e-4), narrows=True), prompt=NARROW)
    assert (found.best.wire_bits, found.best.exact, found.best.kind) == (0, True, "tokens")
    narrow = [option for option in found.rejected if option.wire_bits]
    assert {option.kind for option in narrow} == {"tokens", "layers", "whole"}
    assert all(option.code in ("slower", "margin") for option in narrow)
    told = [option.reason for option in narrow if option.code == "margin"]
    assert all(reason.endswith("too little to round for: 10 % would do.") for reason in told)


@pytest.mark.parametrize(
    "prompt",
    [
        replace(NARROW, shape=replace(NARROW.shape, wire_bits=0)),
        # Held in no more bits than they would be sent in.
        replace(NARROW, shape=replace(NARROW.shape, sizes=StateSizes(NARROW.shape.wire_token_bytes))),
        replace(NARROW, shape=replace(NARROW.shape, wire_token_bytes=0)),
    ],
    ids=["not asked for", "held so", "cannot"],
)
def test_rows_are_not_rounded_where_nothing_is_asked_or_gained(prompt: PrefillSize) -> None:
    found = options(prompt, HOME, [helper(link=LinkSpeed(5e7, 1e-3), narrows=True)])
    assert {option.wire_bits for option in found} == {0}


def test_an_older_helper_sends_rows_as_they_are_and_so_do_those_beside_it() -> None:
    link = LinkSpeed(0.4 * ROWS, 1e-3)
    found = options(NARROW, HOME, [helper("older", link=link), helper("newer", link=link, narrows=True)])
    assert {option.helpers for option in found if option.wire_bits} == {("newer",)}


@pytest.mark.parametrize(
    ("link", "rounds"),
    [
        ("Wi-Fi, next room, or a VPN", True),
        ("Wi-Fi, same room", True),
        ("1 Gbit/s Ethernet", True),
        ("10 Gbit/s Ethernet", False),
    ],
)
def test_modelled_a_spark_behind_a_slow_link_sends_a_studio_8_bits(link: str, rounds: bool) -> None:
    for tokens in (4_000, 16_000):
        plain, allowed = (
            pairs.together(pairs.STUDIO, pairs.SPARK, link, "qwen3-8b", tokens, bits) for bits in (0, 8)
        )
        assert plain.wire_bits == 0
        assert bool(allowed.wire_bits) is rounds
        assert allowed.predicted_s <= (ADVANTAGE if rounds else 1.0) * plain.predicted_s


def test_modelled_two_studios_on_thunderbolt_send_rows_as_they_are() -> None:
    link = "Thunderbolt 4 or 5, bridge"
    assert pairs.together(pairs.STUDIO, pairs.STUDIO, link, "qwen3-8b", 16_000, 8).wire_bits == 0
