"""Usage and times of one request, over all its choices. Pure; a dialect turns them into its own objects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fleetd.api.generation.smart_prefill_reports import SmartPrefillReports
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.prefill_trace import Speculated
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import Finished, Timings, Usage


class EngineWork(msgspec.Struct, frozen=True):
    """What the engines computed for some choices."""

    #: Tokens, summed over the choices. A prompt that several choices share counts for each.
    usage: Usage
    #: The longest of each phase: choices run side by side. Restored and fetched tokens are summed.
    timings: Timings
    #: How many choices were decoded; at least 1.
    streams: int
    #: Tokens of the prompts that smart prefill left out of prefill, in the sparse form.
    not_prefilled: int
    #: Per choice, the tokens that were guessed ahead; None if none were.
    drafts: tuple[Speculated | None, ...]
    #: The smart prefill that took longest; None if it was not asked for.
    smart: SmartPrefillResult | None


class UsageTally:
    """Collects the last event of each choice.

    Args:
        per_prompt: choices that answer each prompt.
        policy: the request's smart prefill; None reads prompts whole.
    """

    def __init__(self, per_prompt: int, policy: SmartPrefillPolicy | None = None) -> None:
        self.smart = SmartPrefillReports(policy, per_prompt)
        self._per_prompt = per_prompt
        self._finished: dict[int, Finished] = {}

    def add(self, index: int, event: Finished) -> None:
        self._finished[index] = event

    def billed(self) -> Usage:
        """Usage for the client: each prompt once, with as many tokens as the client sent."""
        first = [event.usage for i, event in self._finished.items() if i % self._per_prompt == 0]
        every = [event.usage for event in self._finished.values()]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in first) + self._left_out(),
            cached_tokens=sum(usage.cached_tokens for usage in first),
            completion_tokens=sum(usage.completion_tokens for usage in every),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in every),
        )

    def work_of(self, index: int) -> EngineWork:
        """One finished choice."""
        found = self.smart.of(index)
        return _work({index: self._finished[index]}, self.smart, found if found.code or found.used else None)

    def work(self) -> EngineWork:
        """All finished choices."""
        return _work(self._finished, self.smart, self.smart.slowest)

    def _left_out(self) -> int:
        """Tokens that the client sent and that, its prompt being rewritten, the engine never saw."""
        found = [self.smart.of(i) for i in self._finished if i % self._per_prompt == 0]
        return sum(each.dropped_tokens for each in found if each.form == "text")


def _work(
    finished: Mapping[int, Finished], reports: SmartPrefillReports, smart: SmartPrefillResult | None
) -> EngineWork:
    events = list(finished.values())
    found = [reports.of(index) for index in finished]
    return EngineWork(
        usage=Usage(
            prompt_tokens=sum(event.usage.prompt_tokens for event in events),
            cached_tokens=sum(event.usage.cached_tokens for event in events),
            completion_tokens=sum(event.usage.completion_tokens for event in events),
        ),
        timings=Timings(
            queue_s=max((event.timings.queue_s for event in events), default=0.0),
            prefill_s=max((event.timings.prefill_s for event in events), default=0.0),
            decode_s=max((event.timings.decode_s for event in events), default=0.0),
            restored_tokens=sum(event.timings.restored_tokens for event in events),
            restore_s=max((event.timings.restore_s for event in events), default=0.0),
            fetched_tokens=sum(event.timings.fetched_tokens for event in events),
            fetch_s=max((event.timings.fetch_s for event in events), default=0.0),
            fetched_from=next(
                (event.timings.fetched_from for event in events if event.timings.fetched_from), ""
            ),
        ),
        streams=max(1, len(events)),
        not_prefilled=sum(each.dropped_tokens for each in found if each.form == "sparse"),
        drafts=tuple(event.speculation for event in events),
        smart=smart,
    )
