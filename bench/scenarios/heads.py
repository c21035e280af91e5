"""A head that is fitted to the default model: decode with it, with n-grams, and with both, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Figure, Measured, at_least, at_most, percentile, rotated
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import FITTED, MODEL
from bench.harness.samples import Samples
from eval.head_prompts import KINDS, Kind, held_out
from fleetd.engine.speculation.local_sources import LOCAL_NAMES, MTP
from fleetd.models.weights import HEAD_NAME

TOKENS = 96
PROMPT, PREFILLS = 2048, 4
# Times n-grams alone, as the issue of a head that pays would have it.
_BARS: dict[Kind, float] = {"text": 1.4, "code": 1.6}
_NAMES: dict[Kind, str] = {"text": "free text", "code": "code"}
_GRAMS: list[str] = [*LOCAL_NAMES]
_SIDES: dict[str, list[str]] = {"plain": [], "n-grams": _GRAMS, "head": [MTP], "both": [*_GRAMS, MTP]}
# What has a bar is measured for each prompt; the others for every second one, in turns.
_ALWAYS, _IN_TURNS = ("n-grams", "both"), ("plain", "head")


def measure(runs: int) -> Measured:
    """Raises RuntimeError if there is no fitted head, or if two sides say different things."""
    if not (FITTED / HEAD_NAME).is_file():
        raise RuntimeError("no head is fitted: python -m eval.fit_head")
    with Child("speculation", str(FITTED)) as child:
        head = child.ask(mode="head")["text"]
        if not head.startswith(MTP):
            raise RuntimeError(f"the head is not used: {head}")
        child.ask(mode="plain", prompts=[[1, 2, 3]], max_tokens=8)
        seen = Samples()
        for run in range(runs):
            for turn, prompt in enumerate(held_out(), run):
                _answers(child, seen, turn, prompt.kind, prompt.text)
            for n in range(PREFILLS):
                _prefill(child, seen, run + n)
        return Measured(figures(seen, head), _HOW)


def figures(seen: Samples, head: str) -> list[Figure]:
    """What was seen: of each kind and side its rates, and how many drafts were right."""
    found = []
    for kind in KINDS:
        decode = f"Decode, {_NAMES[kind]}"
        for side in ("head", "both"):
            over = seen[kind, side, "times"]
            with_what = "with the head and n-grams" if side == "both" else "with the head alone"
            title, note = f"{decode}, {with_what}, times n-grams alone", _drafts(seen, kind, side)
            bar = at_least(_BARS[kind]) if side == "both" else None
            found.append(Figure(title, "x", over, bar, note=note))
            if side == "both":
                slowest = [percentile(over, 0.1)]
                found.append(Figure(f"{title}, p10 of the answers", "x", slowest, at_least(0.98)))
        note = _drafts(seen, kind, "n-grams")
        against = [1 / times for times in seen[kind, "plain", "times"]]
        found.append(Figure(f"{decode}, with n-grams alone, times plain", "x", against, note=note))
        found.append(Figure(f"{decode}, plain", "tok/s", seen[kind, "plain"]))
    taps = [tapped / without - 1 for tapped, without in zip(seen["tapped"], seen["untapped"], strict=True)]
    title = f"Noting hidden states for the head, share of a prompt of {PROMPT} tokens"
    return [*found, Figure(title, "%", taps, at_most(0.01), note=f"the head: {head}")]


def _answers(child: Child, seen: Samples, turn: int, kind: Kind, words: str) -> None:
    """One prompt's answers; ``times`` is a side's rate over that of n-grams alone for the same prompt."""
    said: dict[str, dict[str, Any]] = {}
    for side in rotated(turn, [*_ALWAYS, _IN_TURNS[turn % len(_IN_TURNS)]]):
        mode = "plain" if side == "plain" else "auto"
        said[side] = child.ask(mode=mode, asked=[words], max_tokens=TOKENS, sources=_SIDES[side])
        (answer,) = said[side]["answers"]
        seen[kind, side].append(said[side]["rate"])
        seen[kind, side, "per pass"].append(answer["tokens"] / answer["passes"])
        if answer["drafted"]:
            seen[kind, side, "right"].append(answer["accepted"] / answer["drafted"])
    for side, each in said.items():
        seen[kind, side, "times"].append(each["rate"] / said["n-grams"]["rate"])
    if len({tuple(each["answers"][0]["logprobs"]) for each in said.values()}) != 1:
        raise RuntimeError(f"drafts changed the answer to {words!r}")


def _prefill(child: Child, seen: Samples, run: int) -> None:
    tokens = prompts.tokens(MODEL, run, PROMPT)
    for name, sources in rotated(run, [("tapped", [MTP]), ("untapped", _GRAMS)]):
        seen[name].append(child.ask(mode="prefill", prompts=[tokens], sources=sources)["first_s"])


def _drafts(seen: Samples, kind: Kind, side: str) -> str:
    right, per_pass = _mean(seen[kind, side, "right"]), _mean(seen[kind, side, "per pass"])
    return f"{per_pass:.2f} tokens per pass, {100 * right:.0f} % of drafts right"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


_HOW = (
    "One process with the engine's own scheduler and the default model, beside whose weights lies the head "
    f"that `python -m eval.fit_head` fits to it; greedy, {TOKENS} tokens per answer, to prompts of subjects "
    "and jobs that the head was not fitted to. N-grams alone, and beside the head, answer each prompt; the "
    "head alone and plain decoding every second one. Sides go first in turns, with the controller as it is "
    "by default, and their log-probabilities are equal, or nothing is reported. N-grams are prompt "
    "lookup and the suffix automaton. Ratios are formed within one prompt and run."
)
