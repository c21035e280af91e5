"""The planner of requests and of people: every way has a price, and the cheapest machine gets the request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed

from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.limits import GIB
from fleetd.plan import what_if
from fleetd.plan.beginnings import Beginning
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.refusals import Refusal
from fleetd.plan.route import PULL_S, Candidate, RouteQuestion, price
from fleetd.plan.ways import HELPED, Home, Way, Ways, plan

ASK = RouteQuestion("m", prompt_tokens=8001, max_tokens=100)
TOK_S = 400.0
LAN = LinkSpeed(1.1e9, 3e-4)


SHAPE = ModelShape(
    weights_bytes=4 * GIB,
    context_tokens=32_000,
    layers=32,
    sizes=StateSizes(131072),
    hidden_bytes=8192,
)


def helper(node_id: str, faster: float = 1.0, **fields: Any) -> HelperSpec:
    return HelperSpec(node_id, node_id or "this", PrefillSpeed.measured(TOK_S * faster), LAN, **fields)


def home(node_id: str, *helpers: HelperSpec, faster: float = 1.0, cached: int = 0, **fields: Any) -> Home:
    """A machine with the model loaded that could ask these helpers."""
    candidate = Candidate(
        node_id,
        node_id or "this",
        chip="Apple M2 Max",
        accelerator="metal",
        memory_bytes=64 * GIB,
        available_bytes=40 * GIB,
        max_streams=4,
        state="loaded",
        digest="d",
        shape=SHAPE,
        speed=MeasuredSpeed(prefill_tok_s=TOK_S * faster, decode_tok_s=40.0),
        needed_bytes=6 * GIB,
        cached_tokens=cached,
    )
    candidate = changed(candidate, **fields)
    spec = HelperSpec(
        node_id,
        candidate.name,
        PrefillSpeed.measured(TOK_S * faster),
        running=candidate.at_once,
        first_token_s=1 / 40,
    )
    prompt = PrefillSize(SHAPE, 8000, cached, 256)
    return Home(candidate, prompt, spec, helpers)


def absent(node_id: str, **fields: Any) -> Home:
    return Home(changed(Candidate(node_id, node_id or "this"), **fields))


def of(ways: Ways, node_id: str) -> Way:
    """The first way on a machine."""
    return next(way for way in (ways.chosen, *ways.others) if way is not None and way.node_id == node_id)


def placed(ways: Ways) -> tuple[str, str]:
    assert ways.chosen is not None
    return ways.chosen.node_id, ways.chosen.prefill.kind if ways.chosen.prefill is not None else "fetch"


def test_a_machine_with_helpers_of_its_own_is_priced_with_them() -> None:
    """Alone it is slower than this one; with the help that it would get it is sooner."""
    slow, strong = home("a", faster=0.6), home("a", helper("b", 2.0), faster=0.6)
    assert placed(plan(ASK, [home(""), slow])) == ("", "local")
    ways = plan(ASK, [home(""), strong])
    node_id, kind = placed(ways)
    assert node_id == "a"
    assert kind in ("layers", "tokens", "whole")
    assert ways.chosen is not None
    assert ways.chosen.prefill is not None
    assert ways.chosen.prefill.names == ("b",)


def test_what_helps_this_machine_keeps_the_request_here() -> None:
    assert placed(plan(ASK, [home(""), home("a", faster=1.5)])) == ("a", "local")
    node_id, kind = placed(plan(ASK, [home("", helper("b")), home("a", faster=1.5)]))
    assert (node_id, kind != "local") == ("", True)


def test_a_first_token_comes_after_the_queue_the_load_and_the_way() -> None:
    ways = plan(ASK, [home("a", state="installed", load_s=7.0, waiting=2, running=5, rtt_s=0.25)])
    way = ways.chosen
    assert way is not None
    steps = dict(way.steps)
    assert (steps["loaded"], steps[step_names.NETWORK]) == (7.0, 0.25)
    assert steps["queued"] > 0
    assert way.first_token_s == pytest.approx(sum(steps.values()))
    assert steps["computed"] == pytest.approx(20.0 * 1.9)


def test_a_load_decides_between_machines() -> None:
    cold = home("", state="installed", load_s=60.0)
    assert placed(plan(ASK, [cold, home("a", faster=0.5)]))[0] == "a"
    assert (
        placed(plan(ASK, [replace(cold, candidate=replace(cold.candidate, load_s=2.0)), home("a")]))[0] == ""
    )


def test_a_load_that_a_machine_makes_up_is_bounded() -> None:
    assert price(ASK, home("a", state="installed", load_s=1e12).candidate).load_s <= 3600.0


def test_this_machine_shows_all_its_ways_and_another_its_best() -> None:
    ways = plan(ASK, [home("", helper("a")), home("a", helper(""))])
    found = [ways.chosen, *ways.others]
    kinds = [way.prefill.kind for way in found if way is not None and way.prefill and way.node_id == ""]
    assert {"local", "layers", "tokens"} <= set(kinds)
    assert [way.node_id for way in found if way is not None].count("a") == 1
    assert all(way.reason and way.code for way in ways.others)
    assert ways.chosen is not None
    assert (ways.chosen.code, ways.chosen.reason) == ("", "")


@pytest.mark.parametrize(
    ("other", "code", "words"),
    [
        (home("a", faster=0.2), "slower", "longer than staying here."),
        (home("a", faster=1.05), "margin", "too little to ask another machine: 10 % would do."),
        (home("a", faster=9.0, left_out=True), "failed", "a failed a short while ago"),
        (
            home("a", faster=9.0, state="installed", kv_bytes=2 * GIB, kv_room_bytes=GIB // 2),
            "no_room",
            "a would have 0.5 GB for keys and values beside the model; the prompt needs 2.1 GB.",
        ),
    ],
    ids=["slower", "margin", "failed", "no room"],
)
def test_every_other_machine_has_a_reason(other: Home, code: str, words: str) -> None:
    ways = plan(ASK, [home(""), other])
    assert placed(ways)[0] == ""
    assert (of(ways, "a").code, words in of(ways, "a").reason) == (code, True)


def test_a_machine_that_would_fetch_the_model_is_the_last() -> None:
    ways = plan(ASK, [absent("", can_pull=True), home("a")])
    assert placed(ways)[0] == "a"
    assert (of(ways, "").code, of(ways, "").first_token_s) == ("absent", PULL_S)
    assert of(ways, "").steps == (("pulled", PULL_S),)
    assert placed(plan(ASK, [absent("", can_pull=True), absent("a")])) == ("", "fetch")


def test_nowhere_has_a_reason_for_each_machine() -> None:
    private = Refusal("private", "b may not see prompts.")
    ways = plan(ASK, [absent(""), absent("a"), home("b", refusal=private)])
    assert (ways.chosen, ways.others) == (None, ())
    assert {each.node_id: each.refusal.code for each in ways.rejected} == {
        "": "absent",
        "a": "absent",
        "b": "private",
    }


def test_a_prompt_over_the_context_is_refused_once_its_tokens_are_counted() -> None:
    long = replace(ASK, prompt_tokens=40_000)
    assert plan(long, [home("")]).chosen is not None, "an estimate, which the engine corrects"
    ways = plan(replace(long, counted=True), [home(""), home("a")])
    assert ways.chosen is None
    assert {each.refusal.code for each in ways.rejected} == {"context"}


def test_a_machine_that_was_never_measured_is_as_fast_as_its_twin_with_its_helpers_too() -> None:
    new = home("b", prefill_tok_s=0.0, decode_tok_s=0.0)
    assert new.spec is not None
    new = replace(new, spec=replace(new.spec, modelled=True, speed=PrefillSpeed.measured(1e9)))
    ways = plan(ASK, [home("a"), new])
    assert of(ways, "b").first_token_s == pytest.approx(of(ways, "a").first_token_s, rel=0.01)


def test_only_the_machines_in_front_are_priced_with_help() -> None:
    """Each price with helpers takes milliseconds, and a fleet may be large."""
    many = [home(f"n{n}", helper("x", 9.0), faster=1.0 - n / 100) for n in range(HELPED + 2)]
    ways = plan(ASK, many)
    kinds = [of(ways, each.candidate.node_id).prefill for each in many]
    assert [option is not None and option.kind != "local" for option in kinds] == [True] * HELPED + [
        False
    ] * 2


def test_the_order_of_the_machines_changes_nothing() -> None:
    fleet = [home("", helper("a")), home("a", helper(""), faster=1.1), home("b", faster=0.9), absent("c")]
    assert plan(ASK, fleet) == plan(ASK, fleet[::-1])


def disk(tokens: int, seconds: float) -> Beginning:
    return Beginning(tokens, seconds, restored=tokens)


def peer(tokens: int, seconds: float, name: str = "a") -> Beginning:
    return Beginning(tokens, seconds, fetched=tokens, name=name)


def test_reading_from_here_fetching_routing_there_and_computing_are_one_comparison() -> None:
    """Another machine has 7,900 of 8,000 tokens on its disk: what it costs to bring them here decides."""
    there = replace(home("a"), beginnings=(disk(7900, 0.3),))

    def chosen(*beginnings: Beginning) -> Way:
        found = plan(ASK, [replace(home(""), beginnings=beginnings), there]).chosen
        assert found is not None
        return found

    # Nothing comes here: the prompt goes there.
    gone = chosen()
    assert (gone.node_id, gone.begun) == ("a", disk(7900, 0.3))
    assert (step_names.RESTORED, 0.3) in gone.steps
    # It comes over a fast link, or over a slow one.
    assert (chosen(peer(7900, 0.5)).node_id, chosen(peer(7900, 0.5)).begun) == ("", peer(7900, 0.5))
    assert (step_names.FETCHED, 0.5) in chosen(peer(7900, 0.5)).steps
    assert chosen(peer(7900, 9.0)).node_id == "a"
    # This machine's own disk is preferred to either.
    assert chosen(peer(7900, 0.5), disk(7900, 0.2)).begun == disk(7900, 0.2)


def way_here(*beginnings: Beginning, helpers: tuple[HelperSpec, ...] = (), **fields: Any) -> Way:
    found = plan(ASK, [replace(home("", *helpers, **fields), beginnings=beginnings)]).chosen
    assert found is not None
    return found


def test_of_several_beginnings_the_one_is_brought_after_which_the_prompt_is_read_first() -> None:
    """A token takes 2.5 ms: 1 + 10 s, 5 + 5 s and 9 + 2.5 s."""
    few, some, many = disk(4000, 1.0), disk(6000, 5.0), disk(7000, 9.0)
    for beginnings in ((few, some, many), (many, some, few)):
        assert way_here(*beginnings).begun == some
    # What is brought is not computed: 2000 of 8000 tokens are, and the first one of the answer.
    found = way_here(some)
    assert found.cached_tokens == 6000
    assert found.prefill is not None
    assert found.prefill.predicted_s == pytest.approx(2000 / TOK_S + 1 / 40)
    # More than the prompt is as good as all of it.
    more = way_here(disk(9000, 1.0)).prefill
    assert more is not None
    assert more.predicted_s == pytest.approx(1 / 40)


def test_what_another_request_still_reads_is_brought_if_that_is_sooner() -> None:
    """To wait for 2000 tokens takes as long as to read them: 5 s."""
    awaited = {"cached": 4000, "awaited_tokens": 2000}
    assert way_here(disk(4000, 4.9), **awaited).begun == disk(4000, 4.9)
    assert way_here(disk(4000, 5.1), **awaited).begun is None
    assert way_here(disk(4000, 0.1), cached=4000).begun is None


def test_a_beginning_that_comes_sooner_than_helpers_compute_it_is_brought_beside_them() -> None:
    found = way_here(peer(7900, 0.5), helpers=(helper("a", 8.0),))
    assert (found.begun, found.declined) == (peer(7900, 0.5), False)


def test_the_time_alone_is_that_of_this_machine_without_helpers() -> None:
    ways = plan(ASK, [home("", helper("a", 8.0)), home("b")])
    assert ways.chosen is not None
    assert not ways.chosen.alone
    assert ways.alone_s == pytest.approx(8000 / TOK_S + 1 / 40)
    assert plan(ASK, [home("a"), home("b")]).alone_s is None
    assert plan(ASK, [home("")]).alone_s == ways.alone_s


def test_what_a_warm_fleet_would_take_is_said_without_its_loads() -> None:
    """Before people buy a machine: all loads are done, nobody waits, and the best of all ways counts."""
    cold = helper("a", 8.0, loaded=False, load_s=1.5)
    ways = plan(ASK, [home("", cold), home("b", faster=0.1, rtt_s=0.5), absent("c")])
    every = what_if.all_ways(ways)
    assert {way.node_id for way in every} == {"", "b"}
    best, alone = what_if.soonest(every), what_if.alone(ways)
    assert best is not None
    assert alone is not None
    assert (best.node_id, best.prefill.kind != "local") == ("", True)  # type: ignore[union-attr]
    assert what_if.warm_s(best) == pytest.approx(best.prefill.predicted_s - 1.5)  # type: ignore[union-attr]
    assert what_if.warm_s(alone) == pytest.approx(8000 / TOK_S + 1 / 40)
    assert what_if.warm_s(of(ways, "b")) == pytest.approx(80_000 / TOK_S + 1 / 40 + 0.5)
    assert what_if.soonest([]) is None
    assert what_if.alone(plan(ASK, [home("b")])) is None
    assert what_if.all_ways(plan(ASK, [])) == []
    assert what_if.lengths(4096) == [1024, 2048]


def test_a_machine_that_is_not_priced_with_its_helpers_reads_alone() -> None:
    fleet = [home(""), *(home(str(n), helper("z", 8.0), faster=1 + n / 10) for n in range(HELPED + 1))]
    # The slowest of them alone; its answer takes 2.5 s.
    last = of(plan(ASK, fleet), "0")
    assert last.prefill is not None
    assert (last.prefill.kind, last.prefill.predicted_s) == ("local", pytest.approx(8001 / TOK_S))
    assert last.steps[-1] == (step_names.COMPUTED, last.prefill.predicted_s)
    assert last.price.total_s == pytest.approx(8001 / TOK_S + 2.5)


def test_an_answer_s_first_token_is_decoded_once() -> None:
    """It is a part of the time to the first token, and of the answer's; the whole takes it once."""
    chosen = plan(ASK, [home("", helper("a", 8.0))]).chosen
    assert chosen is not None
    assert chosen.prefill is not None
    assert chosen.price.prefill_s == pytest.approx(chosen.prefill.predicted_s - 1 / 40)
    assert chosen.price.total_s == pytest.approx(chosen.price.prefill_s + 2.5)


