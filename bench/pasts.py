"""What answers of another machine add to drafts, against this machine's own past answers and none at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from bench import pasts_prompts, prompts
from bench.figures import Figure, Measured, alternated, ratios
from bench.pasts_prompts import Turn
from bench.throwaway import MODEL
from fleetd import observe
from fleetd.engine.protocol import Delta, Finished, Generate, Remember, Sampling, Speculate, TokenPrompt
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.spec.suffix import past_key
from fleetd.engine.supervisor import EngineProcess
from fleetd.models.catalog import DEFAULT_MODEL

TITLE = "Past answers told between machines"
RUNS, QUICK_RUNS = 2, 1
TOKENS = 128
# A worker takes up what it is told in its next turn without work.
_TAKEN_UP_S = 0.5
_SIDES = ("none", "own", "told")
_WORKLOADS: dict[str, tuple[Callable[[], list[Turn]], str]] = {
    "a coding session": (
        pasts_prompts.session,
        "the realistic one: six files, two renames in each on each machine, the file in every prompt",
    ),
    "a question in other words": (
        pasts_prompts.other_words,
        "six functions asked for without their text in the prompt; kind to the feature",
    ),
    "the same question": (
        pasts_prompts.same_words,
        "the same six prompts on both machines: the answer is known token by token; the upper bound",
    ),
}


@dataclass(slots=True)
class _Sums:
    """Of one side's answers in one run."""

    tokens: int = 0
    passes: int = 0
    decode_s: float = 0.0
    answers: int = 0

    def add(self, finished: Finished) -> None:
        told = finished.speculation
        count = finished.usage.completion_tokens
        self.tokens += count
        self.passes += told.passes if told is not None else count
        self.decode_s += finished.timings.decode_s
        self.answers += 1


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two sides say different things: then nothing is worth measuring."""
    observe.configure("warning")  # the supervisor of the workers is in this process
    return asyncio.run(_measure(runs))


async def _measure(runs: int) -> Measured:
    seen: dict[tuple[str, str], list[_Sums]] = {}
    async with _worker() as there, _worker() as here:
        for name, (build, _) in _WORKLOADS.items():
            turns = build()
            # Greedy, so the other machine's answers are the same in each run.
            answers = [(await _ask(there, turn.there, "there"))[1].ids for turn in turns]
            for run in range(runs):
                sums = {side: _Sums() for side in _SIDES}
                for turn, answer in zip(turns, answers, strict=True):
                    await _turn(here, turn, answer, sums, f"{name} {run}")
                for side in _SIDES:
                    seen.setdefault((name, side), []).append(sums[side])
    return Measured([figure for name in _WORKLOADS for figure in _figures(name, seen)], _HOW)


async def _turn(
    here: EngineProcess, turn: Turn, answer: list[int], sums: dict[str, _Sums], session: str
) -> None:
    """The other machine's ``answer`` is told to one side; then all sides answer the same prompt."""
    here.remember(Remember(past_key(f"{session} told"), answer))
    await asyncio.sleep(_TAKEN_UP_S)
    texts = set()
    at = sums["none"].answers
    for side in alternated(at, _SIDES):
        # A key that comes only once has no past.
        key = f"{session} {side}" + (f" {at}" if side == "none" else "")
        text, finished = await _ask(here, turn.here, key)
        sums[side].add(finished)
        texts.add(text)
    if len(texts) != 1:
        raise RuntimeError(f"drafts changed the answer to {turn.here[-60:]!r}")


def _figures(name: str, seen: dict[tuple[str, str], list[_Sums]]) -> list[Figure]:
    def per_pass(side: str) -> list[float]:
        return [one.tokens / one.passes for one in seen[name, side]]

    def rate(side: str) -> list[float]:
        return [one.tokens / one.decode_s for one in seen[name, side]]

    first = seen[name, "none"][0]
    counts = ", ".join(f"{side} {per_pass(side)[0]:.2f}" for side in _SIDES)
    note = (
        f"{_WORKLOADS[name][1]}; {first.answers} answers of {first.tokens / first.answers:.0f} tokens; "
        f"tokens per pass in the first run: {counts}"
    )
    return [
        Figure(
            f"Tokens per pass, {name}, told over own",
            "x",
            ratios(per_pass("told"), per_pass("own")),
            note=note,
        ),
        Figure(f"Tokens per pass, {name}, own over none", "x", ratios(per_pass("own"), per_pass("none"))),
        Figure(f"Decode, {name}, told over own", "x", ratios(rate("told"), rate("own"))),
        Figure(f"Decode, {name}, own over none", "x", ratios(rate("own"), rate("none"))),
        Figure(f"Decode, {name}, no past answers", "tok/s", rate("none")),
    ]


async def _ask(engine: EngineProcess, words: str, key: str) -> tuple[str, Finished]:
    request = Generate(
        f"bench-{next(_NUMBERS)}",
        TokenPrompt(prompts.encoded(MODEL, words)),
        Sampling(temperature=0.0),
        TOKENS,
        stop=["```"],
        speculate=Speculate(key=key),
        ids=True,
    )
    text = ""
    async for event in engine.stream(request):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Finished):
            return text, event
    raise RuntimeError("an answer ended without its end")


@contextlib.asynccontextmanager
async def _worker() -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(
        WorkerSettings(name=DEFAULT_MODEL, path=str(MODEL), threads=1, remember_answers=True)
    )
    await engine.start()
    try:
        async for _ in engine.loaded():
            pass
        yield engine
    finally:
        await engine.stop()


_NUMBERS = itertools.count()
_HOW = (
    f"Two workers with the default model, one thread each, greedy, at most {TOKENS} tokens. For each prompt "
    "the other machine answers first; then this one answers a prompt of its own three times, in turns: with "
    "a key without past answers (none), with its own answers of the session (own), and with those and the "
    "other machine's (told). Drafts from prompt and answer are on everywhere, and the controller is as "
    "shipped. Tokens per pass hardly depend on what else the machine computes; times do. All sides' texts "
    "are compared and are equal, or nothing is reported."
)
