"""What `doctor --prove` measures, of models of several kinds: verdicts, and the engine beside mlx-lm."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from bench.figures import Figure, Taking
from bench.harness import card_models
from bench.harness.card_parts import MeasuredParts
from fleetctl.doctor import prove
from fleetd.control.hardware_proof import HardwareProof, SpeedProof, WidthProof

# Seconds of each step, in their order; the load before them takes what it takes.
_WHOLE = {"decode": 6.0, "prefill": 4.0, "chunks": 4.0, "shared": 3.0, "widths": 6.0}
_SHORT = {"decode": 4.0, "prefill": 3.0, "shared": 3.0, "chunks": 2.0, "widths": 2.0}
STEPS: Mapping[str, Mapping[str, float]] = {
    "dense-4b-bf16": _WHOLE,
    "dense-4b-4bit": _SHORT,
    "moe-30b-a3b-4bit": _SHORT,
    "sliding-4b-4bit": _SHORT,
    # Last, for it goes token by token.
    "hybrid-4b-4bit": _SHORT,
}
# Of the smallest models of each kind: their verdicts are had soonest. mlx-lm has the kernel of running states
# for Metal only; elsewhere it goes token by token.
VERDICTS: Mapping[str, Mapping[str, float]] = {
    f"{shape}-{bits}": {"widths": 4.0} for bits in ("bf16", "4bit") for shape in ("sliding-1b", "hybrid-0.8b")
}
# Of tiny models, whose figures mean nothing.
_SMALL_SHARE = 0.05
# Of one model: a load that hangs ends alone.
_LIMIT_S = 75.0
PASSES = (2, 4, 8, 16)


def measure(runs: int) -> Taking:
    return _taking(STEPS, _HOW, runs)


def verdicts(runs: int) -> Taking:
    return _taking(VERDICTS, _HOW_VERDICTS, runs)


def _taking(models: Mapping[str, Mapping[str, float]], how: str, runs: int) -> Taking:
    del runs  # each step takes as many as its time allows
    parts = MeasuredParts()
    return Taking(parts.of(_all(parts, models)), how)


def _all(parts: MeasuredParts, models: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    for name, steps in models.items():
        with parts.part(name):
            begun = time.monotonic()
            folder = card_models.made(name)
            print(f"  {name}: made in {time.monotonic() - begun:.0f} s", flush=True)
            share = _SMALL_SHARE if card_models.small() else 1.0
            budgets = [f"{step}={seconds * share:g}" for step, seconds in steps.items()]
            with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as home:
                command = [sys.executable, "-m", "fleetd.proof", "--home", home]
                command += ["--model", str(folder / name), "--steps", *budgets]
                yield from figures(name, prove.run(command, sys.stderr, _LIMIT_S), steps, parts)


def figures(name: str, lines: Iterable[str], wanted: Iterable[str], parts: MeasuredParts) -> Iterator[Figure]:
    """Of each line of a proof as it comes. A step that failed, was skipped, gave no figure or never came is
    missed."""
    model, left = None, ["load", *wanted]
    for line in lines:
        if "step" not in json.loads(line):
            continue
        part = msgspec.convert(prove.collect([line], lambda _: None), HardwareProof)
        step = part.steps[0]
        if step.name not in left:
            continue
        left.remove(step.name)
        if why := step.error or step.skipped:
            parts.miss(f"{name}, {step.name}", why)
            continue
        print(f"  {name}: {step.name} took {step.seconds:.0f} s", flush=True)
        if step.name == "load":
            model = card_models.Reading.of(name, part.model.shape.weights_bytes, part.machine.device)
        found = list(_verdict(name, part) if step.name == "load" else _step(name, part, model))
        if not found:
            parts.miss(f"{name}, {step.name}", "it gave no figure")
        yield from found
    for step_name in left:
        parts.miss(f"{name}, {step_name}", "the process ended before it did")


def _verdict(name: str, part: HardwareProof) -> Iterator[Figure]:
    verdict, speed, machine = Verdict.of(part.model.speculation), part.model.speed, part.machine
    yield Figure(
        f"{name}: tokens of the widest pass with the bytes of single steps",
        "count",
        [verdict.width],
        note=f"{verdict.kind}: {verdict.text}",
    )
    gb = part.model.shape.weights_bytes / 1e9
    told = f"{gb:.1f} GB; {machine.accelerator}; {speed.prefill_tok_s:,.0f} tok/s of prefill and "
    told += f"{speed.decode_tok_s:,.0f} of decode were measured in it"
    yield Figure(f"{name}: load, with its measurements", "s", [part.model.load_s], note=told)


def _step(name: str, part: HardwareProof, model: card_models.Reading | None) -> Iterator[Figure]:
    if model is None:
        return
    if part.widths:
        yield from _widths(name, part.widths)
    for chunk in part.chunks:
        title = f"{name}: prefill in chunks of {chunk.tokens:,} tokens"
        yield Figure(title, "tok/s", [chunk.tok_s], note=model.arithmetic(chunk.tok_s))
    for speed in part.speeds:
        yield _speed(name, speed, model)
    for shared in part.shared:
        if shared.same is not None:
            title = f"{name}: shared prefill by {shared.kind} with the bytes of a local one"
            yield Figure(title, "%", [float(shared.same)], note=f"{shared.tokens:,} tokens")


def _widths(name: str, widths: list[WidthProof]) -> Iterator[Figure]:
    contexts = sorted({width.context for width in widths})
    other = ", ".join(f"{width.width} at {width.context:,}" for width in widths if not width.same)
    rows = max(width.rows for width in widths)
    told = [f"contexts of {', '.join(f'{context:,}' for context in contexts)}", f"{len(widths)} tried"]
    told += [f"other bytes: {other}"] if other else []
    told += [f"single tokens as {rows} rows"] if rows > 1 else []
    yield Figure(
        f"{name}: widths of a pass that have the bytes of single steps",
        "%",
        [sum(width.same for width in widths) / len(widths)],
        note="; ".join(told),
    )
    for tokens in PASSES:
        # Its kernels are compiled in the first context; those that were not timed have 0.
        timed = [width.pass_s for width in widths if width.width == tokens and width.pass_s]
        if timed:
            note = f"the quickest of {len(timed)} contexts"
            yield Figure(f"{name}: a pass of {tokens} tokens", "ms", [1e3 * min(timed)], note=note)


def _speed(name: str, speed: SpeedProof, model: card_models.Reading) -> Figure:
    reads = speed.mode == "prefill"
    title = f"{name}: {'prefill' if reads else f'decode, {speed.mode}'}, fleetd over mlx-lm in one process"
    floor = model.arithmetic(speed.fleetd_tok_s) if reads else model.bandwidth(speed.fleetd_tok_s)
    told = [f"{speed.fleetd_tok_s:,.1f} against {speed.mlx_lm_tok_s:,.1f} tok/s", f"{speed.tokens:,} tokens"]
    told += [f"{speed.runs} runs by turns", *([floor] if floor else [])]
    return Figure(title, "x", [speed.ratio], note="; ".join(told))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the exactness probe said. ``kind``: "exact", "canonical width" or "declined"; ``width``: 1 if
    declined; ``text``: the rest of what it said."""

    kind: str
    width: int
    text: str

    @classmethod
    def of(cls, said: str) -> Verdict:
        """Raises ValueError if the words are not those of ``exactness_probe``."""
        kind, _, text = said.partition(": ")
        if kind == "declined":
            return cls(kind, 1, text)
        before, found, behind = text.partition("blocks of up to ")
        if kind != "exact" or before or not found:
            raise ValueError(said)
        wide = "single tokens are computed as" in text
        return cls("canonical width" if wide else kind, int(behind.partition(" ")[0]), text)


_HOW = (
    "Models of well-known shapes with random weights, one after the other, each by `python -m "
    "fleetd.proof` in a process of its own, with nothing kept from before but compiled kernels: load with "
    "the exactness probe; decode (64 tokens) and prefill beside `mlx_lm.stream_generate` on the same weights "
    "in that process, by turns, the first pair not counted (kernels are compiled then); prefill by the size "
    "of a chunk on an empty context, the better of two; a prompt divided between two halves of one process "
    "over a sealed stream; and every width of a pass behind contexts at which kernels change. Shares of "
    "the card: weights that a token reads over 3.0 TB/s, and two operations for each weight that a "
    "token of a prompt is multiplied with over 790 TFLOP/s; attention is not counted."
)

_HOW_VERDICTS = (
    "The smallest well-known shapes with sliding windows and with running states, random weights, in "
    "bfloat16 and 4 bits: load with the exactness probe, and every width of a pass behind "
    "contexts at which kernels change, as `python -m fleetd.proof` has them."
)