@pytest.mark.parametrize(
    ("fleet", "node_id", "code", "reason"),
    [
        # 22.5 s here, of which the answer takes 2.5; 12.5 s on a machine that reads twice as fast.
        ([home(""), home("a", faster=2.0)], "", "slower", "The answer would take 80 % longer than on a."),
        # 21.5 s: a gain of 4.4 %.
        (
            [home(""), home("a", faster=20 / 19)],
            "a",
            "margin",
            "The answer would take 4 % less, too little to ask another machine: 10 % would do.",
        ),
        (
            [home(""), home("a", faster=19 / 20, session=True)],
            "",
            "margin",
            "The answer would take 4 % less, too little to leave a, which has the session: 10 % would do.",
        ),
        (
            [home("", session=True), home("a", faster=20 / 19)],
            "a",
            "margin",
            "The answer would take 4 % less, too little to leave this machine, which has the session: "
            "10 % would do.",
        ),
    ],
)
def test_a_way_that_was_not_taken_says_by_how_much(
    fleet: list[Home], node_id: str, code: str, reason: str
) -> None:
    passed = of(plan(ASK, fleet), node_id)
    assert (passed.code, passed.reason) == (code, reason)


def test_the_ways_that_were_not_taken_come_in_the_order_of_their_prices() -> None:
    fleet = [home("", helper("z", room_bytes=1)), *(home(n, faster=f) for n, f in (("a", 0.4), ("b", 0.8)))]
    assert [(way.node_id, way.first_token_s is None) for way in plan(ASK, fleet).others] == [
        ("b", False),
        ("a", False),
        ("", True),
    ]


