"""Texts of other workers that this one drafts for: admitted, done in turns, ended.

    Follow ──► Accepted ──► its stream, its first commit ──► a step per turn ──► Followed | Failed

Nothing of one outlives its end but what it has read, in the prefix cache, for the next turn of the same
conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.decoding import GROWTH_TOKENS
from fleetd.engine.failures import failed
from fleetd.engine.guests import GuestTask, GuestTasks
from fleetd.engine.memory import KvBudget
from fleetd.engine.prefix_cache import DENSE, PrefixCache
from fleetd.engine.protocol import Accepted, DraftFor, Finished, Followed, Report
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.drafter import DraftModel, DraftWriter
from fleetd.engine.speculation.lookahead import Lookahead
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, Overloaded, PeerLost

# Read in blocks whose rounding is nobody else's: good enough to guess from, and for nothing that is exact.
GUESSED = "guessed"


@dataclass(slots=True, eq=False, kw_only=True)
class _DraftGuest(GuestTask[DraftFor, DraftWriter]):
    # Refuses before anybody connects where the model cannot do it.
    model: DraftModel
    lent_tokens: int = 0


@dataclass
class DraftGuests:
    """``ends``: the model's end tokens, after which nothing is drafted."""

    model: Any
    ends: frozenset[int]
    context_tokens: int
    vocab_size: int
    budget: KvBudget
    prefix: PrefixCache
    streams: HandedOverStreams
    emit: Callable[[Report], None]
    # Forward passes, for the proof of progress.
    steps: int = field(default=0, init=False)
    visits: GuestTasks[_DraftGuest] = field(default_factory=GuestTasks, init=False)

    def __len__(self) -> int:
        return len(self.visits)

    def __contains__(self, follow_id: str) -> bool:
        return self.visits.find(follow_id) is not None

    def begin(self, command: DraftFor) -> None:
        """It starts with its stream. What is refused is told, not raised."""
        try:
            if command.id in self:
                raise InvalidValue("This text is being followed already.")
            if len(self.visits) >= limits.FOLLOWS:
                raise Overloaded(f"This machine drafts for {limits.FOLLOWS} texts already.")
            model = DraftModel(self.model, lambda tokens: self.prefix.fetch(tokens, DENSE, GUESSED))
        except Exception as error:
            self._told(command.id, error)
            return
        self.visits.add(_DraftGuest(command=command, model=model))
        # How long the text is will come with it.
        self.emit(Accepted(command.id, 0))

    def cancel(self, follow_id: str) -> bool:
        """False where it is none of these."""
        if (visit := self.visits.find(follow_id)) is None:
            return False
        self._end(visit)
        self.emit(Finished(follow_id, "cancelled"))
        return True

    def turn(self, chunk_tokens: int) -> None:
        """Begin those whose streams have come, and take a step of one."""
        for visit in self.visits:
            if visit.work is None:
                self._look(visit)
        if (due := self.visits.take_turn()) is not None and due.work is not None:
            self._step(due, due.work, chunk_tokens)

    def _step(self, visit: _DraftGuest, work: DraftWriter, chunk_tokens: int) -> None:
        try:
            work.step(chunk_tokens)
        except PeerLost:
            # Whoever wrote the text has ended it, or is gone: that is the ordinary end.
            self._end(visit)
            self.emit(Followed(visit.command.id, work.drafted, work.judged, work.right))
        except Exception as error:
            self._fail(visit, error)
        else:
            self.steps += 1

    def _look(self, visit: _DraftGuest) -> None:
        command = visit.command
        try:
            if self.streams.complete(command.id, [DRAFTS]):
                visit.work = DraftWriter(
                    visit.model,
                    partial(self.streams.connect(command.id), DRAFTS),
                    Lookahead(
                        self.ends,
                        ahead=command.ahead,
                        detours=limits.DRAFT_DETOURS * command.ahead // limits.DRAFT_AHEAD,
                    ),
                    context_tokens=self.context_tokens,
                    vocab_size=self.vocab_size,
                    grow=partial(self._grow, visit),
                )
            elif visit.overdue:
                raise PeerLost(f"The text to be followed did not come within {limits.TICKET_S:.0f} s.")
        except Exception as error:
            self._fail(visit, error)

    def _grow(self, visit: _DraftGuest, tokens: int) -> None:
        if tokens <= visit.lent_tokens:
            return
        tokens = min(tokens + GROWTH_TOKENS, self.context_tokens + limits.DRAFT_AHEAD)
        self.budget.give_back(visit.command.id)
        visit.lent_tokens = 0
        self.budget.lend(visit.command.id, tokens * self.budget.bytes_per_token)
        visit.lent_tokens = tokens

    def _fail(self, visit: _DraftGuest, error: Exception) -> None:
        self._end(visit)
        self._told(visit.command.id, error)

    def _told(self, follow_id: str, error: Exception) -> None:
        self.emit(failed(follow_id, error, "Nothing could be drafted"))

    def _end(self, visit: _DraftGuest) -> None:
        self.visits.end(visit, self.streams, self.budget)
        tokens, cache = visit.model.kept
        if tokens:
            mx.eval([layer.state for layer in cache])
            self.prefix.store(tokens, cache, GUESSED)

    def close(self) -> None:
        for visit in self.visits:
            self._end(visit)
