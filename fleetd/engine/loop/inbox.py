"""The compute thread's queue: prompts, commands, and the signal that a stream moved."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import msgspec

from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import (
    AssistPrefill,
    Cancel,
    DraftFor,
    FetchBlocks,
    ForgetOrigins,
    FreeMemory,
    IdleTime,
    PrefillAlone,
    PrefillWithHelpers,
    ServeStage,
    TakenElsewhere,
    WriteNow,
)
from fleetd.engine.scoring.scoring_layout import ScoringLayout


class Stop(msgspec.Struct, frozen=True):
    """End the loop."""


Item = (
    PreparedPrompt
    | ScoringLayout
    | PrefillWithHelpers
    | PrefillAlone
    | FetchBlocks
    | AssistPrefill
    | ServeStage
    | DraftFor
    | FreeMemory
    | TakenElsewhere
    | ForgetOrigins
    | WriteNow
    | IdleTime
    | Cancel
    | Stop
)


class Inbox:
    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._woken = False

    # ---- from any thread -----------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        self._items.put(item)

    def wake(self) -> None:
        """End a wait: something outside the queue has changed."""
        # Frames come by the hundred; one signal for all of them is enough.
        if not self._woken:
            self._woken = True
            self._items.put(None)

    def empty(self) -> bool:
        return self._items.empty()

    # ---- on the compute thread -----------------------------------------------------------------------

    def take_items(self, wait_s: float) -> Iterator[Item]:
        """All that has arrived; if nothing has, what arrives first within ``wait_s``."""
        while True:
            try:
                item = self._items.get(timeout=wait_s) if wait_s > 0 else self._items.get_nowait()
            except queue.Empty:
                return
            wait_s = 0
            if item is None:
                self._woken = False
            else:
                yield item