def test_what_costs_more_than_computing_is_not_brought() -> None:
    tokens_s = 800 / TOK_S
    assert plan(ASK, [replace(home(""), beginnings=(disk(800, tokens_s + 0.1),))]).chosen.begun is None  # type: ignore[union-attr]
    # Another machine must save a tenth.
    nearly = peer(800, 0.95 * tokens_s)
    assert plan(ASK, [replace(home(""), beginnings=(nearly,))]).chosen.begun is None  # type: ignore[union-attr]
    enough = peer(800, 0.85 * tokens_s)
    assert plan(ASK, [replace(home(""), beginnings=(enough,))]).chosen.begun == enough  # type: ignore[union-attr]


def test_what_helpers_compute_sooner_than_it_comes_is_not_fetched() -> None:
    slow = peer(7900, 15.0)
    alone = plan(ASK, [replace(home(""), beginnings=(slow,))]).chosen
    assert alone is not None
    assert alone.begun == slow
    helped = plan(ASK, [replace(home("", helper("a", 8.0)), beginnings=(slow,))]).chosen
    assert helped is not None
    assert helped.declined
    assert (helped.begun, helped.prefill.kind != "local") == (None, True)  # type: ignore[union-attr]


def test_people_are_told_which_machine_a_prompt_is_fetched_from() -> None:
    there = replace(home("a"), beginnings=(disk(7900, 0.3),))
    ways = plan(ASK, [replace(home(""), beginnings=(peer(7900, 0.5, "studio"),)), there])
    assert ways.kept_where == (
        "This machine fetches about 7900 tokens of the prompt from studio, which has read them before."
    )
    gone = plan(ASK, [home(""), there])
    assert gone.kept_where == "a has read about 7900 tokens of the prompt before."
    assert plan(ASK, [home(""), home("a")]).kept_where == ""
    assert plan(ASK, []).kept_where == ""
    here = plan(ASK, [home("", cached=4000), home("a", cached=2000)])
    assert here.kept_where == "This machine has read about 4000 tokens of the prompt before."
    # It has read more than any other machine, and does not get the request.
    slow = plan(ASK, [home("", cached=1000), home("a", faster=0.1, cached=4000)])
    assert slow.kept_where == f"a has read about 4000 tokens of the prompt before. {of(slow, 'a').reason}"
    assert of(slow, "a").code == "slower"
    off = plan(ASK, [home(""), home("a", cached=4000, refusal=Refusal("draining", "a is stopping."))])
    assert off.kept_where == "a has read about 4000 tokens of the prompt before. a is stopping."


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 60), st.booleans()), max_size=4),
    st.integers(0, 8000),
)
# All but the last token is kept here: that one is computed anyhow.
@example([(8001, 0.001, True)], 8000)
def test_bringing_a_beginning_never_makes_a_prompt_dearer(
    brought: list[tuple[int, float, bool]], cached: int
) -> None:
    beginnings = tuple(disk(n, s) if own else peer(n, s) for n, s, own in brought)
    with_, without = (
        plan(ASK, [replace(home("", cached=cached), beginnings=each)]).chosen for each in (beginnings, ())
    )
    assert with_ is not None
    assert without is not None
    assert with_.price.total_s <= without.price.total_s + 1e-9
