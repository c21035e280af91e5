"""A real daemon whose worker gives the answers that a test writes, and what it noted down of each request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from live_daemon import LiveDaemon, until
from scripted_answers import ScriptedTurns

from fleetd.control.prefill_trace import Trace, TracesView

# The last token of an answer is never computed, and another one before it may be part of another token once
# more text follows.
ENDS_TOKENS = 2


class ScriptedDaemon:
    """``play`` begins a session; ``traces`` are those of its requests, the oldest first."""

    def __init__(self, daemon: LiveDaemon, script: Path) -> None:
        self.daemon = daemon
        self._script = script
        self._before: set[str] = set()

    def play(
        self, turns: Sequence[tuple[str, dict[str, Any]]], *, thought: str = "", until: str = ""
    ) -> None:
        ScriptedTurns(list(turns), thought, until).write(self._script)
        self._before = {trace.id for trace in self._all()}

    def traces(self, least: int) -> list[Trace]:
        """Once there are so many: each is written soon after its answer."""
        until(lambda: len(self._new()) >= least)
        return self._new()

    def refused(self) -> list[dict[str, Any]]:
        """What the log says of refused requests."""
        return [line for line in self.daemon.lines() if line["event"] == "http.refused"]

    def _new(self) -> list[Trace]:
        return [trace for trace in reversed(self._all()) if trace.id not in self._before]

    def _all(self) -> list[Trace]:
        told = self.daemon.control("GET", "/fleet/v1/traces?last=100")
        return msgspec.convert(told, TracesView).traces


def anew(turns: Sequence[Trace]) -> list[int]:
    """For each turn but the first, the tokens that were read though the turn before had them already."""
    return [
        max(0, before.prompt_tokens + before.completion_tokens - ENDS_TOKENS - after.cached_tokens)
        for before, after in pairwise(turns)
    ]
