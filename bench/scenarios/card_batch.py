"""Several answers at once on one accelerator, beside the same alone and beside mlx-lm's batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.figures import Figure, NotMeasured, Taking
from bench.harness import card_models, prompts
from bench.harness.card_parts import MeasuredParts
from bench.harness.child import Child
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon

NAMES = ("dense-4b-4bit", "dense-4b-bf16")
COUNTS = (16, 4, 8)
MOST = max(COUNTS)
TOKENS, SMALL_TOKENS = 128, 24
PROMPT = 24
# Tokens of a piece of text, at most, on average.
_PIECES = 4
# Finds the kernels of so many answers.
WARM_TOKENS = 8

Ask = Callable[[Sequence[list[int]], int], list[Heard]]


def measure(runs: int) -> Taking:
    parts = MeasuredParts()
    return Taking(parts.of(_all(parts, runs)), _HOW)


def _all(parts: MeasuredParts, runs: int) -> Iterator[Figure]:
    for name in NAMES:
        with parts.part(name):
            yield from _model(name, runs)


def _model(name: str, runs: int) -> Iterator[Figure]:
    begun = time.monotonic()
    folder = card_models.made(name)
    asked = [prompts.tokens(MODEL, 54_000 + i, PROMPT) for i in range(MOST)]
    tokens = SMALL_TOKENS if card_models.small() else TOKENS
    together: dict[int, list[float]] = {}
    with (
        Daemon(
            models=folder,
            FLEETD_MODELS_DEFAULT=name,
            FLEETD_ENGINE_MAX_STREAMS=str(MOST),
            FLEETD_ENGINE_PREFIX_CACHE_BYTES="1",
        ) as daemon,
        ThreadPoolExecutor(MOST) as clients,
    ):

        def ask(prompts: Sequence[list[int]], tokens: int) -> list[Heard]:
            return list(
                clients.map(lambda p: daemon.complete(p, tokens, model=name, speculate=False), prompts)
            )

        daemon.warm(name)
        print(f"  {name}: loaded after {time.monotonic() - begun:.0f} s", flush=True)
        ask(asked[:1], WARM_TOKENS)
        alone = [timed(ask([prompt], tokens)[0]) for prompt in asked]
        one = statistics.median(answer.rate for answer in alone)
        yield Figure(f"{name}: decode, one answer", "tok/s", [one], note=f"{1e3 / one:.1f} ms a step")
        for count in COUNTS:
            together[count] = []
            yield from _together(name, count, alone[:count], one, runs, together[count], asked[:count], ask)
    yield from _beside(name, folder / name, asked, tokens, together)


def _together(
    name: str,
    count: int,
    alone: Sequence[Heard],
    one: float,
    runs: int,
    rates: list[float],
    asked: Sequence[list[int]],
    ask: Ask,
) -> Iterator[Figure]:
    ask(asked, WARM_TOKENS)
    same, steps_s = list[float](), list[float]()
    for _ in range(runs):
        answers = list(map(timed, ask(asked, max(answer.count for answer in alone))))
        rates.append(rate(answers))
        same += [a.text == b.text and a.count == b.count for a, b in zip(alone, answers, strict=True)]
        steps_s.append(1 / statistics.median(answer.steady_rate for answer in answers))
    title = f"{name}: {count} answers at once"
    yield Figure(f"{title}, together", "tok/s", list(rates))
    yield Figure(f"{title}, a step of all", "ms", [1e3 * each for each in steps_s])
    yield Figure(f"{title} over one", "x", [each / one for each in rates])
    told = f"text and number of tokens, {len(same)} pairs"
    yield Figure(f"{title}, equal to the same alone", "%", [sum(same) / len(same)], note=told)


def timed(answer: Heard) -> Heard:
    """The answer. Raises NotMeasured if its text does not tell when its tokens came: random weights may write
    what is shown only at the end."""
    if len(answer.text_s) < max(2, answer.count // _PIECES):
        raise NotMeasured(f"{answer.count} tokens came as {len(answer.text_s)} pieces of text")
    return answer


def rate(answers: Sequence[Heard]) -> float:
    """All tokens but each answer's first, over the time from the first one of any to the last one of any."""
    begun = min(answer.sent + answer.text_s[0] for answer in answers)
    ended = max(answer.sent + answer.text_s[-1] for answer in answers)
    return sum(answer.count - 1 for answer in answers) / (ended - begun)


def _beside(
    name: str,
    folder: Path,
    asked: Sequence[list[int]],
    tokens: int,
    together: dict[int, list[float]],
) -> Iterator[Figure]:
    with Child("mlx_lm", "cured", str(folder)) as child:
        for count, rates in together.items():
            child.ask(batch=asked[:count], max_tokens=WARM_TOKENS)
            theirs = child.ask(batch=asked[:count], max_tokens=tokens)
            ours = statistics.median(rates)
            note = f"{ours:,.0f} against {theirs['tok_s']:,.0f} tok/s; "
            note += f"a step of all of theirs takes {1e3 * theirs['step_s']:.1f} ms"
            title = f"{name}: {count} answers at once, fleetd through HTTP over mlx-lm's BatchGenerator"
            yield Figure(title, "x", [ours / theirs["tok_s"]], note=note)


_HOW = (
    f"One daemon, asked through HTTP, no drafts and no prefix cache: {MOST} prompts of {PROMPT} tokens, "
    f"greedy, {TOKENS} tokens each, one after the other and then several at once. Together: all tokens "
    "but each answer's first, over the time from the very first token of any to the very last; the "
    "answers' prefill after the first one's is within it. mlx-lm's `BatchGenerator` has the same "
    "prompts in a process of its own, after the daemon has ended, without HTTP; its time begins with "
    "its first tokens, too."
)
