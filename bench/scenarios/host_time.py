"""What decoding costs the host for each token, beside mlx-lm's own loop, in every way to decode."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Figure, Taking, alternated, at_most
from bench.harness.child import Child
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples

TOKENS, PROMPT = 1024, 40
STREAMS = 4
# Next to no compute, and the vocabulary of the default model, whose logits are most of the compute.
VOCABULARIES = (512, 49_152)
_SIDES = ("stream_generate", "BatchGenerator", "fleetd")


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to decode; ``bar``: how many times as long as mlx-lm a token may take."""

    title: str
    bar: float
    streams: int = 1
    temperature: float = 0.0
    drafts: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        return _SIDES if self.streams > 1 else ("stream_generate", "fleetd")


MODES = (
    Mode("alone, greedy", 1.0),
    Mode("alone, greedy, drafts on but none found", 1.1, drafts=True),
    Mode("alone, temperature 0.8", 1.1, temperature=0.8),
    Mode("alone, temperature 0.8, drafts on but none found", 1.1, temperature=0.8, drafts=True),
    Mode(f"{STREAMS} answers, greedy", 1.1, streams=STREAMS),
    Mode(f"{STREAMS} answers, temperature 0.8", 1.1, streams=STREAMS, temperature=0.8),
)


def measure(runs: int) -> Taking:
    return Taking(_taken(runs), _HOW)


def _taken(runs: int) -> Iterator[Figure]:
    seen = Samples()
    for vocabulary in VOCABULARIES:
        with Child("host_time", "async", str(MODEL), str(vocabulary)) as child:
            _warm(child)
            for mode in MODES:
                for run in range(runs):
                    _ask(child, mode, run, vocabulary, seen)
                yield from _figures(mode, vocabulary, seen)


def _figures(mode: Mode, vocabulary: int, seen: Samples) -> list[Figure]:
    key = f"{mode.title}, vocabulary of {vocabulary}"
    each_ms = 1e3 * statistics.median(seen[key, "fleetd"])
    found = sum(seen[key, "drafted"])
    note = f"{each_ms:.2f} ms" + (f"; {found:.0f} tokens were drafted" if mode.drafts and found else "")
    figures = [
        Figure(
            f"A token, {key}" + (f", over {side}" if mode.streams > 1 else ""),
            "x",
            seen.ratios((key, "fleetd"), (key, side)),
            at_most(mode.bar),
            note=note,
        )
        for side in mode.sides
        if side != "fleetd"
    ]
    host = seen.ratios((key, "fleetd", "host"), (key, mode.sides[-2], "host"))
    host_ms = 1e3 * statistics.median(seen[key, "fleetd", "host"])
    return [*figures, Figure(f"Of it Python's own thread, {key}", "x", host, note=f"{host_ms:.2f} ms")]


def _warm(child: Child) -> None:
    for side in _SIDES:
        child.ask(prompts=[[1, 2, 3]], max_tokens=8, temperature=0.0, side=side, drafts=False)


def _ask(child: Child, mode: Mode, run: int, vocabulary: int, seen: Samples) -> None:
    dice = random.Random(run)
    prompts = [[dice.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(mode.streams)]
    key = f"{mode.title}, vocabulary of {vocabulary}"
    # The ids begin anew behind the last one, and what is there twice can be drafted from.
    tokens = min(TOKENS, vocabulary - 2 * PROMPT)
    for side in alternated(run, mode.sides):
        said = child.ask(
            prompts=prompts, max_tokens=tokens, temperature=mode.temperature, side=side, drafts=mode.drafts
        )
        seen[key, side].append(said["each_s"])
        seen[key, side, "host"].append(said["host_s"])
        if side == "fleetd":
            seen[key, "drafted"].append(said["drafted"])


_HOW = (
    "One process, a model of 2 layers that are 64 wide, and all programs in turn on the same prompts: "
    "mlx-lm's `stream_generate` with the first of them, its `BatchGenerator` where there are several, and "
    "the engine's scheduler, whose reports go through a socket to another process. "
    f"{TOKENS:,} tokens per answer, {VOCABULARIES[0] - 2 * PROMPT} with the small vocabulary; each figure is "
    "the median step's time per token, as a share of mlx-lm's in the same run. Python's own thread is what "
    "computes on the host: its processor time, without its waits for MLX. MLX computes in a thread of its "
    "own, without fleetd's CPU path, so the host runs beside it as it does beside a GPU, on two idle cores. "
    "Each token is followed by the next id: the text has no repetition to draft from. No grammar is used."
)
