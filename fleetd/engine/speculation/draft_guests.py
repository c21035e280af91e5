"""Texts of other workers that this worker drafts for.

When a task ends, what it has read of the text goes to the prefix cache, for the next turn of the same
conversation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.measure.memory import GROWTH_TOKENS
from fleetd.engine.prefixes.prefix_cache import DENSE, PrefixCache
from fleetd.engine.protocol import Accepted, DraftFor, DraftReport
from fleetd.engine.speculation.draft_cache import SAVED_STATES
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.drafter import DraftModel, DraftWriter
from fleetd.engine.speculation.lookahead import Lookahead
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, Overloaded, PeerLost

# Namespace of KV that was computed in blocks with another rounding than prefill's: good enough to guess from,
# and for nothing that must be exact.
GUESSED = "guessed"


# Tokens whose KV a text takes at most, however long it is.
_MOST_TOKENS = (
    limits.DRAFT_SINK_TOKENS + limits.DRAFT_WINDOW_TOKENS + limits.DRAFT_AHEAD + limits.DRAFT_DETOUR_TOKENS
)
_Task = GuestTask[DraftFor, DraftWriter]


@dataclass(kw_only=True)
class DraftGuests(Guests[DraftFor, DraftWriter]):
    """``ends``: the model's end tokens, after which nothing is drafted."""

    failure = "Nothing could be drafted"

    model: Any
    ends: frozenset[int]
    context_tokens: int
    vocab_size: int
    prefix: PrefixCache
    _models: dict[str, DraftModel] = field(default_factory=dict, init=False)

    def admit(self, command: DraftFor) -> tuple[_Task, Accepted]:
        if command.id in self:
            raise InvalidValue("This text is being followed already.")
        if len(self) >= limits.FOLLOWS:
            raise Overloaded(f"This machine drafts for {limits.FOLLOWS} texts already.")
        # Made now, so that a model that cannot draft is refused before the other machine connects.
        model = DraftModel(self.model, lambda tokens: self.prefix.fetch(tokens, DENSE, GUESSED))
        self._models[command.id] = model
        # The text's length comes with the text.
        return _Task(command), Accepted(command.id, 0)

    def stream_names(self, command: DraftFor) -> Iterable[str]:
        return (DRAFTS,)

    def begin_work(self, task: _Task, streams: HandedOverStreams) -> DraftWriter:
        ahead = task.command.ahead
        return DraftWriter(
            self._models[task.id],
            partial(streams.connect(task.id), DRAFTS),
            Lookahead(self.ends, ahead=ahead, detours=limits.DRAFT_DETOURS * ahead // limits.DRAFT_AHEAD),
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            grow=partial(self._grow, task.id),
        )

    def advance(self, task: _Task, work: DraftWriter, chunk_tokens: int) -> DraftReport | None:
        try:
            work.step(chunk_tokens)
        except PeerLost:
            # The ordinary end: the worker that writes the text has ended it, or is gone.
            return DraftReport(task.id, work.drafted, work.judged, work.right)
        except Exception:
            # After a step that broke off the cache may hold other rows than its tokens', or lack some.
            del self._models[task.id]
            raise
        return None

    def _grow(self, task_id: str, tokens: int) -> None:
        """Lend a task KV for ``tokens``, and for some more. Raises OutOfMemory."""
        if self._bytes(tokens) <= self.budget.lent_bytes(task_id):
            return
        tokens = min(tokens + GROWTH_TOKENS, self.context_tokens + limits.DRAFT_AHEAD, _MOST_TOKENS)
        self.budget.give_back(task_id)
        self.budget.lend(task_id, self._bytes(tokens))

    def _bytes(self, tokens: int) -> int:
        sizes = self.budget.sizes
        return sizes.of(tokens) + SAVED_STATES * sizes.whole(tokens)

    def on_end(self, task: _Task) -> None:
        if (model := self._models.pop(task.id, None)) is None:
            return
        tokens, cache = model.kept
        if tokens:
            mx.eval([layer.state for layer in cache])
            self.prefix.store(tokens, cache, GUESSED)
