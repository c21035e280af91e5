"""Routing: the machine that finishes first, never one that must not, and a reason for every other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.limits import GIB
from fleetd.plan.refusals import Refusal
from fleetd.plan.route import (
    ADVANTAGE,
    PULL_S,
    Candidate,
    Ranked,
    RoutePrice,
    RouteQuestion,
    price,
    route,
)

ASK = RouteQuestion("qwen3-8b", prompt_tokens=2000, max_tokens=200)
HELD: dict[str, Any] = {
    "digest": "d1",
    "state": "loaded",
    "shape": ModelShape(weights_bytes=4 * GIB),
    "speed": MeasuredSpeed(400.0, 40.0),
    "needed_bytes": 6 * GIB,
    "roles": ("chat",),
}


def here(**fields: Any) -> Candidate:
    return changed(peer(""), name="this", **fields)


def peer(node_id: str, **fields: Any) -> Candidate:
    base = Candidate(
        node_id=node_id,
        name=node_id,
        chip="Apple M2 Max",
        accelerator="metal",
        cores=12,
        memory_bytes=64 * GIB,
        available_bytes=40 * GIB,
        max_streams=4,
        **HELD,
    )
    return changed(base, **fields)


def speed(factor: float) -> dict[str, float]:
    return {"prefill_tok_s": 400.0 * factor, "decode_tok_s": 40.0 * factor}


def order(ranked: Ranked) -> list[str]:
    return [placement.node_id for placement in ranked.placements]


def why(ranked: Ranked, node_id: str) -> tuple[str, str]:
    (found,) = [r for r in ranked.rejected if r.node_id == node_id]
    return found.refusal.code, found.refusal.sentence


# ---- Who is first ----------------------------------------------------------------------------------------


def test_the_machine_that_finishes_first() -> None:
    assert order(route(ASK, [here(), peer("a", **speed(2)), peer("b", **speed(4))])) == ["b", "a", ""]


def test_prompts_and_answers_weigh_as_they_take() -> None:
    reader = peer("reader", prefill_tok_s=4000.0, decode_tok_s=20.0)
    writer = peer("writer", prefill_tok_s=200.0, decode_tok_s=100.0)
    assert order(route(RouteQuestion("m", 50_000, 50), [reader, writer])) == ["reader", "writer"]
    assert order(route(RouteQuestion("m", 50, 2000), [reader, writer])) == ["writer", "reader"]


@pytest.mark.parametrize(("faster", "first"), [(1.05, ""), (1.10, ""), (1.12, "a"), (2, "a"), (0.5, "")])
def test_this_machine_wins_unless_another_is_clearly_faster(faster: float, first: str) -> None:
    assert order(route(ASK, [peer("a", **speed(faster)), here()]))[0] == first


def test_loaded_beats_loading_beats_installed() -> None:
    machines = [
        peer("installed", state="installed"),
        peer("loading", state="loading"),
        peer("loaded"),
    ]
    ranked = route(ASK, machines)
    assert order(ranked) == ["loaded", "loading", "installed"]
    loads = [p.price.load_s for p in ranked.placements]
    assert loads[0] == 0 < loads[1] < loads[2]


def test_a_queue_is_waited_for() -> None:
    assert order(route(ASK, [peer("a", waiting=20, max_streams=1), peer("b", **speed(0.2))])) == [
        "b",
        "a",
    ]


def test_answers_that_run_already_slow_another_one() -> None:
    assert order(route(ASK, [peer("a", running=3), peer("b", running=1), peer("c")])) == ["c", "b", "a"]


def test_prompts_that_are_prefilled_there_are_waited_for() -> None:
    cost = price(ASK, peer("a", running=1, unread_tokens=1000))
    assert cost.queue_s == pytest.approx(1000 / 400)
    answering, reading = peer("a", running=2), peer("b", running=1, unread_tokens=2000)
    assert order(route(ASK, [reading, answering])) == ["a", "b"]


def test_a_longer_prompt_delays_a_shorter_one_by_no_more_than_its_own_prefill() -> None:
    # The one with the least left goes first.
    assert price(ASK, peer("a", running=1, unread_tokens=50_000)).queue_s == pytest.approx(2000 / 400)
    cached = peer("a", running=3, unread_tokens=50_000, cached_tokens=1900)
    assert price(ASK, cached).queue_s == pytest.approx(3 * 100 / 400)


def test_others_that_go_on_from_the_same_beginning_take_as_long_as_this_one() -> None:
    """Forks of one agent: few new tokens each, behind a long context."""
    fork = peer("a", running=3, unread_tokens=300, cached_tokens=1900, prefill_context_s=1e-5)
    own_s = 100 * (1 / 400 - 256 / 2 * 1e-5) + 100 * 1950 * 1e-5
    assert price(ASK, fork).queue_s == pytest.approx(3 * own_s)
    awaited = price(ASK, replace(fork, running=1, unread_tokens=1900, awaited_tokens=1900))
    assert awaited.queue_s == pytest.approx(1900 * (1 / 400 - 256 / 2 * 1e-5) + 1900**2 / 2 * 1e-5)


def test_a_prompt_waits_for_its_beginning_where_another_request_reads_that() -> None:
    reading = peer("a", running=1, unread_tokens=1500, cached_tokens=1900, awaited_tokens=1900)
    assert price(ASK, reading).queue_s == pytest.approx(1500 / 400)
    begun = peer("a", running=1, unread_tokens=50_000, cached_tokens=1900, awaited_tokens=1500)
    assert price(ASK, begun).queue_s == pytest.approx(1600 / 400)
    assert order(route(ASK, [reading, peer("b", prefill_tok_s=800.0)])) == ["b", "a"]


def test_equal_machines_come_by_their_ids_and_this_one_first() -> None:
    # So fast that both prices are nothing.
    fast = {"prefill_tok_s": 1e12, "decode_tok_s": 1e12}
    nothing = RouteQuestion("m", 0, 0)
    machines = [peer("b", **fast), peer("a", **fast), here(**fast)]
    assert order(route(nothing, machines)) == ["", "a", "b"]


def test_attack_a_speed_so_small_that_prices_overflow() -> None:
    crawl = {"prefill_tok_s": 5e-324, "decode_tok_s": 5e-324}
    ranked = route(ASK, [peer("a", **crawl, waiting=3), peer("b", **crawl), peer("c")])
    assert order(ranked) == ["c", "b", "a"]
    assert all(placement.price.total_s < 1e9 for placement in ranked.placements)


def test_a_machine_far_away_is_further_away() -> None:
    assert order(route(ASK, [peer("a", rtt_s=0.2), peer("b", rtt_s=0.001)])) == ["b", "a"]


def test_the_price_has_parts_that_add_up() -> None:
    cost = price(ASK, peer("a", rtt_s=0.5, running=1, max_streams=1, waiting=1))
    assert (cost.prefill_s, cost.decode_s, cost.network_s, cost.load_s) == (5.0, 5.0, 0.5, 0.0)
    assert cost.queue_s == 20.0
    assert cost.total_s == 30.5
    assert not cost.modelled


def begun(unread: int, awaited: int) -> dict[str, int]:
    """400 tokens are kept; another request has ``unread`` left, and ``awaited`` of these are among them."""
    return {"running": 1, "unread_tokens": unread, "awaited_tokens": awaited, "cached_tokens": 400}


# Alone on the machine the prompt is read in 5 s and answered in 5 s.
@pytest.mark.parametrize(
    ("fields", "queue_s", "load_s", "prefill_s", "decode_s"),
    [
        # Each of two answers that run slows this one by 0.3.
        ({"running": 2}, 0.0, 0.0, 8.0, 8.0),
        # One runs beside it, and four are waited for, two at a time.
        ({"running": 2, "max_streams": 2, "waiting": 3}, 4 * 13.0 / 2, 0.0, 6.5, 6.5),
        ({"running": 9, "max_streams": 0}, 9 * 10.0, 0.0, 5.0, 5.0),
        # A load that is under way is half done.
        ({"state": "loading", "load_s": 8.0}, 0.0, 4.0, 5.0, 5.0),
        ({"state": "installed", "load_s": 8.0}, 0.0, 8.0, 5.0, 5.0),
        ({"state": "installed", "load_s": 1e9}, 0.0, 3600.0, 5.0, 5.0),
        # Another prompt has 600 tokens left; or far more, and then this one goes first.
        ({"running": 1, "unread_tokens": 600}, 1.5, 0.0, 6.5, 6.5),
        ({"running": 1, "unread_tokens": 9000}, 5.0, 0.0, 6.5, 6.5),
        # It reads what this prompt begins with: all of that is waited for.
        (begun(300, 200), 0.75, 0.0, 5.2, 6.5),
        (begun(100, 200), 0.25, 0.0, 5.2, 6.5),
        (begun(500, 500), 1.25, 0.0, 5.2, 6.5),
        ({"running": 1, "unread_tokens": 100, "cached_tokens": 9000}, 0.0, 0.0, 0.0, 6.5),
        # Helpers have their own price.
        ({"running": 2, "helped_s": 2.0}, 0.0, 0.0, 2.0, 8.0),
    ],
)
def test_prices_by_hand(
    fields: dict[str, Any], queue_s: float, load_s: float, prefill_s: float, decode_s: float
) -> None:
    cost = price(ASK, peer("a", rtt_s=0.5, wake_s=3.0, bring_s=2.0, **fields))
    parts = (cost.queue_s, cost.load_s, cost.prefill_s, cost.decode_s)
    assert parts == pytest.approx((queue_s, load_s, prefill_s, decode_s))
    assert (cost.wake_s, cost.bring_s, cost.network_s) == (3.0, 2.0, 0.5)
    assert cost.before_prefill_s == pytest.approx(queue_s + load_s + 5.5)
    assert cost.total_s == pytest.approx(sum(parts) + 5.5)


def test_a_machine_that_would_fetch_the_model_has_no_price_but_that() -> None:
    absent = peer("a", state="absent", rtt_s=0.5, running=3)
    assert price(ASK, absent) == RoutePrice(0.0, PULL_S, 0.0, 0.0, 0.5, modelled=True)


def test_a_request_that_waits_here_counts_itself_once() -> None:
    admitted = replace(ASK, admitted=True)
    full = {"running": 4, "max_streams": 4}
    # Three run beside it, so that each takes 1.9 times as long; one is waited for.
    for waiting in (0, 1):
        assert price(admitted, here(waiting=waiting, **full)).queue_s == pytest.approx(19.0 / 4)
    assert price(admitted, here(waiting=2, **full)).queue_s == pytest.approx(2 * 19.0 / 4)
    assert price(admitted, peer("a", waiting=1, **full)).queue_s == pytest.approx(2 * 19.0 / 4)


def test_this_machine_needs_no_network() -> None:
    assert price(ASK, here(rtt_s=9.0)).network_s == 0


@pytest.mark.parametrize("doubted", ["here", "there"])
def test_another_machine_has_to_be_a_quarter_faster_while_a_speed_is_in_doubt(doubted: str) -> None:
    this = here(doubt="busy" if doubted == "here" else "")

    def faster(by: float) -> Candidate:
        rates = {rate: getattr(this.speed, rate) * by for rate in ("prefill_tok_s", "decode_tok_s")}
        return peer("a", doubt="busy" if doubted == "there" else "", **rates)

    assert order(route(ASK, [this, faster(1.3)])) == ["", "a"]
    assert order(route(ASK, [changed(this, doubt=""), changed(faster(1.3), doubt="")])) == [
        "a",
        "",
    ]
    assert order(route(ASK, [this, faster(1.4)])) == ["a", ""]


def test_speeds_that_nobody_measured_come_from_the_chip() -> None:
    unmeasured = {"prefill_tok_s": 0.0, "decode_tok_s": 0.0}
    big = peer("big", chip="Apple M3 Ultra", **unmeasured)
    small = peer("small", chip="Apple M1", **unmeasured)
    ranked = route(ASK, [small, big])
    assert order(ranked) == ["big", "small"]
    assert all(p.price.modelled for p in ranked.placements)
    # A measured figure replaces only what it measured.
    half = price(ASK, peer("a", prefill_tok_s=0.0))
    assert (half.decode_s, half.modelled) == (5.0, True)
    half = price(ASK, peer("a", decode_tok_s=0.0))
    assert (half.prefill_s, half.modelled) == (5.0, True)
    # Published figures may be too good: times by them are taken to be half as long again.
    alone, chip = price(ASK, small), small.hardware
    assert alone.prefill_s == pytest.approx(1.5 * 2000 / chip.prefill_tok_s(4 * GIB))
    assert alone.decode_s == pytest.approx(1.5 * 200 / chip.decode_tok_s(4 * GIB))


# ---- Which files -----------------------------------------------------------------------------------------


def test_only_machines_with_the_files_that_are_here_compete() -> None:
    other = {**speed(9), "digest": "d2"}
    ranked = route(ASK, [here(), peer("same", **speed(2)), peer("other", **other)])
    assert order(ranked) == ["same", ""]
    assert why(ranked, "other") == ("other_files", "other has other files under the name qwen3-8b.")
    assert [p.digest for p in ranked.placements] == ["d1", "d1"]


def test_what_is_here_decides_even_where_it_cannot_run_here() -> None:
    here_installed = here(state="installed", available_bytes=GIB)
    other = {**speed(9), "digest": "d2"}
    ranked = route(ASK, [here_installed, peer("same"), peer("other", **other)])
    assert order(ranked) == ["same"]
    ranked = route(replace(ASK, exclude=frozenset({""})), [here(), peer("same"), peer("other", **other)])
    assert order(ranked) == ["same"]


def test_files_here_that_are_not_hashed_yet_may_be_any() -> None:
    ranked = route(ASK, [here(digest=""), peer("a", **speed(9))])
    assert order(ranked) == [""]
    assert why(ranked, "a") == (
        "files_unknown",
        "this does not know yet which files its qwen3-8b is made of, so a's may be others.",
    )


def test_a_peer_that_has_not_hashed_its_files_waits_until_it_has() -> None:
    ranked = route(ASK, [here(), peer("a", **speed(9), digest="")])
    assert order(ranked) == [""]
    assert why(ranked, "a") == (
        "files_unknown",
        "a does not know yet which files its qwen3-8b is made of.",
    )


def test_of_several_models_with_one_name_the_group_of_the_best_price() -> None:
    machines = [
        peer("a", **speed(1), digest="d1"),
        peer("b", **speed(3), digest="d2"),
        peer("c", **speed(0.5), digest="d2"),
        peer("d", **speed(2), digest=""),
        peer("e", **speed(2), digest=""),
    ]
    ranked = route(ASK, machines)
    assert order(ranked) == ["b", "c"]
    assert {r.node_id: r.refusal.code for r in ranked.rejected} == {
        "a": "other_files",
        "d": "files_unknown",
        "e": "files_unknown",
    }
    # Two that were not hashed are not known to be alike.
    assert order(route(ASK, machines[3:])) == ["d"]


def test_a_digest_that_was_asked_for() -> None:
    machines = [here(), peer("a", digest="d2"), peer("b", state="absent", can_pull=True)]
    ranked = route(replace(ASK, digest="d2"), machines)
    assert order(ranked) == ["a"]
    assert why(ranked, "")[0] == "other_files"
    assert why(ranked, "b")[0] == "absent"


def test_whoever_would_have_to_fetch_the_model_comes_last() -> None:
    puller = here(state="absent", can_pull=True)
    slow = peer("a", **speed(0.01), rtt_s=1.0)
    assert price(ASK, slow).total_s > PULL_S
    ranked = route(ASK, [puller, slow])
    assert order(ranked) == ["a", ""]
    assert ranked.placements[1].digest == ""
    assert order(route(ASK, [puller, peer("a", state="absent")])) == [""]
    assert order(route(ASK, [here(), peer("a", state="absent", can_pull=True)])) == [""]


PRIVATE = Refusal("private", "a may not see prompts.")
STOPPING = Refusal("draining", "this is stopping.")

# ---- Why not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "ask", "code", "sentence"),
    [
        (peer("a"), {"exclude": frozenset({"a"})}, "tried", "a was tried already."),
        (peer("a", refusal=PRIVATE), {}, "private", "a may not see prompts."),
        (here(refusal=STOPPING), {}, "draining", "this is stopping."),
        (peer("a", state="absent"), {}, "absent", "a does not have qwen3-8b."),
        (
            peer("a", roles=("embedding", "draft")),
            {},
            "wrong_role",
            "qwen3-8b on a is for embedding, draft, not for chat.",
        ),
        (
            peer("a", state="installed", memory_bytes=4 * GIB, available_bytes=3 * GIB),
            {},
            "too_small",
            "a has 4.3 GB of memory; qwen3-8b needs 6.4 GB.",
        ),
        (
            peer("a", state="installed", available_bytes=3 * GIB, evictable_bytes=GIB),
            {},
            "no_memory",
            "a has 4.3 GB of memory for models; qwen3-8b needs 6.4 GB.",
        ),
        (
            here(state="installed", available_bytes=GIB),
            {},
            "no_memory",
            "this has 1.1 GB of memory for models; qwen3-8b needs 6.4 GB.",
        ),
        (
            peer("a", waiting=limits.QUEUED_REQUESTS),
            {},
            "full",
            f"a has {limits.QUEUED_REQUESTS} requests waiting already.",
        ),
    ],
)
def test_every_reason_is_a_sentence(
    candidate: Candidate, ask: dict[str, Any], code: str, sentence: str
) -> None:
    ranked = route(replace(ASK, **ask), [candidate])
    assert order(ranked) == []
    assert why(ranked, candidate.node_id) == (code, sentence)


@pytest.mark.parametrize(
    "candidate",
    [
        peer("a", waiting=limits.QUEUED_REQUESTS - 1),
        peer("a", state="installed", available_bytes=6 * GIB),
        peer("a", state="installed", available_bytes=2 * GIB, evictable_bytes=4 * GIB),
        peer("a", available_bytes=0),  # it is loaded
        peer("a", roles=()),
    ],
)
def test_what_just_is_good_enough(candidate: Candidate) -> None:
    assert order(route(ASK, [candidate])) == [candidate.node_id]


def test_nobody_at_all() -> None:
    assert route(ASK, []) == Ranked((), ())


# ---- Whatever the fleet looks like -----------------------------------------------------------------------


def machine(node_id: str) -> st.SearchStrategy[Candidate]:
    return st.builds(
        Candidate,
        node_id=st.just(node_id),
        name=st.just(node_id or "here"),
        refusal=st.none() | st.just(Refusal("private", f"{node_id or 'here'} may not see prompts.")),
        chip=st.sampled_from(["Apple M1", "Apple M3 Ultra", "NVIDIA GB10", ""]),
        accelerator=st.sampled_from(["metal", "cuda", "cpu"]),
        cores=st.integers(0, 64),
        memory_bytes=st.integers(0, 512 * GIB),
        available_bytes=st.integers(0, 512 * GIB),
        evictable_bytes=st.integers(0, 64 * GIB),
        rtt_s=st.floats(0, 10),
        running=st.integers(0, 20),
        waiting=st.integers(0, limits.QUEUED_REQUESTS + 1),
        unread_tokens=st.integers(0, 100_000),
        max_streams=st.integers(0, 16),
        state=st.sampled_from(["absent", "installed", "loading", "loaded"]),
        digest=st.sampled_from(["", "d1", "d2"]),
        shape=st.builds(ModelShape, weights_bytes=st.integers(0, 200 * GIB)),
        needed_bytes=st.integers(0, 200 * GIB),
        speed=st.builds(
            MeasuredSpeed,
            prefill_tok_s=st.sampled_from([0.0, 1e-300, 100.0, 1000.0]) | st.floats(0, 1e12),
            decode_tok_s=st.sampled_from([0.0, 1e-300, 10.0, 100.0]) | st.floats(0, 1e12),
        ),
        roles=st.sampled_from([(), ("chat",), ("chat", "compressor"), ("embedding",)]),
        can_pull=st.booleans(),
    )


fleets = st.tuples(*(st.none() | machine(node_id) for node_id in ("", "a", "b", "c", "d"))).map(
    lambda found: [candidate for candidate in found if candidate is not None]
)
asks = st.builds(
    RouteQuestion,
    model=st.just("m"),
    prompt_tokens=st.integers(0, 1_000_000),
    max_tokens=st.integers(0, 100_000),
    digest=st.sampled_from(["", "", "d1"]),
    exclude=st.frozensets(st.sampled_from(["", "a", "b"]), max_size=2),
)


@given(asks, fleets)
def test_attack_a_machine_that_must_not_be_asked_is_never_proposed(
    ask: RouteQuestion, fleet: list[Candidate]
) -> None:
    ranked = route(ask, fleet)
    by_id = {candidate.node_id: candidate for candidate in fleet}
    # Everybody is either placed or told why not, once.
    assert sorted([*order(ranked), *(r.node_id for r in ranked.rejected)]) == sorted(by_id)
    for placement in ranked.placements:
        chosen = by_id[placement.node_id]
        assert placement.node_id not in ask.exclude
        assert chosen.refusal is None
        assert not chosen.absent or chosen.can_pull
        assert not ask.digest or placement.digest == ask.digest
    for rejection in ranked.rejected:
        assert rejection.refusal.sentence.endswith(".")
        assert rejection.name in rejection.refusal.sentence
    digests = {p.digest for p in ranked.placements if not by_id[p.node_id].absent}
    assert len(digests) <= 1


@given(asks, fleets, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_changes_nothing(
    ask: RouteQuestion, fleet: list[Candidate], chance: Any
) -> None:
    shuffled = list(fleet)
    chance.shuffle(shuffled)
    assert route(ask, shuffled) == route(ask, fleet)


@given(asks, fleets, st.data())
def test_more_load_never_makes_a_machine_more_wanted(
    ask: RouteQuestion, fleet: list[Candidate], data: st.DataObject
) -> None:
    assume(fleet)
    chosen = data.draw(st.sampled_from(fleet))
    busier = replace(
        chosen,
        running=chosen.running + data.draw(st.integers(0, 20)),
        waiting=chosen.waiting + data.draw(st.integers(0, 20)),
        unread_tokens=chosen.unread_tokens + data.draw(st.integers(0, 100_000)),
        available_bytes=int(chosen.available_bytes * data.draw(st.floats(0, 1))),
    )

    def place(machines: list[Candidate]) -> float:
        found = order(route(ask, machines))
        return found.index(chosen.node_id) if chosen.node_id in found else float("inf")

    others = [candidate for candidate in fleet if candidate is not chosen]
    before, after = place(fleet), place([*others, busier])
    assert after >= before


@given(asks, fleets)
def test_prices_are_figures_and_best_comes_first(ask: RouteQuestion, fleet: list[Candidate]) -> None:
    ranked = route(ask, fleet)
    for placement in ranked.placements:
        assert 0 <= placement.price.total_s < float("inf")
    held = [p for p in ranked.placements if p.digest or p.price.load_s != PULL_S]
    totals = [p.price.total_s * (ADVANTAGE if p.node_id == "" else 1) for p in held]
    assert totals == sorted(totals)


def test_a_conversation_stays_where_its_beginning_is_cached() -> None:
    long = replace(ASK, prompt_tokens=8000)
    assert order(route(long, [peer("a"), peer("b")])) == ["a", "b"]
    assert order(route(long, [peer("a"), peer("b", cached_tokens=7900)])) == ["b", "a"]
    # A guess that is larger than the prompt makes no time negative.
    assert price(ASK, peer("a", cached_tokens=10**6)).prefill_s == 0.0


def test_a_machine_of_the_same_kind_is_as_fast_as_the_measured_one() -> None:
    """Else the figures of its chip would make every machine look better where nothing was measured yet."""
    slow = peer("slow", **speed(0.01))
    unmeasured = peer("new", state="installed", prefill_tok_s=0.0, decode_tok_s=0.0)
    assert order(route(ASK, [slow, unmeasured])) == ["slow", "new"]
    assert order(route(ASK, [slow, replace(unmeasured, chip="Apple M3 Max")])) == ["new", "slow"]
    # One that has only answered so far says nothing of prompts, and unknown machines nothing of each other.
    halves = [peer("a", prefill_tok_s=0.0), slow, unmeasured]
    prices = {p.node_id: p.price for p in route(ASK, halves).placements}
    assert prices["new"].prefill_s == prices["slow"].prefill_s
    unknown = [replace(each, chip="") for each in (slow, unmeasured)]
    prices = {p.node_id: p.price for p in route(ASK, unknown).placements}
    assert prices["new"].modelled


def test_a_machine_that_just_failed_is_asked_only_after_the_others() -> None:
    failed = peer("a", left_out=True, **speed(100))
    assert order(route(ASK, [failed, peer("b", **speed(0.1)), here(**speed(0.01))])) == ["b", "", "a"]
    assert order(route(ASK, [failed])) == ["a"]
    # Fetching the model takes longer still.
    assert order(route(ASK, [failed, here(state="absent", can_pull=True)])) == ["a", ""]


def test_a_load_that_would_leave_no_room_for_the_prompt_is_the_last_resort() -> None:
    cold = peer("a", state="installed", load_s=1.0, kv_bytes=GIB, **speed(100))
    cramped, fitting = replace(cold, kv_room_bytes=GIB - 1), replace(cold, kv_room_bytes=GIB)
    assert order(route(ASK, [fitting, here()])) == ["a", ""]
    assert order(route(ASK, [cramped, here()])) == ["", "a"]
    # How much the prompt needs is an estimate, so it is no reason to refuse.
    assert order(route(ASK, [cramped])) == ["a"]


# ---- Rules that only a few fleets show -------------------------------------------------------------------


def test_only_a_request_that_waits_here_is_one_of_those_that_wait_here() -> None:
    admitted = replace(ASK, admitted=True)
    for machine, counted in ((here(waiting=1), 0), (peer("a", waiting=1), 1)):
        one = price(ASK, machine).queue_s
        assert one > 0
        assert price(admitted, machine).queue_s == counted * one


def test_what_a_machine_has_measured_of_its_prefill_is_not_mixed_with_its_twin_s() -> None:
    """It has not decoded yet."""
    half = peer("a", decode_tok_s=0.0, prefill_context_s=0.0, prefill_fixed_s=0.0)
    twin = peer("b", **speed(2), prefill_context_s=1e-6, prefill_fixed_s=0.5)
    found = {p.node_id: p.price for p in route(ASK, [half, twin]).placements}
    assert found["a"].prefill_s == price(ASK, half).prefill_s
    assert found["a"].decode_s == found["b"].decode_s


def test_a_cpu_that_computes_in_another_arithmetic_is_no_twin() -> None:
    cpu = {"chip": "x", "accelerator": "cpu", "cores": 8}
    unknown = {"prefill_tok_s": 0.0, "decode_tok_s": 0.0}
    measured = peer("a", **cpu, **speed(1), cpu_arithmetic="int8")
    cold = [peer(f"b {each}", **cpu, **unknown, cpu_arithmetic=each) for each in ("int8", "float32")]
    found = {p.node_id: p.price for p in route(ASK, [measured, *cold]).placements}
    assert found["b int8"] == found["a"]
    assert found["b float32"].modelled
    assert found["b float32"].total_s > found["a"].total_s


def test_a_doubtful_speed_here_makes_other_machines_dearer_and_not_this_one() -> None:
    """Its session is elsewhere, where it cannot run now."""
    machines = [here(doubt="busy"), peer("a", **speed(1.1)), peer("b", session=True, **speed(0.5))]
    assert order(route(ASK, machines))[0] == ""
    assert order(route(ASK, [changed(machines[0], doubt=""), *machines[1:]]))[0] == "a"


def test_a_prompt_that_is_too_long_is_told_for_whom() -> None:
    ranked = route(replace(ASK, counted=True), [here(context_tokens=1999), peer("a", context_tokens=1999)])
    assert why(ranked, "") == ("context", "qwen3-8b takes 1,999 tokens; this prompt has 2,000.")
    assert why(ranked, "a") == ("context", "qwen3-8b on a takes 1,999 tokens; this prompt has 2,000.")


def test_a_prompt_that_just_fits_the_context_is_not_refused() -> None:
    counted = replace(ASK, counted=True)
    assert order(route(counted, [peer("a", context_tokens=ASK.prompt_tokens)])) == ["a"]
    assert order(route(counted, [peer("a", context_tokens=ASK.prompt_tokens - 1)])) == []


def test_a_machine_that_would_fetch_a_name_is_not_asked_where_files_of_it_are_here() -> None:
    absent = peer("a", state="absent", can_pull=True)
    for hashed in ("d1", ""):
        found = route(ASK, [here(digest=hashed), absent])
        assert order(found) == [""]
        assert why(found, "a")[0] == "absent"
    assert order(route(ASK, [peer("b"), absent])) == ["b", "a"]


def test_a_session_on_a_machine_that_cannot_be_asked_draws_nothing_there() -> None:
    """So the next best reason to stay is that the prompt is here."""
    away = peer("b", session=True, refusal=Refusal("silent", "b is silent."))
    assert order(route(ASK, [here(), peer("a", **speed(1.05)), away])) == ["", "a"]
