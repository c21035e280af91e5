"""Texts of other workers that this one drafts for: admitted, done in turns, ended.

    Follow ──► Accepted ──► its stream, its first commit ──► a step per turn ──► Followed | Failed

Nothing of one outlives its end but what it has read, in the prefix cache, for the next turn of the same
conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.decoding import GROWTH_TOKENS
from fleetd.engine.failures import failed
from fleetd.engine.memory import KvBudget
from fleetd.engine.prefix import DENSE, PrefixCache
from fleetd.engine.protocol import Accepted, Finished, Follow, Followed, Report
from fleetd.engine.share.streams import Streams
from fleetd.engine.spec.draft_wire import DRAFTS
from fleetd.engine.spec.drafter import Drafter, DraftModel
from fleetd.engine.spec.lookahead import Lookahead
from fleetd.engine.turns import can_step
from fleetd.errors import InvalidValue, Overloaded, PeerLost

# Read in blocks whose rounding is nobody else's: good enough to guess from, and for nothing that is exact.
GUESSED = "guessed"


@dataclass(slots=True)
class _Task:
    command: Follow
    # Refuses before anybody connects where the model cannot do it.
    model: DraftModel
    # When its stream must be there.
    until_s: float
    work: Drafter | None = None
    lent_tokens: int = 0


@dataclass
class Follows:
    """``ends``: the model's end tokens, after which nothing is drafted."""

    model: Any
    ends: frozenset[int]
    context_tokens: int
    vocab_size: int
    budget: KvBudget
    prefix: PrefixCache
    streams: Streams
    emit: Callable[[Report], None]
    # Forward passes, for the proof of progress.
    steps: int = field(default=0, init=False)
    _tasks: list[_Task] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, follow_id: str) -> bool:
        return any(task.command.id == follow_id for task in self._tasks)

    @property
    def ready(self) -> bool:
        """Whether a step can be computed now."""
        return any(task.work is not None and can_step(task.work) for task in self._tasks)

    @property
    def dues_s(self) -> list[float | None]:
        """When their waits end even if nothing comes."""
        return [task.until_s if task.work is None else task.work.due_s for task in self._tasks]

    def begin(self, command: Follow) -> None:
        """It starts with its stream. What is refused is told, not raised."""
        try:
            if command.id in self:
                raise InvalidValue("This text is being followed already.")
            if len(self._tasks) >= limits.FOLLOWS:
                raise Overloaded(f"This machine drafts for {limits.FOLLOWS} texts already.")
            model = DraftModel(self.model, lambda tokens: self.prefix.fetch(tokens, DENSE, GUESSED))
        except Exception as error:
            self._told(command.id, error)
            return
        self._tasks.append(_Task(command, model, time.monotonic() + limits.TICKET_S))
        # How long the text is will come with it.
        self.emit(Accepted(command.id, 0))

    def cancel(self, follow_id: str) -> bool:
        """False where it is none of these."""
        for task in self._tasks:
            if task.command.id == follow_id:
                self._end(task)
                self.emit(Finished(follow_id, "cancelled"))
                return True
        return False

    def turn(self, chunk_tokens: int) -> None:
        """Begin those whose streams have come, and take a step of one."""
        for task in list(self._tasks):
            if task.work is None:
                self._look(task)
        for task in self._tasks:
            if task.work is not None and can_step(task.work):
                # The next turn is another one's.
                self._tasks.remove(task)
                self._tasks.append(task)
                self._step(task, task.work, chunk_tokens)
                return

    def _step(self, task: _Task, work: Drafter, chunk_tokens: int) -> None:
        try:
            work.step(chunk_tokens)
        except PeerLost:
            # Whoever wrote the text has ended it, or is gone: that is the ordinary end.
            self._end(task)
            self.emit(Followed(task.command.id, work.drafted, work.judged, work.right))
        except Exception as error:
            self._fail(task, error)
        else:
            self.steps += 1

    def _look(self, task: _Task) -> None:
        command = task.command
        try:
            if self.streams.complete(command.id, [DRAFTS]):
                task.work = Drafter(
                    task.model,
                    partial(self.streams.connect(command.id), DRAFTS),
                    Lookahead(
                        self.ends,
                        ahead=command.ahead,
                        detours=limits.DRAFT_DETOURS * command.ahead // limits.DRAFT_AHEAD,
                    ),
                    context_tokens=self.context_tokens,
                    vocab_size=self.vocab_size,
                    grow=partial(self._grow, task),
                )
            elif time.monotonic() >= task.until_s:
                raise PeerLost(f"The text to be followed did not come within {limits.TICKET_S:.0f} s.")
        except Exception as error:
            self._fail(task, error)

    def _grow(self, task: _Task, tokens: int) -> None:
        if tokens <= task.lent_tokens:
            return
        tokens = min(tokens + GROWTH_TOKENS, self.context_tokens + limits.DRAFT_AHEAD)
        self.budget.give_back(task.command.id)
        task.lent_tokens = 0
        self.budget.lend(task.command.id, tokens * self.budget.bytes_per_token)
        task.lent_tokens = tokens

    def _fail(self, task: _Task, error: Exception) -> None:
        self._end(task)
        self._told(task.command.id, error)

    def _told(self, follow_id: str, error: Exception) -> None:
        self.emit(failed(follow_id, error, "Nothing could be drafted"))

    def _end(self, task: _Task) -> None:
        self._tasks.remove(task)
        if task.work is not None:
            task.work.close()
        self.streams.drop(task.command.id)
        self.budget.give_back(task.command.id)
        tokens, cache = task.model.kept
        if tokens:
            mx.eval([layer.state for layer in cache])
            self.prefix.store(tokens, cache, GUESSED)

    def close(self) -> None:
        for task in list(self._tasks):
            self._end(task)
