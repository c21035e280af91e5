"""What a measured prefill is held against: ceilings, predictions, sums of speeds."""

from __future__ import annotations

import pytest

from bench.harness.client import Heard
from bench.harness.machines import Asked
from bench.harness.samples import Samples
from bench.scenarios import prefill_workers
from bench.scenarios.never_slower import Cell, _figures, _fill
from bench.scenarios.prefill_ceiling import ceiling, error, handed_off_s, later_check_s, step_s, sum_of_speeds
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Trace, TraceStep


def trace(kind: str = "layers", **rest: object) -> Trace:
    nodes = ["helper", "this"]
    cuts = {"layers": [0, 15, 30], "tokens": [0, 1024, 1999]}.get(kind, [])
    chosen = OptionView(kind, nodes, predicted_s=4.0, cuts=cuts, chunk=256, chosen=True)
    steps = [TraceStep("computed", "home", seconds=3.0), TraceStep("computed", "helper", seconds=2.5)]
    facts = {
        "steps": steps,
        "machine": "home",
        "outcome": "shared",
        "prefill_s": 5.0,
        "prompt_tokens": 2000,
        "cached_tokens": 0,
    } | rest
    return Trace("r", 0.0, "m", chosen=chosen, losers=[], **facts)  # type: ignore[arg-type]


def test_a_pipeline_loses_one_chunk() -> None:
    # 1,999 tokens are eight chunks of 256.
    assert ceiling(trace(), 30) == pytest.approx(2 * 8 / 9)
    # 951 of them are new: four.
    assert ceiling(trace(cached_tokens=1048), 30) == pytest.approx(2 * 4 / 5)


def test_a_split_of_tokens_loses_one_layer() -> None:
    assert ceiling(trace("tokens"), 30) == pytest.approx(2 * 30 / 31)


def test_what_is_not_split_has_no_ceiling() -> None:
    with pytest.raises(ValueError, match="local"):
        ceiling(trace("local"), 30)


def test_a_prediction_is_off_by_a_share_of_what_happened() -> None:
    assert error(trace()) == pytest.approx(-0.2)
    assert error(trace(prefill_s=3.2)) == pytest.approx(0.25)


@pytest.mark.parametrize("rest", [{"outcome": "fallback"}, {"outcome": "local"}, {"prefill_s": None}])
def test_only_what_went_as_planned_says_something_of_the_plan(rest: dict[str, object]) -> None:
    assert error(trace(**rest)) is None


@pytest.mark.parametrize(
    ("first_s", "later_s", "average_s"),
    [(0.02, 0.03, 0.03), (0.04, 0.05, 0.05), (0.4, 0.5, 0.05), (0.4, 0.0, 0.04), (0.0, 0.0, 0.0)],
)
def test_the_check_of_later_tokens_counts_by_how_probable_it_was(
    first_s: float, later_s: float, average_s: float
) -> None:
    """Of a prefill of 4 s it may take 0.04 s."""
    steps = [
        TraceStep("spot check", "home", seconds=first_s),
        TraceStep("check of later tokens", "home", seconds=later_s),
    ]
    assert later_check_s(trace(steps=steps)) == pytest.approx(average_s)


def test_steps_are_each_machine_s_own() -> None:
    assert step_s(trace(), "computed", "this") == 3.0
    assert step_s(trace(), "waited", "this") == 0.0


def steps_of(waited: float, own: float, theirs: float, exposed: float = 0.0) -> list[TraceStep]:
    home = {"waited": waited, "computed": own, "exposed hand-off": exposed, "spot check": 0.1}
    return [
        *(TraceStep(name, "home", seconds=seconds) for name, seconds in home.items()),
        TraceStep("computed", "helper", seconds=theirs),
        TraceStep("waited", "helper", seconds=9.9),
    ]


