"""How long another machine may take over an answer without getting any further. Pure.

A machine that only says that it is alive would otherwise keep a request for ever. What counts is progress:
the request is accepted, more of its prompt is prefilled, more of a load is done, another token has come.
"""

from __future__ import annotations

from fleetd import limits
from fleetd.engine.protocol import Accepted, Delta, Loading, Prefill, ToolCall, ToolCallPiece
from fleetd.requests.messages import JobEvent


class AnswerDeadline:
    """``due_s``: when the machine is given up, unless there is progress before; monotonic seconds.

    Args:
        busy: by its card the machine has a queue or no free stream, or it has to load the model.
        prefill_s: how long the whole prefill takes by the plan; None if it was not priced.
    """

    def __init__(self, now_s: float, *, busy: bool, prefill_s: float | None = None) -> None:
        self._planned_s = prefill_s
        self.due_s = now_s + (limits.JOB_QUEUE_S if busy else limits.JOB_BEGIN_S)
        self._prompt_tokens = 0
        self._prefilled = -1
        self._loaded = ("", -1)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Note an event; one that is no progress changes nothing."""
        match event:
            case Loading(stage, done) if (stage, done) > self._loaded or stage != self._loaded[0]:
                self._loaded = stage, done
                self.due_s = now_s + limits.ENGINE_LOAD_S
            case Accepted():
                self._prompt_tokens = event.prompt_tokens
                self.due_s = now_s + self._prefill_s(0)
            case Prefill() if event.done > self._prefilled:
                self._prefilled = event.done
                self._prompt_tokens = max(self._prompt_tokens, event.total)
                self.due_s = now_s + self._prefill_s(event.done)
            case Delta() | ToolCallPiece() if event.tokens:
                self.due_s = now_s + limits.JOB_STALL_S
            case ToolCall():
                self.due_s = now_s + limits.JOB_STALL_S
            case _:
                pass

    def _prefill_s(self, done: int) -> float:
        """Helpers may have most of a prompt, and then nothing is told until they have sent it."""
        left = max(0, self._prompt_tokens - done)
        slowest_s = left / limits.JOB_LEAST_TOK_S
        if self._planned_s is None:
            return limits.JOB_STALL_S + slowest_s
        late_s = limits.JOB_LATE * self._planned_s * left / max(1, self._prompt_tokens)
        return limits.JOB_STALL_S + min(slowest_s, late_s)
