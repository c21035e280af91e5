"""The figures of a fitted head: against n-grams alone, prompt by prompt; not measured if there is none."""

from __future__ import annotations

from collections import Counter
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
            seen[kind, side, "times"] += [rate / 20.0] * 5
            seen[kind, side, "per pass"] += [2.0] * 5
            seen[kind, side, "right"] += [0.5] * 5
    seen["tapped"], seen["untapped"] = [1.005] * 3, [1.0] * 3
    figures = {figure.title: figure for figure in heads.figures(seen, "mtp: 0.5 ms a token")}
    both = figures["Decode, code, with the head and n-grams, times n-grams alone"]
    assert both.value == pytest.approx(gain)
    assert both.passes is passed
    assert both.note == "2.00 tokens per pass, 50 % of drafts right"
    assert figures["Decode, code, with n-grams alone, times plain"].value == pytest.approx(2.0)
    [taps] = [figure for title, figure in figures.items() if title.startswith("Noting")]
    assert taps.passes


def test_each_prompt_is_answered_by_what_is_compared_and_by_one_other_side() -> None:
    class NotedChild:
        """Says what a child would, with a rate that tells the side."""

        def __init__(self) -> None:
            self.sides: list[tuple[str, ...]] = []

        def ask(self, *, sources: list[str], **_: object) -> dict[str, object]:
            self.sides.append(tuple(sources))
            answer = {"tokens": 8, "passes": 4, "drafted": 4, "accepted": 2, "logprobs": [-1.0]}
            return {"rate": 10.0 + len(sources), "answers": [answer]}

    child, seen = NotedChild(), Samples()
    for turn in range(4):
        heads._answers(child, seen, turn, "code", "words")  # type: ignore[arg-type]
    grams = (*heads.LOCAL_NAMES,)
    assert Counter(child.sides) == {grams: 4, (*grams, heads.MTP): 4, (): 2, (heads.MTP,): 2}
    assert seen["code", "plain", "times"] == pytest.approx([10 / (10 + len(grams))] * 2)
    assert len({child.sides[3 * turn] for turn in range(4)}) > 1