@pytest.mark.parametrize("kind", ["tokens", "layers"])
@pytest.mark.parametrize("late", [0.0, 0.2])
def test_rows_that_come_late_show_and_the_helper_s_own_work_does_not(kind: str, late: float) -> None:
    count = 30 if kind == "tokens" else 8
    alike = trace(kind, steps=steps_of(4.0 / count - 0.1 + late, 4.0, 4.0))
    assert handed_off_s(alike, 30) == pytest.approx(late)
    # The helper has a second more to do, and so home's last piece has to wait for its last one.
    slower = trace(kind, steps=steps_of(0.9 + 4.0 / count, 4.0, 5.0, exposed=late))
    assert handed_off_s(slower, 30) == pytest.approx(late)


def test_the_sum_of_speeds_counts_the_first_machine_as_one() -> None:
    assert sum_of_speeds([2.0, 6.0]) == pytest.approx(4 / 3)


def test_a_cell_is_its_median_and_knows_whether_it_was_shared() -> None:
    assert Cell("c", slower=[1.2, 0.9, 1.0], how=["local"] * 3).value == 1.0
    assert not Cell("c", how=["local"]).distributed
    assert Cell("c", how=["local", "tokens, shared"]).distributed


def heard_after(seconds: float) -> Asked:
    return Asked(Heard(0.0, 0.0, began_s=seconds), None)


class PlayedMachines:
    """Pairs of TTFTs as given, the planned one over the one alone."""

    def __init__(self, *over_alone: float) -> None:
        self.over_alone, self.first = list(over_alone), list[int]()

    def both(self, run: int, seed: int, length: int) -> tuple[Asked, Asked]:
        self.first.append(run % 2)
        return heard_after(1.0), heard_after(self.over_alone[run])


def test_every_cell_is_measured_alike_however_its_first_pair_looks() -> None:
    quick, slow = Cell("quick"), Cell("slow")
    played = PlayedMachines(0.9, 1.2, 1.0, 1.1), PlayedMachines(1.3, 1.0, 1.0, 1.0)
    for cell, machines in zip((quick, slow), played, strict=True):
        _fill(machines, cell, 500, 4)  # type: ignore[arg-type]
        assert machines.first == [0, 1, 0, 1]
    assert (quick.value, quick.worst) == pytest.approx((1.05, 1.2))
    assert (slow.value, slow.worst) == pytest.approx((1.0, 1.3))
    figures = {figure.title: figure for figure in _figures([quick, slow], [])}
    assert figures["TTFT as planned over TTFT alone, medians of 2 cells"].value == pytest.approx(1.05)
    assert figures["The same, the worst single pair"].value == pytest.approx(1.3)


def test_pairs_that_stayed_here_show_what_the_machine_does() -> None:
    cells = [Cell("a", [1.0, 1.2], [], ["local"] * 2), Cell("b", [0.7], [], ["tokens, shared"])]
    figures = {figure.title: figure for figure in _figures(cells, [])}
    assert figures["The same where it stayed local, one work twice"].values == [1.0, 1.2]
    assert figures["The same where it was shared"].values == [0.7]


@pytest.mark.parametrize(("of_ceiling", "off", "passed"), [(0.83, 0.26, False), (0.95, 0.1, True)])
def test_a_split_that_loses_time_or_is_predicted_badly_falls_short(
    of_ceiling: float, off: float, passed: bool
) -> None:
    seen = Samples()
    for name, value in (("gained", 1.5), ("of_ceiling", of_ceiling), ("off", off)):
        seen["layers", 2000, name] += [value, value, value]
    figures = prefill_workers._figures("layers", 2000, seen, {("layers", 2000): ""})
    assert [figure.passes for figure in figures] == [None, passed, passed]


def test_an_answer_tells_how_it_came_about() -> None:
    heard = Heard(0.0, 0.0)
    assert Asked(heard, None).how == "local"
    assert Asked(heard, trace("local", outcome="local")).how == "local"
    assert Asked(heard, trace()).how == "layers, shared"
    lost = trace("tokens", outcome="fallback", code="peer_lost", reason="gone")
    assert Asked(heard, lost).how == "tokens, fallback (peer_lost: gone)"
    assert not Asked(heard, lost).shared
