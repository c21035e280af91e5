"""Text that grows on a terminal: wrapped at words and lightly marked up by Rich, repainted where it changes.

    pieces ──► open block (a paragraph, a list, ...) ──► its lines, rendered ──► only those that changed
                    └─ complete when the next one begins: it stays as it is

Only the last block is rendered again with each piece. A line that only became longer gets its new end, so
that nothing flickers.
"""

from __future__ import annotations

import io
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from fleetd.text.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# A longer block, as JSON in one line would be, is taken as complete here: each piece renders all of it again.
_BLOCK_CHARS = 16_000
# Painting rests for so many times as long as it took, so that the pieces are read in time.
_PAUSE = 3.0

# A line that shows nothing may have colours.
_BLANK = re.compile(r"(?:\x1b\[[\d;]*m|\s)*")

# What Rich prints for a block.
Render = Callable[[str], "RenderableType"]
# How many characters the first block of a text has if another one follows, and the empty lines between them;
# else (0, 0). What is complete stays as it looks.
Complete = Callable[[str], tuple[int, int]]


class LiveText:
    """One text on one terminal: ``feed`` the pieces, then ``end`` it."""

    def __init__(
        self,
        stream: TextIO,
        render: Render,
        complete: Complete,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._render, self._complete, self._monotonic = stream, render, complete, monotonic
        self._open = ""
        # Lines of the open block as they are on the screen; the cursor is at the end of the last one.
        self._painted: list[str] = []
        # Empty lines above the open block.
        self._above = 0
        # Not before then: a long table takes longer to render than the next piece to come. ``_later`` paints
        # what comes meanwhile, in a thread of its own.
        self._next_s = 0.0
        self._later: threading.Timer | None = None
        self._lock = threading.RLock()
        self._size = shutil.get_terminal_size()
        self._console = _console(self._size.columns)

    def feed(self, text: str) -> None:
        """Show more of the text, now or when the painting before it has been paid for."""
        with self._lock:
            self._open += printable(text)
            wait_s = self._next_s - self._monotonic()
            if wait_s <= 0 or len(self._open) > _BLOCK_CHARS:
                self._show()
            elif self._later is None:
                self._later = threading.Timer(wait_s, self._show)
                self._later.daemon = True
                self._later.start()

    def end(self) -> None:
        """Leave the cursor at the start of a line."""
        with self._lock:
            self._show()
            self._close(self._open, 0)
            self._open, self._above, self._next_s = "", 0, 0.0

    def _show(self) -> None:
        """Paint all that has come."""
        with self._lock:
            if self._later is not None:
                self._later.cancel()
                self._later = None
            began_s = self._monotonic()
            self._follow_size()
            end, gap = self._complete(self._open)
            while end:
                self._close(self._open[:end], gap)
                self._open = self._open[end:]
                end, gap = self._complete(self._open)
            if len(self._open) > _BLOCK_CHARS:
                self._close(self._open, 0)
                self._open = ""
            self._paint(self._lines(self._open))
            now_s = self._monotonic()
            self._next_s = now_s + _PAUSE * (now_s - began_s)

    def _close(self, block: str, gap: int) -> None:
        self._paint(self._lines(block))
        if self._painted:
            self._write("\n")
            self._painted, self._above = [], gap

    def _lines(self, block: str) -> list[str]:
        """The block as lines of this terminal; none of an empty one."""
        if not block.strip():
            return []
        with self._console.capture() as captured:
            self._console.print(self._render(block.strip("\n")), end="")
        rendered = ["" if _BLANK.fullmatch(line) else line.rstrip() for line in captured.get().split("\n")]
        while rendered and not rendered[0]:
            del rendered[0]
        while rendered and not rendered[-1]:
            del rendered[-1]
        return [""] * self._above + rendered if rendered else []

    def _paint(self, lines: Sequence[str]) -> None:
        """Bring the screen from the painted lines to these, by one write."""
        old = self._painted
        if not lines or lines == old:
            return
        same = next((i for i, (a, b) in enumerate(zip(old, lines, strict=False)) if a != b), len(old))
        if not old:
            text = "\n".join(lines)
        elif same >= len(old) - 1 and len(lines) >= len(old) and lines[len(old) - 1].startswith(old[-1]):
            # Only the end is new.
            text = "\n".join([lines[len(old) - 1][len(old[-1]) :], *lines[len(old) :]])
        else:
            # What has left the screen at its top stays as it was.
            same = min(max(same, len(old) - self._size.lines), len(lines) - 1)
            up = max(0, len(old) - 1 - same)
            text = "\r" + (f"\x1b[{up}A" if up else "")
            text += "\n".join(f"{line}\x1b[K" for line in lines[same:]) + "\x1b[J"
        self._painted = list(lines)
        self._write(text)

    def _follow_size(self) -> None:
        """After the window has changed, paint the open block anew from where the terminal has put its top."""
        size = shutil.get_terminal_size()
        if size == self._size:
            return
        from rich.text import Text

        self._size, self._console = size, _console(size.columns)
        if self._painted:
            cells = [Text.from_ansi(line).cell_len for line in self._painted]
            rows = sum(max(1, -(-cell // size.columns)) for cell in cells)
            up = min(rows, size.lines) - 1
            self._painted = []
            self._write("\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def load() -> None:
    """Import what painting needs."""
    import fleetctl.render.answer_markdown  # noqa: F401


def live_markdown(stream: TextIO) -> LiveText:
    """An answer that grows on a terminal."""
    from fleetctl.render.answer_markdown import AnswerMarkdown, complete_block

    return LiveText(stream, AnswerMarkdown, complete_block)


def live_dim(stream: TextIO) -> LiveText:
    """A model's thoughts that grow on a terminal."""
    from rich.text import Text

    return LiveText(stream, lambda text: Text(text, style="dim"), complete_line)


def _console(columns: int) -> Console:
    from rich.console import Console
    from rich.theme import Theme

    # Rich gives code a black ground, which a light terminal has not.
    theme = Theme({"markdown.code": "cyan", "markdown.item.number": "none", "markdown.item.bullet": "none"})
    # One column less: after the last one a terminal may have gone to the next line, or not.
    width = max(columns - 1, 20)
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, highlight=False, markup=False, theme=theme
    )


def complete_line(text: str) -> tuple[int, int]:
    """Plain text: a line is complete with its line feed."""
    return text.find("\n") + 1, 0
