"""What a measurement is: figures with their bars, medians, ratios and verdicts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")
_Z = 1.96  # 95 %
Unit = Literal["tok/s", "x", "%", "s", "ms", "µs", "MB", "kB/s", "MB/s", "GiB/s", "count"]


class Bar(msgspec.Struct, frozen=True):
    """What a figure must reach: ``at_least`` or at most ``value``, in the figure's unit."""

    at_least: bool
    value: float

    def holds(self, value: float) -> bool:
        return value >= self.value if self.at_least else value <= self.value


class Figure(msgspec.Struct, frozen=True):
    """One line of the table: a value per run. ``of`` says which of them stands for all.

    ``%`` values are shares: 0.97 is 97 %. ``note`` says in a few words what a reader may not guess.
    """

    title: str
    unit: Unit
    values: list[float]
    bar: Bar | None = None
    of: Literal["median", "worst"] = "median"
    note: str = ""

    @property
    def value(self) -> float:
        if self.of == "median" or self.bar is None:
            return statistics.median(self.values)
        return min(self.values) if self.bar.at_least else max(self.values)

    @property
    def passes(self) -> bool | None:
        """None where there is no bar: the figure is stated as it is."""
        return None if self.bar is None else self.bar.holds(self.value)


class Measured(msgspec.Struct, frozen=True):
    """What a family's ``measure`` returns: its figures and how they came about, in prose."""

    figures: list[Figure]
    how: str


class Taking(NamedTuple):
    """The same of a family that takes long, or runs on a machine that is there for minutes only: each figure
    is printed and kept as it comes, also if the measurement fails or is ended after it."""

    figures: Iterator[Figure]
    how: str


class NotMeasured(Exception):
    """What was asked for did not happen, so its time is no measurement; the message says why."""


class Result(msgspec.Struct, frozen=True):
    """A family's figures with everything needed to judge or repeat them.

    ``loop_s``: what ``host.loop_s`` was before and after; empty for results that are older than it.
    ``cut``: what ended the measurement before its last figure; "" if nothing did.
    """

    family: str
    measured: Measured
    command: str
    date: str
    machine: list[str]
    load: float
    runs: int
    quick: bool
    loop_s: list[float] = []
    cut: str = ""


def at_least(value: float) -> Bar:
    return Bar(True, value)


def at_most(value: float) -> Bar:
    return Bar(False, value)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """``over / under`` run by run: what slows a whole run cancels out."""
    if len(over) != len(under):
        raise ValueError(f"{len(over)} runs against {len(under)}: a ratio is formed within one run")
    return [a / b for a, b in zip(over, under, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for ``hits`` of ``of``, which holds for few cases, also near 1."""
    if not of:
        return 0.0, 1.0
    p, z = hits / of, _Z**2 / of
    middle, half = p + z / 2, _Z * math.sqrt(p * (1 - p) / of + z / (4 * of))
    # At the ends the interval touches the share itself, but for rounding.
    return max(0.0, min((middle - half) / (1 + z), p)), min(1.0, max((middle + half) / (1 + z), p))


def alternated(run: int, sides: Sequence[T]) -> list[T]:
    """The sides in this run's order: A B, B A, A B... so that no side always has the warmer machine."""
    return list(sides) if run % 2 == 0 else list(reversed(sides))


def rotated(run: int, sides: Sequence[T]) -> list[T]:
    """The sides in this run's order: A B C, B C A, C A B... so that each is as often first as any other."""
    at = run % len(sides)
    return [*sides[at:], *sides[:at]]


def written(value: float, unit: Unit) -> str:
    """A value for people, with digits enough to compare it to its bar."""
    match unit:
        case "%":
            return f"{100 * value:.1f} %"
        case "x":
            return f"{value:.2f}×"  # noqa: RUF001 - the sign that is meant
        case "s":
            return f"{value:.2f} s"
        case "ms":
            digits = 2 if abs(value) < 1 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} ms"
        case "µs":
            return f"{value:.1f} µs"
        case "MB":
            return f"{value:.0f} MB"
        case "kB/s":
            return f"{value:.2f} kB/s"
        case "MB/s":
            return f"{value:.0f} MB/s"
        case "GiB/s":
            return f"{value:.2f} GiB/s"
        case "count":
            return f"{value:.0f}"
        case "tok/s":
            return f"{value:.1f} tok/s" if value < 1000 else f"{value:.0f} tok/s"
