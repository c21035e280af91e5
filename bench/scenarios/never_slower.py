"""Never slower: prompts of many lengths, over many links, with fast and slow helpers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.figures import Figure, Measured, at_most, percentile
from bench.harness import prompts
from bench.harness.daemon import MODEL
from bench.harness.kept_parts import KeptParts
from bench.harness.machines import LOCAL, LOOPBACK, Machines, why_none
from bench.harness.network import Link
from bench.scenarios.prefill_ceiling import error
from bench.scenarios.prefill_unequal import SLOW

# Even, so that each side goes first as often.
RUNS = 4
LINKS = (
    LOOPBACK,
    Link("1 Gbit/s", bits_per_s=1e9),
    Link("100 Mbit/s", bits_per_s=1e8),
    Link("10 Mbit/s", bits_per_s=1e7),
    Link("50 ms round trip", rtt_s=0.05),
)
LENGTHS = (500, 1000, 2000, 4000)
SHARES = (1.0, SLOW)
# An answer of some seconds: pings and news of load are told by the second, whatever else goes on.
_WINDOW_LENGTH, _WINDOW_TOKENS = 1000, 320


@dataclass
class Cell:
    """A length, a link and a helper: over its pairs, TTFT as planned over TTFT alone."""

    title: str
    slower: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    how: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        return statistics.median(self.slower)

    @property
    def worst(self) -> float:
        return max(self.slower)

    @property
    def local(self) -> list[float]:
        """Of the pairs whose two sides did the same work: what is not 1 is the machine's."""
        return [slower for slower, how in zip(self.slower, self.how, strict=True) if how == LOCAL]

    @property
    def distributed(self) -> bool:
        return any(how != LOCAL for how in self.how)


@dataclass
class Column:
    """The cells of a link and a helper, one for each length."""

    cells: list[Cell] = field(default_factory=list)
    traffic: list[float] = field(default_factory=list)


def measure(runs: int, code: Sequence[str] = ()) -> Measured:
    """The grid. It takes hours: a column that is finished need not be measured again after a failure.

    Args:
        runs: pairs of every cell.
        code: what is measured, as git's pathspecs.

    Raises:
        RuntimeError: two machines cannot be had on this one.
    """
    if why := why_none():
        raise RuntimeError(why)
    quick = runs < RUNS
    kept = KeptParts(f"never-slower-{runs}", code, Column)
    columns: list[Column] = []
    not_run: list[str] = []
    for link, share in _columns(quick=quick):
        if why := why_none(link, share):
            not_run.append(f"{_around(link, share)}: {why}")
            continue
        columns.append(kept.measured(_around(link, share), partial(_column, link, share, runs, quick=quick)))
    kept.clear()
    cells = [cell for column in columns for cell in column.cells]
    traffic = [value for column in columns for value in column.traffic]
    return Measured(_figures(cells, traffic), _how(cells, not_run, runs))


def _column(link: Link, share: float, runs: int, *, quick: bool) -> Column:
    column = Column()
    with Machines(link, (1.0, share)) as machines:
        for length in LENGTHS[1:3] if quick else LENGTHS:
            column.cells.append(cell := Cell(f"{length:,} tokens, {_around(link, share)}"))
            _fill(machines, cell, length, runs)
        if link.shaped and share == 1:
            column.traffic += [_decoding_kb_s(machines, run) for run in range(1 if quick else 3)]
    return column


def _columns(*, quick: bool) -> Iterator[tuple[Link, float]]:
    if quick:
        yield from ((LINKS[0], SLOW), (LINKS[2], 1.0))
        return
    for link in LINKS:
        for share in SHARES:
            yield link, share


def _around(link: Link, share: float) -> str:
    return f"{link.title}, helper {'alike' if share == 1 else 'of a third'}"


def _fill(machines: Machines, cell: Cell, length: int, runs: int) -> None:
    for run in range(runs):
        alone, planned = machines.both(run, 36_000 + 10 * run + length, length)
        cell.slower.append(planned.ttft_s / alone.ttft_s)
        cell.how.append(planned.how)
        if planned.trace is not None and (off := error(planned.trace)) is not None:
            cell.errors.append(off)


def _decoding_kb_s(machines: Machines, run: int) -> float:
    """What the cable carries from the first to the last token of an answer whose prefill was shared."""
    prompt = prompts.tokens(MODEL, 37_000 + run, _WINDOW_LENGTH)
    passed: list[tuple[float, int]] = []

    def note() -> None:
        passed.append((time.perf_counter(), machines.passed_bytes()))

    machines.ask(prompt, alone=False, answer_tokens=_WINDOW_TOKENS, each=note)
    (begun_s, before), (ended_s, after) = passed[0], passed[-1]
    return (after - before) / 1000 / (ended_s - begun_s)


def _figures(cells: list[Cell], traffic: list[float]) -> list[Figure]:
    if not cells:
        return []
    worst = max(cells, key=lambda cell: cell.value)
    errors = [abs(off) for cell in cells for off in cell.errors]
    spread = [cell.value for cell in cells if cell.distributed]
    pairs = [slower for cell in cells for slower in cell.slower]
    figures = [
        Figure(
            f"TTFT as planned over TTFT alone, medians of {len(cells)} cells",
            "x",
            [cell.value for cell in cells],
            at_most(1.05),
            of="worst",
            note=f"the worst is {worst.title} ({'; '.join(dict.fromkeys(worst.how))})",
        ),
        Figure("The same, the median of all pairs", "x", pairs),
        Figure("The same, the worst single pair", "x", [max(pairs)], note=f"of {len(pairs)} pairs"),
    ]
    if stayed := [slower for cell in cells for slower in cell.local]:
        note = f"{len(stayed)} pairs; the worst is {max(stayed):.2f}: what the machine itself does to a pair"
        figures.append(Figure(f"The same where it stayed {LOCAL}, one work twice", "x", stayed, note=note))
    if spread:
        figures.append(Figure("The same where it was shared", "x", spread))
    if errors:
        title = "Predicted prefill off the actual one, p90"
        note = f"{len(errors)} shared prompts; the worst is off by {max(errors):.0%}"
        figures.append(Figure(title, "%", [percentile(errors, 0.9)], at_most(0.25), note=note))
    if traffic:
        title = "Traffic with the helper while decoding"
        figures.append(Figure(title, "kB/s", traffic, at_most(1.0), of="worst"))
    return figures


def _how(cells: list[Cell], not_run: list[str], runs: int) -> str:
    said = [
        f"Never slower: every length of {', '.join(f'{length:,}' for length in LENGTHS)} tokens over every "
        f"link of {', '.join(link.title for link in LINKS)}, with a helper that is alike and one of a third. "
        "The links are network namespaces with token buckets, or with a cable in user space that is 25 ms "
        "long each way. A pair is two TTFTs of the same prompt, as the planner decides and kept here, one "
        f"after the other; every cell has {runs} pairs, whose sides take turns in going first. The "
        "prediction is held against the time from the decision to the first token."
    ]
    said += [f"Not run: {why}." for why in not_run]
    rows = "\n".join(
        f"| {cell.title} | {cell.value:.2f} | {cell.worst:.2f} | {'; '.join(dict.fromkeys(cell.how))} "
        f"| {', '.join(f'{off:+.0%}' for off in cell.errors)} |"
        for cell in cells
    )
    said.append(
        "| prompt, link, helper | over alone, median | worst | chosen | prediction off |\n"
        f"|---|---|---|---|---|\n{rows}"
    )
    return "\n\n".join(said)
