"""Tables fitted to a width: if there is no room, the least important columns are dropped."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fleetctl.render.text import table


@dataclass(frozen=True, slots=True)
class Column:
    """A column; if there is no room, the one with the smallest ``keep`` is dropped first."""

    header: str
    cells: list[str]
    keep: int
    right: bool = False

    @property
    def width(self) -> int:
        return max(len(self.header), *(len(cell) for cell in self.cells))


def total(columns: Sequence[Column]) -> int:
    """The width of a line of these columns, in characters."""
    return sum(column.width + 2 for column in columns) - 2


def fitted(columns: Sequence[Column], width: int | None) -> list[Column]:
    """The columns that fit into ``width``; the most important ones always stay."""
    columns = list(columns)
    by_worth = sorted(columns, key=lambda column: column.keep)
    while width is not None and total(columns) > width and by_worth[0].keep < by_worth[-1].keep:
        least = by_worth.pop(0)
        columns = [column for column in columns if column is not least]
    return columns


def drawn(columns: Sequence[Column]) -> list[str]:
    """The lines of the table: the header, then the rows."""
    return table(
        [column.header for column in columns],
        zip(*(column.cells for column in columns), strict=True),
        right=[i for i, column in enumerate(columns) if column.right],
    ).split("\n")


def shortened(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def terminal_width() -> int | None:
    """The columns of stdout's terminal; None for files and pipes, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
