"""What a drafter on another machine adds to the drafts that a worker has anyway: lookup and suffix."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, Measured, alternated
from bench.harness import prompts, repetitive_prompts
from bench.harness.child import Child
from bench.harness.cores import why_no_cores, worker_on
from bench.harness.daemon import MODEL
from bench.harness.drafting import Drafted, GiveDrafter, answer, first_layers, following
from bench.harness.samples import Samples
from eval.fit_head import kept_answers
from eval.head_answers import pieces_of
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.process import observe

QUICK_RUNS = 1
TOKENS = 64
DELAYS_S = (0.0, 0.005, 0.05)
# Layers of the truncated models, of 30; and of one whose output head is fitted to so many tokens, about.
CUT_LAYERS = (6, 24)
FITTED_LAYERS, FITTED_TOKENS = 12, 24_000
LOCAL = ["suffix", "lookup"]
_CODE = "rewrite this code with one change"
WORK = {"free text": prompts.OPENINGS[1], _CODE: repetitive_prompts.REPETITIVE[_CODE]}


@dataclass(frozen=True, slots=True)
class Side:
    """A drafter besides the local sources: the model's first ``layers``, over so long a round trip."""

    layers: int
    delay_s: float
    # Of its guesses in answers that it was not fitted to, as many are right; None if its head is the model's.
    right: float | None = None

    @property
    def title(self) -> str:
        head = "" if self.right is None else " and a head fitted to them"
        return f"drafter of the model's first {self.layers} layers{head}, {1000 * self.delay_s:.0f} ms away"


def measure(runs: int) -> Measured:
    """Raises RuntimeError if two machines cannot have a core each."""
    if why := why_no_cores():
        raise RuntimeError(why)
    observe.configure("warning")  # the supervisor of the workers is in this process
    quick = runs <= QUICK_RUNS
    delays = DELAYS_S[:1] if quick else DELAYS_S
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        drafters = {
            first_layers(folder / f"first-{layers}", layers): [Side(layers, delay_s) for delay_s in delays]
            for layers in (CUT_LAYERS[1:] if quick else CUT_LAYERS)
        }
        fitted, how = folder / "fitted", _HOW
        if why := why_not_fitted():
            print(f"  LEFT OUT: a drafter with a fitted head: {why}", flush=True)
            how += f" A drafter with a fitted head was left out: {why}."
        else:
            right = _fit(fitted)
            drafters[fitted] = [Side(FITTED_LAYERS, delay_s, right) for delay_s in delays]
        return Measured(asyncio.run(_measure(runs, drafters)), how)


def why_not_fitted() -> str:
    """Why no head can be fitted; "" if one can."""
    if not pieces_of(kept_answers(), 1):
        return "no answers of the model are kept to fit it to: python -m eval.fit_head"
    return ""


def _fit(folder: Path) -> float:
    """Make the drafter with a fitted head; returns the share of its guesses that are right."""
    with Child("fitted_layers", str(MODEL)) as child:
        answers = str(kept_answers())
        told = child.ask(folder=str(folder), layers=FITTED_LAYERS, answers=answers, tokens=FITTED_TOKENS)
    print(f"  fitted head: {100 * told['right']:.0f} % right, sha256 {told['sha256']}", flush=True)
    return float(told["right"])


async def _measure(runs: int, drafters: dict[Path, list[Side]]) -> list[Figure]:
    here, there, *_ = sorted(os.sched_getaffinity(0))
    seen = Samples()
    async with worker_on(here) as home:
        for model, several in drafters.items():
            async with worker_on(there, model) as other:
                for run in range(runs):
                    for work, prompt in _prompts(run):
                        async with following(other) as give:
                            await _sides(seen, run, work, home, prompt, several, give)
    sides = [side for several in drafters.values() for side in several]
    pairs = [_figures(seen, work, side) for side in sides for work in WORK]
    same = Figure("Answers equal with and without the drafter", "%", seen["same"], of="worst")
    return [*(figure for pair in pairs for figure in pair), same]


def _prompts(run: int) -> Iterator[tuple[str, list[int]]]:
    """Each kind of work and its prompt: free text begins in another way in every run."""
    for work, words in WORK.items():
        yield work, prompts.encoded(MODEL, f"{run + 1}. {words}" if work == "free text" else words)


async def _sides(
    seen: Samples,
    run: int,
    work: str,
    home: EngineProcess,
    prompt: list[int],
    sides: list[Side],
    drafter: GiveDrafter,
) -> None:
    """The local sources alone, and each side with the drafter too, in turns."""
    found: dict[Side | None, Drafted] = {}
    for side in alternated(run, [None, *sides]):
        if side is None:
            found[side] = await answer(home, prompt, TOKENS, LOCAL)
        else:
            found[side] = await answer(home, prompt, TOKENS, [*LOCAL, "drafter"], drafter, side.delay_s)
    local = found.pop(None)
    for side, both in found.items():
        seen[work, side, "times"].append(both.rate / local.rate)
        seen[work, side, "passes"].append(both.per_pass / local.per_pass)
        seen[work, side, "local"].append(local.per_pass)
        seen[work, side, "both"].append(both.per_pass)
        seen["same"].append(float(local.text == both.text))


def _figures(seen: Samples, work: str, side: Side) -> tuple[Figure, Figure]:
    local, both = (sum(seen[work, side, name]) / len(seen[work, side, name]) for name in ("local", "both"))
    note = f"{local:.2f} tokens per pass with local drafts, {both:.2f} with the drafter too"
    if side.right is not None:
        note += f"; it foresees {100 * side.right:.0f} % of the tokens of answers that it was not fitted to"
    title = f"{work}, {side.title}, over local drafts"
    return (
        Figure(f"Tokens per pass, {title}", "x", seen[work, side, "passes"], note=note),
        Figure(f"Decode, {title}", "x", seen[work, side, "times"]),
    )


_HOW = (
    f"The default model in a worker on one core, greedy, {TOKENS} tokens; the drafter in a worker on the "
    "other core, over a wire with the given round trip. All sides of a run answer the same prompt in turns: "
    "one with drafts of the local sources alone (prompt lookup and the suffix automaton), the others with "
    "those and the drafter's. No second model with this vocabulary is at hand: the drafters are the model's "
    "own first layers with its norm and head. They are real, and were never trained to end there; of 30 "
    "layers, the first 6 give the model's next token for 9 % of a text's tokens, the first 24 for 37 %. "
    f"Another drafter is the first {FITTED_LAYERS} layers with an output head of its own, fitted by ridge "
    f"regression to some {FITTED_TOKENS:,} tokens of the model's own answers, which "
    "`python -m eval.fit_head` keeps. "
    "Tokens per pass are counted, not timed; but the controller looks at measured times, so they vary by a "
    "few passes."
)
