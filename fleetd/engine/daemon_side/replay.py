"""An answer that is computed a second time, because a machine of its group left in the middle of it.

    first     Tokenized Accepted Delta Delta ─ a machine leaves
    again     Tokenized Accepted Delta Delta Delta … Finished
    passed on                              └─────────────────

The same tokens follow whichever machines compute them, by the same seed. That they did is checked. The last
digits of their probabilities are not: machines that divide layers add up in another order.
"""

from __future__ import annotations

import secrets

from msgspec.structs import replace

from fleetd import limits
from fleetd.engine.protocol import Delta, Event, Finished, Generate, ToolCall, ToolCallPiece
from fleetd.errors import EngineError, FleetError

_ANSWER = (Delta, ToolCallPiece, ToolCall)


class Replay:
    """What was passed on of an answer, if a group gives it.

    ``repeatable``: the request with a seed, so that a second try draws the same tokens.
    """

    def __init__(self, request: Generate) -> None:
        self.request = self.repeatable = request
        # Set once several machines answer. Until then no event is kept.
        self.of_group = False
        if request.sampling.seed is None:
            seeded = replace(request.sampling, seed=secrets.randbits(31))
            self.repeatable = replace(request, sampling=seeded)
        self._passed: list[Event] = []
        # Of the present try, the events of the answer that came.
        self._came = 0
        self._tries = 1
        # Ids of tool calls of the present try, and those that they had in the first.
        self._call_ids: dict[str, str] = {}

    def again(self, error: FleetError) -> None:
        """Begin another try. Raises ``error`` if there were enough."""
        if self._tries >= limits.GROUP_TRIES:
            raise error
        self._tries += 1
        self._came = 0
        self._call_ids.clear()

    def passed(self, event: Event) -> Event | None:
        """The event, or None if it was passed on in an earlier try.

        Raises EngineError if it is another one than then.
        """
        if not self.of_group:
            return event
        if isinstance(event, _ANSWER):
            self._came += 1
            known = self._passed[self._came - 1] if self._came <= len(self._passed) else None
            if isinstance(event, ToolCall | ToolCallPiece):
                if isinstance(known, ToolCall | ToolCallPiece):
                    self._call_ids[event.call_id] = known.call_id
                event = replace(event, call_id=self._call_ids.get(event.call_id, event.call_id))
            if known is None:
                self._passed.append(event)
                return event
            if _said(event) != _said(known):
                raise EngineError(
                    "A machine left the group, and the others do not go on with the same answer.",
                    hint="Send the request again.",
                )
            return None
        # How the prompt was read was told already.
        told = self._tries == 1 or isinstance(event, Finished) or not self._passed
        return event if told else None


def _said(event: Event) -> Event:
    """The event without its probabilities; which tokens they are of stays."""
    if not isinstance(event, Delta) or event.logprobs is None:
        return event
    return replace(event, logprobs=[replace(each, logprob=0.0, top=[]) for each in event.logprobs])
