"""A helper as the scheduler sees it; test_sharing has what it computes, test_sharing_faults what fails."""

from __future__ import annotations

from pipes import Clock
from typing import Any

import pytest
from shared_runs import LAYERS, SharedRun
from tiny_architectures import tiny

from fleetd import limits
from fleetd.engine.streams.frames import HEAD_BYTES, Kind
from fleetd.plan.prefill.split import Split

pytestmark = pytest.mark.usefixtures("cpu_installed")

LAYER_SPLIT = Split("layers", (0, 1, 3, 4), LAYERS, 20, 97, 32)
TOKEN_SPLIT = Split("tokens", (20, 52, 84, 97), LAYERS, 20, 97, 32)
BOTH = pytest.mark.parametrize("split", [LAYER_SPLIT, TOKEN_SPLIT], ids=["layers", "tokens"])


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@BOTH
def test_it_is_finished_when_all_is_sent(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=0.01))
    for helper in run.helpers:
        while helper.ready:
            helper.step()
        assert not helper.finished, "nobody has taken what it sent"
    run.finish()
    assert all(helper.finished for helper in run.helpers)


@BOTH
def test_progress_grows_to_its_part(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    seen = [[0] for _ in run.helpers]
    for _ in run.turns():
        for rank, helper in enumerate(run.helpers):
            assert helper.progress >= seen[rank][-1]
            seen[rank].append(helper.progress)
    for rank, progress in enumerate(seen):
        assert len(set(progress)) > 2
        assert progress[-1] == len(split.tokens_of(rank))


@BOTH
def test_it_says_where_its_time_went_and_what_crossed_its_links(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=0.01))
    run.finish()
    for helper in run.helpers:
        steps = {step.name: step for step in helper.steps}
        assert list(steps) == ["waited", "computed"]
        assert steps["computed"].seconds > 0
    sent = sum({s.name: s for s in h.steps}["computed"].n_bytes for h in run.helpers)
    received = sum({s.name: s for s in h.steps}["waited"].n_bytes for h in run.helpers)
    home = {step.name: step for step in run.home.steps}
    assert list(home) == [
        "prefix sent", "spot check", "waited", "computed", "exposed hand-off", "check of later tokens",
    ]  # fmt: skip
    assert all(step.seconds >= 0 for step in home.values())
    assert sent + home["prefix sent"].n_bytes == received + home["waited"].n_bytes
    # Keys and values of a token: 2 heads of 32 numbers each.
    row = 2 * 2 * 32 * 4
    rows = sum(head.nbytes for p in run.streams.ends.values() for head in p.sent if head.kind is Kind.ROWS)
    assert rows >= row * 3 * 77


@BOTH
def test_others_may_leave_as_soon_as_they_have_what_they_need(llama: Any, split: Split) -> None:
    """Home closes its streams on the last frame, before the helper could end them."""
    run = SharedRun(llama, split, clock=Clock(tick=0.01))
    for _ in run.turns():
        pass
    for (machine, _), pipe in run.streams.ends.items():
        if machine >= 0:
            pipe.backlog = HEAD_BYTES + limits.KIB  # as if the end were still on its way
    for end in list(run.streams.ends.values()):
        end.fail()
    for helper in run.helpers:
        assert helper.ready
        assert helper.finished
        helper.step()


@BOTH
def test_it_forgets_everything_when_closed(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    next(run.turns())
    helper = run.helpers[0]
    helper.close()
    helper.close()
    assert all(run.streams.ends[0, name].closed for name in ("home", "out"))
    assert not helper._work.caches


def test_hidden_states_go_before_rows_that_nobody_waits_for(llama: Any) -> None:
    run = SharedRun(llama, LAYER_SPLIT, clock=Clock(tick=1.0), predicted_s=1e6)
    order: list[Kind] = []
    for name in ("home", "out"):
        pipe = run.streams.ends[0, name]
        pipe.tamper = lambda head, data: (order.append(head.kind), [(head, data)])[1]
    while Kind.ROWS not in order:
        run.helpers[0].step()
    assert order[0] is Kind.HIDDEN
