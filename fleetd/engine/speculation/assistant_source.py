"""Drafts of an assistant of Gemma 4 for one answer, and what a worker knows of the assistant.

It reads the model's own keys and values, so it begins at once after any prefill, and keeps nothing but the
newest hidden state. It drafts while they are all there: not once a layer's window has moved, when drafts
cannot be verified either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from fleetd import limits
from fleetd.engine.heads.assistant import Assistant
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.hidden_source import HiddenSource, WorkerDrafter
from fleetd.engine.speculation.local_sources import ASSISTANT
from fleetd.engine.speculation.sources import Context, HiddenRows


@dataclass(slots=True)
class WorkerAssistant(WorkerDrafter):
    """An assistant, for all answers of a worker."""

    drafter: Assistant

    @classmethod
    def measured(cls, drafter: Assistant, clock: Callable[[], float] = time.perf_counter) -> WorkerAssistant:
        """An assistant that has computed its first guesses. Raises ValueError if it does not fit."""
        rows, state = drafter.empty_rows(16), mx.zeros((1, drafter.config.backbone_hidden_size))

        def seconds(count: int) -> float:
            begun = clock()
            mx.eval(drafter.guesses(1, 16, state, count, rows))
            return clock() - begun

        one, two = (min(seconds(count) for _ in range(4)) for count in (1, 2))
        return cls(DraftPrice.between(one, two, 2), drafter)

    @property
    def text(self) -> str:
        """What is said of it once it is loaded."""
        return f"{ASSISTANT}: {1000 * self.price.seconds(1):.1f} ms a token"

    def source(self) -> AssistantSource | None:
        """The source of a new answer; None while the assistant is off."""
        return None if self.off else AssistantSource(self)


@dataclass(slots=True)
class AssistantSource(HiddenSource):
    """See the module."""

    worker: WorkerAssistant
    name: ClassVar[str] = ASSISTANT
    # The newest hidden states, (rows, D), and the token of their first row.
    _noted: tuple[int, mx.array] | None = field(init=False, default=None)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.worker.drafter.hidden_layer,)

    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""
        if (states := hidden.states.get(self.hidden_layers[0])) is not None:
            kept = states[-limits.SPEC_WIDTH :]
            self._noted = (hidden.start + states.shape[0] - kept.shape[0], kept)

    def propose(self, context: Context) -> list[int]:
        self.spent_s = 0.0
        newest, drafter = len(context.tokens) - 1, self.worker.drafter
        if self._noted is None or context.cache is None:
            return []
        start, states = self._noted
        row = newest - 1 - start
        if not 0 <= row < states.shape[0] or (rows := drafter.rows(context.cache, newest)) is None:
            return []
        begun = time.perf_counter()
        given = drafter.guesses(context.tokens[-1], newest, states[row : row + 1], context.width, rows)
        found: list[int] = given.tolist()  # type: ignore[assignment]
        self.spent_s = time.perf_counter() - begun
        self.worker.price.took(context.width, self.spent_s)
        self.guess = found[0]
        return found

    def close(self) -> None:
        self._noted = None
