"""How long another machine may take over an answer. Pure.

A machine that only says that it is alive would otherwise keep a request for ever. What counts is progress:
the request is accepted, a load begins or gets further, more of its images is read or of its prompt prefilled,
another token has come. The whole of each part has its time, too: the load, the prefill by the plan's figures,
and the answer at a least speed.
"""

from __future__ import annotations

import math

from fleetd import limits
from fleetd.engine.protocol import WAITING, Accepted, Delta, Loading, Prefill, ToolCall, ToolCallPiece
from fleetd.requests.remote.messages import JobEvent


class AnswerDeadline:
    """``due_s``: when the machine is given up, unless there is progress before; monotonic seconds.

    Args:
        busy: by its card the machine has a queue or no free stream, or it has to load the model.
        prefill_s: how long the whole prefill takes by the plan; None if it was not priced.
        load_within_s: a load that stands still for so long is given up.
        images: how many the prompt has.
    """

    def __init__(
        self,
        now_s: float,
        *,
        busy: bool,
        prefill_s: float | None = None,
        load_within_s: float = limits.ENGINE_LOAD_S,
        images: int = 0,
    ) -> None:
        self._images_s = images * limits.JOB_IMAGE_S
        self._planned_s = prefill_s
        self._load_within_s = load_within_s
        begin_s = limits.JOB_BEGIN_S + images * limits.JOB_IMAGE_BEGIN_S
        self.due_s = now_s + (limits.JOB_QUEUE_S if busy else min(limits.JOB_QUEUE_S, begin_s))
        # When the part of the answer that has begun is over, whatever progress there is.
        self._over_s = math.inf
        self._loading: Loading | None = None
        self._load_over_s = math.inf
        self._accepted = self._answering = False
        self._prompt_tokens = 0
        # Prompt tokens and steps for images that are done.
        self._prefilled = (-1, 0)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Note an event; one that is no progress changes nothing."""
        match event:
            case Loading():
                self._load(event, now_s)
            case Accepted() if not self._accepted:
                self._accept(event.prompt_tokens, now_s)
                self.due_s = now_s + self._next_step_s(0)
            case Prefill() if self._is_further(event) and not self._answering:
                if not self._accepted:
                    self._accept(event.total, now_s)
                self._prefilled = event.done, event.image_steps
                self.due_s = min(self._over_s, now_s + self._next_step_s(event.done))
            case Delta() | ToolCallPiece() if event.tokens:
                self._answer(event.tokens, now_s)
            case ToolCall():
                self._answer(0, now_s)
            case _:
                pass

    def _is_further(self, event: Prefill) -> bool:
        done, image_steps = self._prefilled
        return event.done > done or (event.done == done and event.image_steps > image_steps)

    def _load(self, event: Loading, now_s: float) -> None:
        before, self._loading = self._loading, event
        if before is None:
            # What a stage is called could change for ever.
            self._load_over_s = now_s + limits.ENGINE_LOAD_S
        elif event.stage == before.stage and event.done <= before.done:
            return
        waits = event.stage.startswith(WAITING)
        within_s = limits.JOB_QUEUE_S if waits else self._load_within_s
        self.due_s = min(self._load_over_s, now_s + within_s)

    def _accept(self, prompt_tokens: int, now_s: float) -> None:
        self._accepted, self._prompt_tokens = True, prompt_tokens
        # Other requests may be computed between two steps of this one.
        self._over_s = now_s + limits.JOB_QUEUE_S + self._images_s + self._prefill_s(0)

    def _answer(self, tokens: int, now_s: float) -> None:
        if not self._answering:
            self._answering, self._over_s = True, now_s + limits.JOB_QUEUE_S
        self._over_s += tokens / limits.JOB_DECODE_TOK_S
        self.due_s = min(self._over_s, now_s + limits.JOB_STALL_S)

    def _next_step_s(self, done: int) -> float:
        """Before the first step for its images a prompt may wait for memory, or for another prompt that has
        the same ones."""
        return self._prefill_s(done) + (0.0 if self._prefilled[1] else self._images_s)

    def _prefill_s(self, done: int) -> float:
        """Helpers may have most of a prompt, and then nothing is told until they have sent it."""
        left = max(0, self._prompt_tokens - done)
        slowest_s = left / limits.JOB_LEAST_TOK_S
        if self._planned_s is None:
            return limits.JOB_STALL_S + slowest_s
        late_s = limits.JOB_LATE * self._planned_s * left / max(1, self._prompt_tokens)
        return limits.JOB_STALL_S + min(slowest_s, late_s)
