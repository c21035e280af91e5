"""A table of the ways to prefill a prompt, with their times and why each was not chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fleetctl.render.columns import Column, drawn, fitted, shortened
from fleetctl.render.plan_words import machines, way
from fleetctl.render.text import brief, count, one_line, wrapped
from fleetd.control.prefill_plan import OptionView

_MACHINES_CHARS = 40
# The code of a way for which a helper would have to load the model first.
NOT_NOW = "cold"


def options_table(options: Sequence[OptionView], local_s: float | None, width: int | None) -> list[str]:
    """The lines of the table, ways that are not possible now last.

    Args:
        local_s: seconds of this machine alone, the base of all comparisons.
    """
    now = [option for option in options if option.code != NOT_NOW]
    later = [option for option in options if option.code == NOT_NOW]
    lines = _rows(now, local_s, width) if now else []
    if later:
        lines.append("Not now, as a machine would have to load the model first:")
        for option in later:
            lines.append(wrapped(f"{way(option)}: {one_line(option.reason)}", width, indent="   "))
    return lines


def _rows(options: Sequence[OptionView], local_s: float | None, width: int | None) -> list[str]:
    columns = [
        Column(" ", ["*" if option.chosen else " " for option in options], 9),
        Column("PLAN", [way(option) for option in options], 9),
        Column("MACHINES", [_machines(option, cut=width is not None) for option in options], 7),
        Column("FIRST TOKEN", [brief(option.predicted_s) for option in options], 8, right=True),
        Column("SPEED", [_against(option.predicted_s, local_s) for option in options], 3, right=True),
    ]
    if any(option.cached_tokens for option in options):
        columns.append(Column("KNOWN", [count(option.cached_tokens) for option in options], 6, right=True))
    if any(option.restored_tokens or option.fetched_tokens for option in options):
        columns.append(Column("FROM", [_from(option) for option in options], 4))
    header, *rows = drawn(fitted(columns, width))
    lines = [header]
    for option, row in zip(options, rows, strict=True):
        lines.append(click.style(row, fg="green") if option.chosen else row)
        if option.reason and not option.chosen:
            lines.append(wrapped(one_line(option.reason), width, indent="     "))
    return lines


def _machines(option: OptionView, *, cut: bool) -> str:
    named = machines(option)
    return shortened(named, _MACHINES_CHARS) if cut else named


def _from(option: OptionView) -> str:
    """Where the known tokens come from, if not all are in memory."""
    disk = ["disk"] if option.restored_tokens else []
    return ", ".join([*disk, *([one_line(option.fetched_from)] if option.fetched_tokens else [])])


def _against(seconds: float | None, local_s: float | None) -> str:
    """The speed as a multiple of this machine alone; "-" if one of the times is unknown."""
    return f"{local_s / seconds:.2f}x" if seconds and local_s else "-"
