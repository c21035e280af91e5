"""Helpers that still have the rows of the turn before: the same bytes, and only new rows cross."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from shared_runs import SharedRun, keep_prefix, prefilled, prompt
from tiny_architectures import tiny

from fleetd import limits
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.shared_prefill.helper_guests import HelperGuests
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.warm_store import WarmCaches, WarmStore
from fleetd.errors import ProtocolError
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.split import Split, WarmRows

pytestmark = pytest.mark.usefixtures("cpu_installed")

# Of one conversation: the first turn, then one whose prefix is that turn and its answer.
FIRST, CACHED, SECOND = 101, 120, 221
TURNS = {
    "layers": (
        Split("layers", (0, 2, 4), 4, 0, FIRST, 40),
        Split("layers", (0, 2, 4), 4, CACHED, SECOND, 40),
    ),
    "other layers": (
        Split("layers", (0, 1, 4), 4, 0, FIRST, 40),
        Split("layers", (0, 3, 4), 4, CACHED, SECOND, 40),
    ),
    "two helpers": (
        Split("layers", (0, 1, 3, 4), 4, 0, FIRST, 40),
        Split("layers", (0, 1, 3, 4), 4, CACHED, SECOND, 40),
    ),
    "tokens": (
        Split("tokens", (0, 80, FIRST), 4, 0, FIRST, 40),
        Split("tokens", (CACHED, 200, SECOND), 4, CACHED, SECOND, 40),
    ),
    "the whole prefix": (
        Split("layers", (0, 4, 4), 4, 0, FIRST, 40),
        Split("layers", (0, 2, 4), 4, FIRST, SECOND, 40),
    ),
}


def sent(run: SharedRun) -> int:
    """Bytes of tokens and rows that home sent its helpers."""
    return next(step.n_bytes for step in run.home.steps if step.name == step_names.PREFIX_SENT)


def two_turns(model: Any, first: Split, second: Split) -> tuple[SharedRun, SharedRun]:
    """The second turn, cold and warm; both checked against local prefill."""
    begins = prompt(SECOND + 1)
    before = SharedRun(model, first, begins=begins)
    cache = before.finish().cache
    if second.cached > first.tokens:
        done = [copy_on_write(layer) for layer in cache]
        answered = prefilled(model, begins[: second.cached + 1], first.chunk, done, first.tokens)
        keep_prefix(model, begins[: second.cached], answered.cache)
    before.check(cache)
    cold = SharedRun(model, second, begins=begins)
    cold.check(cold.finish().cache)
    warm = SharedRun(model, second, begins=begins, warm=before.left)
    warm.check(warm.finish().cache)
    return cold, warm


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_the_second_turn_has_the_same_bytes_and_sends_only_new_rows(turns: tuple[Split, Split]) -> None:
    first, second = turns
    model = tiny("llama")
    cold, warm = two_turns(model, first, second)
    layout = KvLayout.of(warm.home._work.stage)
    saved = 0
    for rank, left in enumerate(warm.warm):
        assert left is not None
        for layer in second.layers_of(rank):
            saved += sum(sum(part.sizes(left.rows.of(layer))) for part in layout.parts(layer))
    assert saved > 0
    assert sent(warm) == sent(cold) - saved


# Windows and running states are sent whole, rows are not.
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5", "falcon_h1", "deepseek_v2", "gemma4_text"])
def test_models_of_many_kinds(name: str) -> None:
    first, second = TURNS["layers"]
    layers = len(tiny(name).layers)
    cuts = (0, layers // 2, layers)
    cold, warm = two_turns(
        tiny(name),
        replace(first, cuts=cuts, layers=layers),
        replace(second, cuts=cuts, layers=layers),
    )
    assert sent(warm) <= sent(cold)


def test_rows_of_other_tokens_are_refused_before_anything_is_computed() -> None:
    first, second = TURNS["layers"]
    model = tiny("llama")
    before = SharedRun(model, first, begins=prompt(SECOND + 1))
    before.finish()
    other = list(prompt(SECOND + 1))
    other[3] += 1
    run = SharedRun(model, second, begins=other, warm=before.left)
    helper = run.helpers[0]
    assert helper.ready
    with pytest.raises(ProtocolError, match="other tokens than those whose rows are here"):
        helper.step()


# ---- What is kept ----------------------------------------------------------------------------------------


@cache
def left_of_one() -> WarmCaches:
    """What a helper can keep of one small prompt."""
    first, _ = TURNS["layers"]
    run = SharedRun(tiny("llama"), first)
    run.finish()
    (left,) = run.left
    return left


def caches(home: str = "home", seed: int = 0) -> WarmCaches:
    """The same under other names."""
    left = left_of_one()
    return WarmCaches(home, 0, replace(left.rows, prefix=bytes([seed] * 8)), left.caches)


def test_rows_are_there_for_the_machine_whose_prompt_it_was_only() -> None:
    store, one = WarmStore(), caches()
    assert store.keep(one, one.nbytes)
    assert store.find("home", one.rows) is one
    assert store.find("another", one.rows) is None
    assert store.find("home", one.rows, 8) is None
    assert store.find("home", replace(one.rows, prefix=b"x" * 8)) is None
    assert store.find("home", replace(one.rows, last=one.rows.last - 1)) is None
    assert store.find("home", None) is None
    store.forget(["home"])
    assert store.find("home", one.rows) is None


def test_machines_with_the_same_prompt_take_nothing_from_each_other() -> None:
    store, one = WarmStore(), caches()
    other = replace_home(one, "another")
    store.keep(one, 1 << 30)
    store.keep(other, 1 << 30)
    assert store.find("home", one.rows) is one
    assert store.find("another", one.rows) is other
    # The same machine's rows of the same prompt are there once.
    again = replace_home(one, "home")
    store.keep(again, 1 << 30)
    assert len(store) == 2
    assert store.find("home", one.rows) is again


def replace_home(kept: WarmCaches, home: str) -> WarmCaches:
    return WarmCaches(home, kept.kv_bits, kept.rows, kept.caches)


def test_without_a_label_or_room_nothing_is_kept() -> None:
    store, one = WarmStore(), caches()
    assert not store.keep(caches(home=""), 1 << 30)
    assert not store.keep(one, one.nbytes - 1)
    assert len(store) == 0
    assert store.find("", one.rows) is None


def test_the_oldest_goes_first_and_a_later_turn_replaces_the_one_before() -> None:
    store = WarmStore()
    one, two, three = caches(seed=1), caches(seed=2), caches(seed=3)
    store.keep(one, 1 << 30)
    store.keep(two, 1 << 30)
    assert store.find("home", one.rows) is one  # now the newest
    store.keep(three, 1 << 30, instead_of=two)
    assert store.find("home", two.rows) is None
    assert store.nbytes == one.nbytes + three.nbytes
    store.trim(three.nbytes)
    assert store.find("home", one.rows) is None
    assert store.find("home", three.rows) is three
    for seed in range(limits.SHARE_WARM_PROMPTS + 4):
        store.keep(caches(seed=10 + seed), 1 << 30)
    assert len(store) == limits.SHARE_WARM_PROMPTS


def test_layers_and_tokens_of_warm_rows() -> None:
    rows = WarmRows(50, 2, 6, bytes(8))
    assert [rows.of(layer) for layer in (1, 2, 5, 6)] == [0, 50, 50, 0]
    assert [rows.layers_among(range(*each)) for each in ((0, 2), (0, 4), (3, 5), (5, 9), (6, 9))] == [
        0,
        2,
        2,
        1,
        0,
    ]


def test_rows_go_as_soon_as_something_else_wants_their_memory() -> None:
    one, spare = caches(), [1 << 30]
    guests = HelperGuests(
        sharable=None,
        context_tokens=1000,
        budget=KvBudget.of(1 << 30, 1),
        emit=lambda report: None,
        spare_bytes=lambda: spare[0],
    )
    guests.warm.keep(one, spare[0])
    guests.trim()
    assert guests.warm.find("home", one.rows) is one
    spare[0] = one.nbytes - 1
    guests.trim()
    assert len(guests.warm) == 0
