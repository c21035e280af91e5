"""The figures of a fitted head: against n-grams alone, prompt by prompt; not measured if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.samples import Samples
from bench.scenarios import heads


def test_nothing_is_measured_without_a_fitted_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "FITTED", tmp_path)
    with pytest.raises(RuntimeError, match=r"python -m eval\.fit_head"):
        heads.measure(1)


@pytest.mark.parametrize(("gain", "passed"), [(1.7, True), (1.3, False)])
def test_a_head_is_held_against_n_grams_alone(gain: float, passed: bool) -> None:
    seen = Samples()
    for kind in heads.KINDS:
        for side, rate in (("plain", 10.0), ("n-grams", 20.0), ("head", 22.0), ("both", 20.0 * gain)):
            seen[kind, side] += [rate] * 5
            seen[kind, side, "per pass"] += [2.0] * 5
            seen[kind, side, "right"] += [0.5] * 5
    seen["tapped"], seen["untapped"] = [1.005] * 3, [1.0] * 3
    figures = {figure.title: figure for figure in heads.figures(seen, "mtp: 0.5 ms a token")}
    both = figures["Decode, code, with the head and n-grams, times n-grams alone"]
    assert both.value == pytest.approx(gain)
    assert both.passes is passed
    assert both.note == "2.00 tokens per pass, 50 % of drafts right"
    [taps] = [figure for title, figure in figures.items() if title.startswith("Noting")]
    assert taps.passes
