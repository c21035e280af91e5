"""A terminal's screen, as far as fleetctl's painting uses it: rows without end, and a cursor."""

from __future__ import annotations

import io
import re

_STEP = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|[\s\S]")


class SmallScreen(io.StringIO):
    """``columns`` wide; text that would go beyond the last one fails the test."""

    encoding = "utf-8"

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.rows: list[str] = [""]
        self.row = self.column = 0
        self.written: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.append(text)
        for step in _STEP.finditer(text):
            self._take(step[0], step[1], step[2])
        return len(text)

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)

    def _take(self, step: str, count: str | None, command: str | None) -> None:
        here = self.rows[self.row]
        if command == "A":
            self.row -= int(count or 1)
            assert self.row >= 0
        elif command == "K":
            self.rows[self.row] = here[: self.column]
        elif command == "J":
            self.rows[self.row] = here[: self.column]
            del self.rows[self.row + 1 :]
        elif command is not None:
            assert command == "m", step
        elif step == "\r":
            self.column = 0
        elif step == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.rows):
                self.rows.append("")
        else:
            assert self.column < self.columns, self.rows
            self.rows[self.row] = here.ljust(self.column)[: self.column] + step + here[self.column + 1 :]
            self.column += 1
