"""A program in a process of its own: it loads once and then answers line by line.

One JSON object per line goes in, one comes back. The children are modules of ``bench.children`` that end
with ``serve(handler)``; here is also the parent's end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.samples import Closing

ROOT = Path(__file__).parents[2]
_END_S = 10.0
# Libraries print what they like; an answer is marked.
_MARK = "answer: "


class Child(Closing):
    """``python -m bench.children.MODULE ARGS``, ready when the constructor returns."""

    def __init__(self, module: str, *args: str) -> None:
        self._name = f"{module} {' '.join(args)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.children.{module}", *args],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._read()
        except BaseException:
            # It would not look at its end while it loads.
            self.kill()
            self.close()
            raise

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line[len(_MARK) :])
                return answer
        raise RuntimeError(f"{self._name} ended without an answer (exit code {self._process.wait()})")

    def kill(self) -> None:
        """End it at once; whoever waits for its answer gets a RuntimeError."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed with a question unread
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's loop: say that it is ready, then answer until the parent closes the pipe."""
    print(f"{_MARK}{{}}", flush=True)
    for line in sys.stdin:
        print(f"{_MARK}{json.dumps(handler(json.loads(line)))}", flush=True)
