"""Speculative decoding against plain decoding of the same prompts, in one run, with the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile, rotated
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL
from bench.harness.repetitive_prompts import FREE, REPETITIVE, TOGETHER
from bench.harness.samples import Samples

QUICK_RUNS = 1
TOKENS = 128
PROMPT, PREFILLS = 2048, 4
# Layers whose hidden states are noted: an MTP head's, and as many as block drafters read.
TAPS = {"the last layer": [-1], "five layers": [1, 8, 15, 22, 28]}
# As in the published loss.
PUBLISHED_TOKENS = 48
# So few tokens take three seconds, and a machine's pace varies by a tenth over three seconds.
PUBLISHED_TRIES = 4
_PAIRS = ("plain", "auto")
# Of free text, where drafts are mostly wrong, plain decoding is held against itself too.
_NOISE = ("plain", "auto", "again")


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two sides say different things: then nothing is worth measuring."""
    with Child("speculation", str(MODEL)) as child:
        child.ask(mode="plain", prompts=[[1, 2, 3]], max_tokens=8)
        look = _Look(child)
        for run in range(runs):
            for name, words in REPETITIVE.items():
                look.pair(run, name, [words])
            for name, several in TOGETHER.items():
                look.pair(run, name, several)
            for temperature in (0.0, 0.8):
                for words in FREE if runs > QUICK_RUNS else FREE[:3]:
                    look.pair(run, f"free text {temperature}", [words], temperature, _NOISE)
            for n in range(PUBLISHED_TRIES if runs > QUICK_RUNS else 1):
                look.published(run + n)
            look.idle(run)
            for n in range(PREFILLS if runs > QUICK_RUNS else 1):
                look.taps(run * PREFILLS + n)
        return Measured(look.figures(), _HOW)


