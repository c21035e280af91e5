"""Speculative decoding against plain decoding of the same prompts, in one run, with the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, ratios
from bench.harness import prompts, repetitive_prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL

QUICK_RUNS = 1
TOKENS = 128
# As in the published loss.
PUBLISHED_TOKENS = 48
# So few tokens take three seconds, and a machine's pace varies by a tenth over three seconds.
PUBLISHED_TRIES = 4
_PAIRS = ("plain", "auto")


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two sides say different things: then nothing is worth measuring."""
    with Child("speculation", str(MODEL)) as child:
        child.ask(mode="plain", prompts=[[1, 2, 3]], max_tokens=8)
        seen = _Seen(child)
        for run in range(runs):
            for name, words in repetitive_prompts.REPETITIVE.items():
                seen.pair(run, name, [words])
            for name, several in repetitive_prompts.TOGETHER.items():
                seen.pair(run, name, several)
            openings = repetitive_prompts.FREE if runs > QUICK_RUNS else repetitive_prompts.FREE[:3]
            for temperature in (0.0, 0.8):
                for words in openings:
                    seen.pair(run, f"free text {temperature}", [words], temperature)
            for n in range(PUBLISHED_TRIES if runs > QUICK_RUNS else 1):
                seen.published(run + n)
            seen.idle(run)
        return Measured(seen.figures(), _HOW)


class _Seen:
    """All runs' figures by name."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._per_pass: dict[str, list[float]] = {}
        self._acceptance: dict[str, list[float]] = {}
        self._ours: list[float] = []
        self._theirs: list[float] = []
        self._plain: list[float] = []
        self._their_tokens: list[float] = []
        self._our_passes = ""
        self._probes: list[float] = []
        self._idle: list[float] = []
        self._held: list[float] = []
        self._verdict: dict[str, Any] = {}

    def pair(self, run: int, name: str, words: Sequence[str], temperature: float = 0.0) -> None:
        said: dict[str, dict[str, Any]] = {}
        for mode in alternated(run, _PAIRS):
            said[mode] = self._ask(mode, words, TOKENS, temperature)
            self._rates.setdefault((name, mode), []).append(said[mode]["rate"])
        for asked, plain, auto in zip(words, said["plain"]["answers"], said["auto"]["answers"], strict=True):
            if (plain["text"], plain["logprobs"]) != (auto["text"], auto["logprobs"]):
                raise RuntimeError(f"{name}: drafts changed the answer to {asked[-40:]!r}")
            self._per_pass.setdefault(name, []).append(auto["tokens"] / auto["passes"])
            if auto["drafted"]:
                self._acceptance.setdefault(name, []).append(auto["accepted"] / auto["drafted"])

    def published(self, run: int) -> None:
        words = repetitive_prompts.FREE[4]
        rates: dict[str, float] = {}
        for mode in alternated(run, ("plain", "published", "auto")):
            said = self._ask(mode, [words], PUBLISHED_TOKENS)
            rates[mode] = said["rate"]
            if mode == "published":
                self._their_tokens.append(2 * said["tokens"] / said["passes"])
            if mode == "auto":
                (answer,) = said["answers"]
                self._our_passes = f"{answer['passes']} passes, {answer['accepted']} of {answer['drafted']}"
        self._plain.append(rates["plain"])
        self._ours.append(rates["auto"])
        self._theirs.append(rates["published"])

    def idle(self, run: int) -> None:
        self._verdict = self._child.ask(mode="verdict")
        self._probes.append(self._verdict["probe_s"])
        tokens = prompts.tokens(MODEL, run, 3000)
        cost = self._child.ask(mode="idle", tokens=tokens[:1024], answer=tokens[1024:])
        self._idle.append(cost["each_s"] / self._verdict["step_s"])
        block = self._verdict["row_bytes"] * self._verdict["width"]
        self._held.append((cost["held_bytes"] + block) / 1e6)

    def figures(self) -> list[Figure]:
        figures = []
        for name in repetitive_prompts.REPETITIVE:
            rates = self._ratios(name)
            note = (
                f"{_mean(self._per_pass[name]):.1f} tokens per pass, "
                f"{100 * _mean(self._acceptance.get(name, [0.0])):.0f} % of drafts accepted"
            )
            figures.append(Figure(f"Decode, {name}, times plain", "x", rates, at_least(1.6), note=note))
        figures += [
            Figure(f"Decode, {name}, times plain in a batch", "x", self._ratios(name), at_least(0.98))
            for name in repetitive_prompts.TOGETHER
        ]
        for kind, temperature in (("greedy", 0.0), ("sampled at 0.8", 0.8)):
            name = f"free text {temperature}"
            figures.append(
                Figure(f"Decode, free text, {kind}, times plain", "x", self._ratios(name), at_least(0.98))
            )
        curve = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in self._verdict["curve"].items())
        return [
            *figures,
            Figure("Looking for drafts that are not used, share of a step", "%", self._idle, at_most(0.005)),
            Figure(
                "Memory of the verifier, 1024 tokens of context",
                "MB",
                self._held,
                note="sources' indexes, and logits and KV rows of the widest block",
            ),
            Figure("Probe at load", "s", self._probes, note=self._verdict["text"]),
            Figure(
                "A published loss, times plain",
                "x",
                ratios(self._theirs, self._plain),
                note="blocks of 4 padded with token 0, n-grams from one token, two passes per round, always "
                f"on: {_mean(self._their_tokens):.2f} tokens per round here; published: 31.13 to 15.76 "
                "tok/s, 0.51 times plain at 1.06 tokens per round",
            ),
            Figure(
                "The same prompt as shipped, times plain",
                "x",
                ratios(self._ours, self._plain),
                at_least(0.98),
                note=f"{PUBLISHED_TOKENS} tokens in {self._our_passes} drafts right",
            ),
            Figure("Decode, plain", "tok/s", self._plain, note=f"tv(n)/t1 of n tokens in a pass: {curve}"),
        ]

    def _ask(self, mode: str, words: Sequence[str], tokens: int, temperature: float = 0.0) -> dict[str, Any]:
        return self._child.ask(
            mode=mode,
            prompts=[prompts.encoded(MODEL, each) for each in words],
            max_tokens=tokens,
            temperature=temperature,
        )

    def _ratios(self, name: str) -> list[float]:
        return ratios(self._rates[name, "auto"], self._rates[name, "plain"])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_HOW = (
    f"One process with the engine's own scheduler and the default model, {TOKENS} tokens per answer; each "
    "prompt plain and with drafts in turn, from the first to the last pass; of several at once all their "
    "tokens, from the first of any. Sources are the local ones: prompt lookup and the suffix "
    "automaton. Text and log-probabilities of both sides are compared and are "
    "equal, or nothing is reported. The cost of looking for drafts is timed by itself, over 2000 tokens "
    "without any repetition: it is too small to be seen in the difference of two answers."
)
