"""Prompts that begin alike at the same time are read once, with the same bytes, and none waits longer."""

from __future__ import annotations

import itertools
import random

import pytest
from turned_scheduler import CHUNK, TinyFamily, Turned, alone, drawn, family

from fleetd import limits
from fleetd.engine.loop import scheduler, sequence
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Accepted, Cancel, Failed, Finished, Prefill
from fleetd.engine.sparse_prefill.sparse import Sparse

pytestmark = pytest.mark.usefixtures("cpu_installed")
# The second has windows that cannot be taken back once they have moved on.
FAMILIES = ("llama", "gemma3_text")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyFamily]:
    return {name: family(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_prompt_at_the_same_time_is_read_once(families: dict[str, TinyFamily], name: str) -> None:
    of, tokens, names = families[name], drawn(300), ["a", "b", "c", "d"]
    bench = Turned(of)
    for each in names:
        bench.ask(each, tokens)
    bench.finish()
    expected = alone(of, tokens)
    assert [bench.answer(each) for each in names] == [expected] * 4
    assert bench.computed(*names) == len(tokens) + 3, "the last token is computed for each"


@pytest.mark.parametrize("name", FAMILIES)
def test_choices_of_a_prompt_that_leaves_out_tokens_read_it_once(
    families: dict[str, TinyFamily], name: str
) -> None:
    of, tokens, keep = families[name], drawn(400), [n for n in range(400) if n % 3 != 2]
    bench = Turned(of, sparse=Sparse.of(of.model))
    for each in ("a", "b", "c"):
        bench.ask(each, tokens, kept=keep)
    bench.finish()
    (accepted,) = bench.of("a", Accepted)
    assert 0 < accepted.kept < len(tokens)
    assert bench.answer("a") == bench.answer("b") == bench.answer("c")
    read = [bench.of(each, Finished)[0].usage.cached_tokens for each in ("a", "b", "c")]
    assert read == [0, accepted.kept - 1, accepted.kept - 1]
    # And later, from memory; another choice of tokens shares its first ones alone.
    bench.ask("later", tokens, kept=keep)
    bench.ask("other", tokens, kept=[n for n in keep if n != 199])
    bench.finish()
    assert bench.answer("later") == bench.answer("a")
    assert bench.of("later", Finished)[0].usage.cached_tokens == accepted.kept - 1
    shared = keep.index(199)
    assert bench.of("other", Finished)[0].usage.cached_tokens in ((shared,) if name == "llama" else (0, 1))


def test_waiting_for_another_prompt_is_waiting_and_its_time_is_no_speed(
    families: dict[str, TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    for module in (sequence, scheduler):
        monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    bench, tokens = Turned(families["llama"], context_tokens=4096), drawn(1200)
    bench.ask("leader", tokens)
    bench.ask("follower", tokens)
    bench.finish()
    leader, follower = (bench.of(name, Finished)[0].timings for name in ("leader", "follower"))
    assert follower.queue_s > leader.prefill_s > follower.prefill_s
    assert follower.prefill_interleaved
    assert not leader.prefill_interleaved


def test_only_time_in_which_nothing_else_was_computed_is_a_speed(families: dict[str, TinyFamily]) -> None:
    bench = Turned(families["llama"], context_tokens=4096)
    bench.ask("alone", drawn(300), max_tokens=20)
    bench.finish()
    bench.ask("long", drawn(900, 2), max_tokens=2)
    bench.turn(3)
    bench.ask("short", drawn(100, 3), max_tokens=30)
    bench.finish()
    told = {name: bench.of(name, Finished)[0].timings for name in ("alone", "long", "short")}
    interleaved = {name: (t.prefill_interleaved, t.decode_interleaved) for name, t in told.items()}
    assert interleaved["alone"] == (False, False)
    # The short one passed the long one, whose chunks then came between its tokens.
    assert interleaved["long"][0]
    assert interleaved["short"] == (False, True)


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_of_one_beginning_read_it_once(families: dict[str, TinyFamily], name: str) -> None:
    of, begin = families[name], drawn(420)
    forks = {f"fork{n}": begin + drawn(40 + 30 * n, seed=7 + n) for n in range(3)}
    bench = Turned(of)
    for each, tokens in forks.items():
        bench.ask(each, tokens)
    bench.finish()
    for each, tokens in forks.items():
        assert bench.answer(each) == alone(of, tokens)
    new = sum(len(tokens) for tokens in forks.values()) - 2 * len(begin)
    # Where a cache cannot be cut, a fork goes on from the end of the chunk before.
    assert bench.computed(*forks) - new < (1 if name == "llama" else 2 * CHUNK)


def test_a_prompt_whose_leader_is_past_their_beginning_takes_it_at_once(
    families: dict[str, TinyFamily],
) -> None:
    of, begin = families["llama"], drawn(200)
    bench = Turned(of)
    bench.ask("leader", begin + drawn(600, 2))
    bench.turn(12)
    late = begin + drawn(50, 3)
    bench.ask("late", late)
    bench.turn(2)
    assert bench.of("late", Prefill)[-1].cached == len(begin)
    bench.finish()
    assert bench.answer("late") == alone(of, late)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("turns", [0, 1, 4, 9])
def test_when_the_first_leaves_the_second_goes_on_from_there(
    families: dict[str, TinyFamily], name: str, turns: int
) -> None:
    of, tokens = families[name], drawn(300)
    # No memory for earlier prompts: what is handed over does not come from there.
    bench = Turned(of, prefix=PrefixCache(0))
    for each in ("first", "second", "third"):
        bench.ask(each, tokens)
    bench.turn(turns)
    bench.scheduler.tell(Cancel("first"))
    bench.finish()
    assert bench.of("first", Finished)[-1].reason == "cancelled"
    expected = alone(of, tokens)
    assert [bench.answer(each) for each in ("second", "third")] == [expected] * 2
    read = bench.of("first", Prefill)[-1].done if bench.of("first", Prefill) else 0
    assert read + bench.computed("second", "third") <= len(tokens) + 3


def test_one_that_waits_may_leave(families: dict[str, TinyFamily]) -> None:
    of, tokens = families["llama"], drawn(300)
    bench = Turned(of)
    for each in ("first", "second"):
        bench.ask(each, tokens)
    bench.turn(4)
    bench.scheduler.tell(Cancel("second"))
    bench.finish()
    assert bench.of("second", Finished)[-1].reason == "cancelled"
    assert bench.answer("first") == alone(of, tokens)


def test_when_the_first_fails_the_second_reads_for_itself(
    families: dict[str, TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, tokens = families["llama"], drawn(300)
    bench = Turned(of)
    for each in ("first", "second"):
        bench.ask(each, tokens)
    bench.turn(4)
    (leader,) = [s for s in bench.scheduler._prefilling if s.id == "first"]
    monkeypatch.setattr(type(leader.prefiller), "step", None)
    bench.turn()
    monkeypatch.undo()
    bench.finish()
    assert bench.of("first", Failed)
    assert bench.answer("second") == alone(of, tokens)


def test_waiting_for_a_longer_prompt_makes_none_later(families: dict[str, TinyFamily]) -> None:
    begin, short, long = drawn(300), drawn(20, 2), drawn(1200, 3)

    def turns(first: list[int]) -> int:
        bench = Turned(families["llama"])
        bench.ask("long", first + long)
        bench.turn(2)
        bench.ask("other", drawn(500, 9))
        bench.ask("short", begin + short)
        return bench.turns_to("short")

    assert turns(begin) < turns(drawn(300, 4))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_leader_that_begins_past_their_beginning_gives_no_more_than_that(
    families: dict[str, TinyFamily], name: str
) -> None:
    of, known = families[name], drawn(240)
    bench = Turned(of)
    bench.ask("before", known)
    bench.finish()
    asked = {"leader": known + drawn(100, 2), "other": known[:150] + drawn(60, 3)}
    for each, tokens in asked.items():
        bench.ask(each, tokens)
    bench.finish()
    for each, tokens in asked.items():
        assert bench.answer(each) == alone(of, tokens)


def test_progress_is_told_while_it_waits(
    families: dict[str, TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENGINE_BEAT_S", 0.0)
    bench = Turned(families["llama"])
    for each in ("first", "second"):
        bench.ask(each, drawn(300))
    for _ in range(6):
        bench.turn()
        bench.scheduler.heartbeat()
    first, second = (bench.of(each, Prefill)[-1] for each in ("first", "second"))
    assert (second.done, second.cached) == (first.done, 0)
    bench.finish()


def test_a_prompt_that_is_being_read_already_is_not_offered_to_helpers(
    families: dict[str, TinyFamily],
) -> None:
    bench = Turned(families["llama"], sharable=families["llama"].sharable)
    tokens = drawn(600)
    bench.ask("first", tokens)
    bench.turn(3)
    bench.ask("second", tokens, shared=True)
    bench.ask("other", drawn(600, 2), shared=True)
    bench.turn()
    offered = [event.id for event in bench.events if isinstance(event, Accepted) and event.waits]
    assert offered == ["other"]
    bench.scheduler.tell(Cancel("other"))
    bench.finish()
    assert bench.computed("first", "second") == len(tokens) + 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 40))])
def test_whatever_comes_and_goes_answers_are_the_same_bytes(
    families: dict[str, TinyFamily], seed: int
) -> None:
    name = FAMILIES[seed % 2]
    of = families[name]
    dice = random.Random(seed)
    begins = [drawn(n, n) for n in (70, 150, 260)]
    bench = Turned(of, prefix=PrefixCache(dice.choice([0, 1 << 22, 1 << 30])))
    asked: dict[str, tuple[int, ...]] = {}
    for i in range(60):
        match dice.choice(["ask", "cancel", "turn", "turn"]):
            case "ask":
                tokens = dice.choice(begins)[: dice.choice([65, 140, 260])] + drawn(dice.choice([1, 40]), 99)
                asked[f"r{i}"] = tuple(tokens)
                bench.ask(f"r{i}", tokens)
            case "cancel" if asked:
                bench.scheduler.tell(Cancel(dice.choice([*asked])))
            case _ if bench.scheduler.busy:
                bench.turn(dice.randrange(1, 3))
    bench.finish()
    expected = {tokens: alone(of, [*tokens]) for tokens in set(asked.values())}
    for each, tokens in asked.items():
        answer, whole = bench.answer(each), expected[tokens]
        if bench.of(each, Finished)[-1].reason == "cancelled":
            assert answer == whole[: len(answer)]
        else:
            assert answer == whole