class _Look:
    """Asks the child, and keeps all runs' figures by name."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._seen = Samples()
        self._our_passes = ""
        self._verdict: dict[str, Any] = {}

    def pair(
        self,
        run: int,
        name: str,
        words: Sequence[str],
        temperature: float = 0.0,
        sides: Sequence[str] = _PAIRS,
    ) -> None:
        said: dict[str, dict[str, Any]] = {}
        for side in alternated(run, sides):
            said[side] = self._ask("auto" if side == "auto" else "plain", words, TOKENS, temperature)
            self._seen[name, side].append(said[side]["rate"])
        self._seen[name, "priced"].append(said["auto"]["priced"])
        for asked, plain, auto in zip(words, said["plain"]["answers"], said["auto"]["answers"], strict=True):
            if (plain["text"], plain["logprobs"]) != (auto["text"], auto["logprobs"]):
                raise RuntimeError(f"{name}: drafts changed the answer to {asked[-40:]!r}")
            self._seen[name, "per pass"].append(auto["tokens"] / auto["passes"])
            if auto["drafted"]:
                self._seen[name, "accepted"].append(auto["accepted"] / auto["drafted"])

    def published(self, run: int) -> None:
        for mode in alternated(run, ("plain", "published", "auto")):
            said = self._ask(mode, [FREE[4]], PUBLISHED_TOKENS)
            self._seen[mode].append(said["rate"])
            if mode == "published":
                self._seen.add(their_tokens=2 * said["tokens"] / said["passes"])
            if mode == "auto":
                (answer,) = said["answers"]
                self._our_passes = f"{answer['passes']} passes, {answer['accepted']} of {answer['drafted']}"

    def idle(self, run: int) -> None:
        self._verdict = self._child.ask(mode="verdict")
        tokens = prompts.tokens(MODEL, run, 3000)
        cost = self._child.ask(mode="idle", tokens=tokens[:1024], answer=tokens[1024:])
        block = self._verdict["row_bytes"] * self._verdict["width"]
        self._seen.add(
            probe_s=self._verdict["probe_s"],
            idle=cost["each_s"] / self._verdict["step_s"],
            held_mb=(cost["held_bytes"] + block) / 1e6,
        )

    def taps(self, run: int) -> None:
        tokens = prompts.tokens(MODEL, run, PROMPT)
        for name, layers in rotated(run, [("no layer", list[int]()), *TAPS.items()]):
            said = self._child.ask(mode="taps", prompts=[tokens], layers=layers)
            self._seen["taps", name].append(said["seconds"])

    def figures(self) -> list[Figure]:
        seen, figures = self._seen, []
        for name in REPETITIVE:
            note = (
                f"{_mean(seen[name, 'per pass']):.1f} tokens per pass, "
                f"{100 * _mean(seen[name, 'accepted']):.0f} % of drafts accepted"
            )
            title = f"Decode, {name}, times plain"
            figures.append(Figure(title, "x", self._ratios(name), at_least(1.6), note=note))
        titles = {name: f"{name}, times plain in a batch" for name in TOGETHER}
        titles |= {"free text 0.0": "free text, greedy, times plain"}
        titles |= {"free text 0.8": "free text, sampled at 0.8, times plain"}
        for name, title in titles.items():
            figures.append(Figure(f"Decode, {title}", "x", self._ratios(name), at_least(0.98)))
            if name not in TOGETHER:
                figures += self._slowest(name, title)
        curve = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in self._verdict["curve"].items())
        looking = "Looking for drafts that are not used, share of a step"
        return [
            *figures,
            Figure(looking, "%", seen["idle"], at_most(0.005)),
            *(
                Figure(
                    f"Noting hidden states of {name}, share of a prompt of {PROMPT:,} tokens",
                    "%",
                    [ratio - 1 for ratio in seen.ratios(("taps", name), ("taps", "no layer"))],
                    at_most(0.01),
                    note="for drafters that read them; 0 where none does",
                )
                for name in TAPS
            ),
            Figure(
                "Memory of the verifier, 1024 tokens of context",
                "MB",
                seen["held_mb"],
                note="sources' indexes, and logits and KV rows of the widest block",
            ),
            Figure("Probe at load", "s", seen["probe_s"], note=self._verdict["text"]),
            Figure(
                "A published loss, times plain",
                "x",
                seen.ratios("published", "plain"),
                note="blocks of 4 padded with token 0, n-grams from one token, two passes per round, always "
                f"on: {_mean(seen['their_tokens']):.2f} tokens per round here; published: 31.13 to 15.76 "
                "tok/s, 0.51 times plain at 1.06 tokens per round",
            ),
            Figure(
                "The same prompt as shipped, times plain",
                "x",
                seen.ratios("auto", "plain"),
                at_least(0.98),
                note=f"{PUBLISHED_TOKENS} tokens in {self._our_passes} drafts right",
            ),
            Figure("Decode, plain", "tok/s", seen["plain"], note=f"tv(n)/t1 of n tokens in a pass: {curve}"),
        ]

    def _slowest(self, name: str, title: str) -> list[Figure]:
        """The tenth of the answers that drafts help least."""
        priced, clock = self._seen[name, "priced"], self._ratios(name)
        noise = percentile(self._seen.ratios((name, "again"), (name, "plain")), 0.1)
        slowest = percentile(clock, 0.1)
        note = f"of {len(clock)} answers; plain decoding against itself: {noise:.2f}"
        return [
            Figure(
                f"Decode, {title}, p10, passes as the probe priced them",
                "x",
                [percentile(priced, 0.1)],
                at_least(0.98),
                note=f"of {len(priced)} answers; the worst: {min(priced):.3f}",
            ),
            Figure(f"Decode, {title}, p10 by the clock", "x", [slowest], note=note),
            Figure(
                f"Decode, {title}, p10 by the clock over plain decoding's own p10",
                "x",
                [slowest / noise],
                at_least(0.98),
            ),
        ]

    def _ask(self, mode: str, words: Sequence[str], tokens: int, temperature: float = 0.0) -> dict[str, Any]:
        encoded = [prompts.encoded(MODEL, each) for each in words]
        return self._child.ask(mode=mode, prompts=encoded, max_tokens=tokens, temperature=temperature)

    def _ratios(self, name: str) -> list[float]:
        return self._seen.ratios((name, "auto"), (name, "plain"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


_HOW = (
    f"One process with the engine's own scheduler and the default model, {TOKENS} tokens per answer; each "
    "prompt plain and with drafts in turn, from the first to the last pass; of several at once all their "
    "tokens, from the first of any. Sources are the local ones: prompt lookup and the suffix "
    "automaton. Text and log-probabilities of both sides are compared and are "
    "equal, or nothing is reported. Rows are medians (p50); for free text the slowest tenth of the answers "
    "stands below. The clock sees the machine's own pace there, by as much as plain decoding differs from "
    "itself, so one bar is on the passes that were made, each at what the probe measured for its width, and "
    "one on the clock's p10 over that of plain decoding against itself. The "
    "cost of looking for drafts is timed by itself, over 2000 tokens "
    "without any repetition: it is too small to be seen in the difference of two answers."
)
