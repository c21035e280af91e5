"""The output of a process that downloads or copies a model: lines for the daemon, or words for a person."""

from __future__ import annotations

import sys
import threading
import time

import msgspec

from fleetd.errors import FleetError
from fleetd.models.pull_lines import PullDone, PullError, PullLine, PullProgress

_REPORTS_PER_S = 10


class Reporter:
    """Writes a few reports a second, and repeats the latest if nothing happens: silence means a hang."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()
        self._latest = PullProgress(file="", done_bytes=0, total_bytes=0, stage="connecting")
        self._sent_at = 0.0
        self._shown = ""
        if as_json:
            threading.Thread(target=self._repeat, daemon=True).start()

    def __call__(self, progress: PullProgress) -> None:
        with self._lock:
            news = progress.stage != self._latest.stage or progress.file != self._latest.file
            self._latest = progress
            finished = progress.done_bytes == progress.total_bytes
            if news or finished or time.monotonic() - self._sent_at > 1 / _REPORTS_PER_S:
                self._send()

    def _repeat(self) -> None:
        while True:
            time.sleep(1.0)
            with self._lock:
                if time.monotonic() - self._sent_at >= 1.0:
                    self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        if self._as_json:
            self._write(PullLine(progress=self._latest))
            return
        latest = self._latest
        share = f" {100 * latest.done_bytes // latest.total_bytes:3d} %" if latest.total_bytes else ""
        shown = f"{latest.stage}{share} {latest.file}"
        if shown != self._shown and (sys.stderr.isatty() or latest.done_bytes in (0, latest.total_bytes)):
            end = "\n" if not sys.stderr.isatty() else "\x1b[K\r"
            sys.stderr.write(shown + end)
            sys.stderr.flush()
            self._shown = shown

    def line(self, line: PullLine) -> None:
        """Write a line that is no progress, for the daemon."""
        with self._lock:
            self._write(line)

    def _write(self, line: PullLine) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    def close(self, name: str | None, error: FleetError | None) -> None:
        """Write the last line: the model's name, or the error."""
        if self._as_json:
            self.line(
                PullLine(done=PullDone(name))
                if name is not None
                else PullLine(error=PullError(error.code, error.message, error.hint) if error else None)
            )
        elif error is not None:
            sys.stderr.write(f"\n{error.message}\n{error.hint}\n")
        else:
            sys.stderr.write("\n" if sys.stderr.isatty() else "")
            sys.stdout.write(f"{name}\n")
