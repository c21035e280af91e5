"""What one request is seen to do: counted while its events pass by, without touching them.

Pure: events and clock readings in, figures out. It knows at every moment what has been computed so far,
which is what a request that is cancelled or cut off is billed for.
"""

from __future__ import annotations

from typing import Protocol

from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Loading,
    Prefill,
    Timings,
    ToolCall,
    Usage,
)


class Gauges(Protocol):
    """The part of ``metrics.Metrics`` that follows a request."""

    def waiting(self, model: str, change: int) -> None: ...
    def running(self, model: str, change: int) -> None: ...
    def first_token(self, model: str, after_s: float) -> None: ...
    def tokens(self, model: str, count: int, elapsed_s: float) -> None: ...


class RequestProgress:
    """One request from its arrival to its end; ``running`` once the engine works on it, waiting before.

    ``shared``: other machines computed some of its prefill. ``kept``: of its prompt's tokens, those that are
    prefilled, where some are left out; else 0.
    """

    def __init__(self, model: str, gauges: Gauges, now_s: float) -> None:
        self.model = model
        self.running = False
        self.shared = False
        self.kept = 0
        self.finished: Finished | None = None
        self._gauges = gauges
        self._arrived_s = now_s
        self._running_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = now_s
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        gauges.waiting(model, +1)

    def see(self, event: Loading | Event, now_s: float) -> None:
        match event:
            case Accepted():
                self._prompt_tokens, self.kept = event.prompt_tokens, event.kept
            case Prefill():
                self._cached_tokens = max(self._cached_tokens, event.cached)
                self._run(now_s)
            case Delta():
                self._run(now_s)
                self._completion_tokens += event.tokens
                if event.channel == "reasoning":
                    self._reasoning_tokens += event.tokens
                self._token(event.tokens, now_s)
            case ToolCall():
                self._run(now_s)
                self._token(0, now_s)
            case Finished():
                self.finished = event
            case _:
                pass

    def end(self) -> None:
        """Take the request out of the gauges; once, at its end of any kind."""
        (self._gauges.running if self.running else self._gauges.waiting)(self.model, -1)

    def so_far(self, now_s: float) -> tuple[Usage, Timings]:
        """What was computed: the engine's own figures if it gave them, else what was seen from here."""
        if self.finished is not None:
            return self.finished.usage, self.finished.timings
        usage = Usage(
            prompt_tokens=self._prompt_tokens if self.running else 0,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            reasoning_tokens=self._reasoning_tokens,
        )
        started_s = now_s if self._running_s is None else self._running_s
        first_s = now_s if self._first_token_s is None else self._first_token_s
        return usage, Timings(
            queue_s=started_s - self._arrived_s,
            prefill_s=first_s - started_s,
            decode_s=now_s - first_s,
        )

    def _run(self, now_s: float) -> None:
        if not self.running:
            self.running = True
            self._running_s = now_s
            self._gauges.waiting(self.model, -1)
            self._gauges.running(self.model, +1)

    def _token(self, count: int, now_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._gauges.first_token(self.model, now_s - self._arrived_s)
        elif count:
            self._gauges.tokens(self.model, count, now_s - self._last_token_s)
        else:
            return
        self._last_token_s = now_s
