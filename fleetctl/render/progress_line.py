"""One line of progress on stderr, shown after half a second and erased before the answer.

A thread repaints the line, so that its clock runs even while the daemon sends nothing. If stderr is not a
terminal, each stage has a plain line, for logs, and further ones after 10 s, 20 s, 40 s and so on.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from fleetctl.render.columns import shortened
from fleetctl.render.text import count, one_line, rough, size
from fleetd.control.model_change import FETCHING, READING, MemberProgress

SHOW_AFTER_S = 0.5
_REPAINT_S = 0.2
_PLAIN_FIRST_S = 10.0
_BAR_CELLS = 24
# A shorter bar shows less than the figures beside it.
_BAR_LEAST = 8
_ERASE = "\r\x1b[K"


def live_terminal(stream: TextIO) -> bool:
    """True if a line on this stream can be repainted."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class Progress:
    """Use as a context manager; call ``update`` on each report, and ``clear`` before other output."""

    def __init__(self, stream: TextIO | None = None, *, show_after_s: float = SHOW_AFTER_S) -> None:
        self._stream = stream or sys.stderr
        self._live = live_terminal(self._stream)
        self._show_after_s = show_after_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._painted = False
        self._stage = ""
        self._figures, self._detail = (0, 0, ""), ""
        self._origin = (0.0, 0)  # when this stage began, and at which figure: rates start from there
        self._ends: float | None = None
        self._began: float | None = None
        #: By stage, when it may have its next plain line, and how long after that the one behind it.
        #: Stages of several answers take turns.
        self._plain_next: dict[str, tuple[float, float]] = {}

    def update(
        self,
        stage: str,
        done: int = 0,
        total: int = 0,
        *,
        unit: str = "",
        left_s: float | None = None,
        detail: str = "",
    ) -> None:
        """Show ``done`` of ``total`` (0 = unknown) of a stage; the unit "bytes" is shown as kB, MB, ...

        ``left_s``: seconds after which the stage ends by itself; the clock counts down. ``detail``: more of
        the progress, in words; another one is no other stage.
        """
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began = now
            if stage != self._stage:
                self._stage, self._origin = stage, (now, done)
            self._figures, self._detail = (done, total, unit), detail
            self._ends = None if left_s is None else now + left_s
        if not self._live:
            self._plain(now)
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._repaint, name="progress", daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """Stop repainting and erase the line; a later ``update`` starts again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            try:
                thread.join()
            except RuntimeError:
                # Ctrl-C came while the thread was starting. It may still start; it ends without painting.
                pass
        if self._painted:
            self._write(_ERASE)
            self._painted = False
        self._began, self._stage = None, ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def _repaint(self) -> None:
        if self._stop.wait(self._show_after_s):
            return
        while True:
            now = time.monotonic()
            if self._live:
                self._painted = True
                self._write(_ERASE + self._line(now, shutil.get_terminal_size().columns - 1))
            else:
                self._plain(now)
            if self._stop.wait(_REPAINT_S):
                return

    def _plain(self, now: float) -> None:
        with self._lock:
            due_s, every_s = self._plain_next.get(self._stage, (0.0, _PLAIN_FIRST_S))
            due = self._began is not None and now >= max(due_s, self._began + self._show_after_s)
            if due:
                self._plain_next[self._stage] = now + every_s, 2 * every_s
        if due:
            self._write(self._line(now, None) + "\n")

    def _line(self, now: float, columns: int | None) -> str:
        with self._lock:
            stage, (done, total, unit), (since, first) = self._stage, self._figures, self._origin
            ends, detail = self._ends, self._detail
        elapsed_s = max(now - since, 1e-9)
        show, unit = (size, "") if unit == "bytes" else (count, f" {unit}" if unit else "")
        figures = speed = clock = ""
        if total > 0:
            done = min(done, total)
            figures = f"{show(done)} of {show(total)}{unit}"
            rate = (done - first) / elapsed_s
            if rate > 0 and elapsed_s > 1:
                speed = f"{show(rate)}{unit}/s"
                if done < total:
                    clock = f"{rough((total - done) / rate)} left"
        if ends is not None:
            clock = f"{rough(max(0.0, ends - now))} left"
        elif elapsed_s >= 1 and (total <= 0 or done <= first):
            clock = f"{elapsed_s:.0f} s"
        texts = one_line(stage), figures, speed, clock, f"({one_line(detail)})" if detail else ""
        if columns is None:
            return "  ".join(filter(None, texts))
        return fitted_line(texts, done / total if total > 0 else None, columns, utf8=self._utf8)

    @property
    def _utf8(self) -> bool:
        return "utf" in (self._stream.encoding or "").lower()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stop.set()  # the terminal is gone; the answer may still have a reader


def fitted_line(
    texts: tuple[str, str, str, str, str], share: float | None, columns: int, *, utf8: bool
) -> str:
    """One line of at most ``columns`` cells of a stage, figures, a speed, a clock and a detail.

    If there is no room, the bar of ``share`` becomes shorter, then the speed goes, then the bar; then the
    stage or the detail is cut, whichever is longer. Half a figure would be read as another one.
    """
    stage, figures, speed, clock, detail = texts
    for cells, kept in (
        (_BAR_CELLS, speed),
        (_BAR_LEAST, speed),
        (_BAR_CELLS, ""),
        (_BAR_LEAST, ""),
        (0, ""),
    ):
        drawn = bar(share, cells, utf8=utf8) if share is not None and cells else ""
        line = "  ".join(filter(None, (stage, drawn, figures, kept, clock, detail)))
        if len(line) <= columns:
            return line
    over = len(line) - columns
    if len(detail) > len(stage):
        detail = shortened(detail, max(1, len(detail) - over))
    else:
        stage = shortened(stage, max(1, len(stage) - over))
    return "  ".join(filter(None, (stage, figures, clock, detail)))[: max(columns, 1)]


def bar(share: float, cells: int, *, utf8: bool) -> str:
    """A bar of ``cells`` characters, filled by ``share``."""
    full = round(max(0.0, min(1.0, share)) * cells)
    return ("━" if utf8 else "#") * full + ("─" if utf8 else "-") * (cells - full)


def of_members(members: Sequence[MemberProgress]) -> str:
    """How far each other machine of a model over several is: "studio reading 1.2 GB of 8.0 GB"."""
    return ", ".join(f"{each.name} {each.stage}{_bytes_read(each)}" for each in members)


def _bytes_read(member: MemberProgress) -> str:
    if member.stage != READING and member.stage not in FETCHING:
        return ""
    return f" {size(member.done_bytes)} of {size(member.total_bytes)}"
