"""Engine events → OpenAI objects. Pure: no clock, no socket.

For each endpoint one class makes the chunks of a stream and one folds the whole reply. Both take events as
``feed(choice index, event)``, from any number of choices in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from fleetd.api.openai import objects as o
from fleetd.api.smart_prefill_reports import SmartPrefillReports
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.prefill_trace import Speculated
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import Delta, Event, Finished, Timings, TokenLogprob, ToolCall, Usage
from fleetd.errors import EngineError
from fleetd.requests.job import Planned

# JSON has no minus infinity; this is what OpenAI sends for "practically impossible".
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """What all objects of one reply have in common."""

    id: str
    created: int
    model: str
    fingerprint: str


class UsageTally:
    """Usage and times over all choices. A prompt shared by ``per_prompt`` choices is counted once.

    ``told``: what smart prefill made of the prompts.
    """

    def __init__(self, per_prompt: int, smart: SmartPrefillPolicy | None = None) -> None:
        self.told = SmartPrefillReports(smart, per_prompt)
        self._per_prompt = per_prompt
        self._finished: dict[int, Finished] = {}

    def add(self, index: int, event: Finished) -> None:
        self._finished[index] = event

    def usage(self) -> o.UsageObject:
        first = [event.usage for i, event in self._finished.items() if i % self._per_prompt == 0]
        every = [event.usage for event in self._finished.values()]
        prompt = sum(usage.prompt_tokens for usage in first) + self._left_out()
        completion = sum(usage.completion_tokens for usage in every)
        return o.UsageObject(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=o.PromptDetails(sum(usage.cached_tokens for usage in first)),
            completion_tokens_details=o.CompletionDetails(sum(usage.reasoning_tokens for usage in every)),
        )

    def _left_out(self) -> int:
        """Tokens that the client sent and, its prompt being rewritten, the engine never saw."""
        told = [self.told.of(i) for i in self._finished if i % self._per_prompt == 0]
        return sum(each.dropped_tokens for each in told if each.form == "text")

    def timing(self, index: int, event: Finished) -> o.TimingReport:
        """Of one choice."""
        told = self.told.of(index)
        smart = told if told.code or told.used else None
        left_out = _not_computed(told)
        return timing_report(
            event.usage, event.timings, smart=smart, left_out=left_out, drafts=[event.speculation]
        )

    def timings(self) -> o.TimingReport:
        """Choices run side by side: tokens add up, times are the longest."""
        finished = list(self._finished.values())
        return timing_report(
            Usage(
                prompt_tokens=sum(event.usage.prompt_tokens for event in finished),
                cached_tokens=sum(event.usage.cached_tokens for event in finished),
                completion_tokens=sum(event.usage.completion_tokens for event in finished),
            ),
            Timings(
                queue_s=max((event.timings.queue_s for event in finished), default=0.0),
                prefill_s=max((event.timings.prefill_s for event in finished), default=0.0),
                decode_s=max((event.timings.decode_s for event in finished), default=0.0),
            ),
            streams=max(1, len(finished)),
            smart=self.told.slowest,
            left_out=sum(_not_computed(self.told.of(index)) for index in self._finished),
            drafts=[event.speculation for event in finished],
        )


def _not_computed(told: SmartPrefillResult) -> int:
    """Tokens of a choice's prompt that the engine has and does not prefill."""
    return told.dropped_tokens if told.form == "sparse" else 0


def timing_report(
    usage: Usage,
    timings: Timings,
    *,
    streams: int = 1,
    smart: SmartPrefillResult | None = None,
    left_out: int = 0,
    drafts: Sequence[Speculated | None] = (),
) -> o.TimingReport:
    """``decode_s`` runs from the first to the last token, so the first token of each stream is not in it.

    ``smart``: what smart prefill took, where it was asked for. ``left_out``: tokens that were not computed.
    """
    prefilled = max(0, usage.prompt_tokens - usage.cached_tokens - left_out)
    stepped = max(0, usage.completion_tokens - streams)
    told = [each for each in drafts if each is not None]
    return o.TimingReport(
        prompt_n=prefilled,
        cache_n=usage.cached_tokens,
        prompt_ms=_ms(timings.prefill_s),
        prompt_per_second=_rate(prefilled, timings.prefill_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=_ms(timings.decode_s),
        predicted_per_second=_rate(stepped, timings.decode_s),
        queue_ms=_ms(timings.queue_s),
        score_ms=UNSET if smart is None else _ms(smart.score_s),
        draft_n=sum(each.drafted for each in told) if told else UNSET,
        draft_n_accepted=sum(each.accepted for each in told) if told else UNSET,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def finish_reason(event: Finished) -> o.FinishReason:
    """Raises EngineError for an answer that was cut short by us: it must not look complete."""
    if event.reason == "cancelled":
        raise EngineError(
            "The answer was cut short: its request was cancelled in the engine.", hint="Try again."
        )
    return event.reason


# ---- Logprobs --------------------------------------------------------------------------------------------


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(items: list[TokenLogprob]) -> o.ChatLogprobs:
    return o.ChatLogprobs(
        [
            o.LogprobItem(
                item.token,
                _finite(item.logprob),
                list(item.raw),
                [o.TopLogprobItem(top.token, _finite(top.logprob), list(top.raw)) for top in item.top],
            )
            for item in items
        ]
    )


def text_logprobs(items: list[TokenLogprob], *, opens_prompt: bool = False) -> o.TextLogprobs:
    """The chosen token is always among the top. Nothing comes before a prompt's first token: it has none."""
    known = [not (opens_prompt and i == 0) for i in range(len(items))]
    return o.TextLogprobs(
        tokens=[item.token for item in items],
        token_logprobs=[_finite(item.logprob) if ok else None for item, ok in zip(items, known, strict=True)],
        top_logprobs=[
            {item.token: _finite(item.logprob)} | {top.token: _finite(top.logprob) for top in item.top}
            if ok
            else None
            for item, ok in zip(items, known, strict=True)
        ],
        text_offset=[item.text_offset for item in items],
    )


# ---- /v1/chat/completions --------------------------------------------------------------------------------


class ChatStream:
    """Chunks of a streamed chat reply.

    Per choice: role with empty content, deltas, then an empty delta with the finish reason and the timings.
    After all choices, only if asked, one chunk without choices that has the usage.
    """

    def __init__(
        self,
        head: ReplyHeader,
        *,
        choices: int,
        include_usage: bool,
        parallel_tools: bool,
        smart: SmartPrefillPolicy | None = None,
    ) -> None:
        self._head = head
        self._include_usage = include_usage
        self._parallel_tools = parallel_tools
        self._started: set[int] = set()
        self._tally = UsageTally(choices, smart)

    def feed(self, index: int, event: Planned | Event) -> list[o.ChatChunk]:
        match event:
            case Planned():
                self._tally.told.add(index, event.smart)
                return []
            case Delta():
                return self._opening(index) + self._delta(index, event)
            case ToolCall():
                return self._opening(index) + self._tool_call(index, event)
            case Finished():
                self._tally.add(index, event)
                last = self._chunk(
                    o.ChunkChoice(index, o.ChoiceDelta(), finish_reason(event)),
                    timings=self._tally.timing(index, event),
                    smart=self._tally.told.report(),
                )
                return [*self._opening(index), last]
            case _:
                return []

    def closing(self) -> list[o.ChatChunk]:
        if not self._include_usage:
            return []
        told = self._tally.told.report()
        return [self._chunk(usage=self._tally.usage(), timings=self._tally.timings(), smart=told)]

    def _opening(self, index: int) -> list[o.ChatChunk]:
        if index in self._started:
            return []
        self._started.add(index)
        return [self._chunk(o.ChunkChoice(index, o.ChoiceDelta(role="assistant", content=""), None))]

    def _delta(self, index: int, event: Delta) -> list[o.ChatChunk]:
        if event.channel == "reasoning":
            if not event.text:
                return []
            return [self._chunk(o.ChunkChoice(index, o.ChoiceDelta(reasoning_content=event.text), None))]
        if not event.text and not event.logprobs:
            return []
        logprobs = chat_logprobs(event.logprobs) if event.logprobs is not None else UNSET
        return [self._chunk(o.ChunkChoice(index, o.ChoiceDelta(content=event.text), None, logprobs))]

    def _tool_call(self, index: int, event: ToolCall) -> list[o.ChatChunk]:
        if event.index > 0 and not self._parallel_tools:
            return []
        name = o.ToolCallDelta(event.index, o.FunctionDelta("", event.name), event.call_id, "function")
        arguments = o.ToolCallDelta(event.index, o.FunctionDelta(event.arguments))
        return [
            self._chunk(o.ChunkChoice(index, o.ChoiceDelta(tool_calls=[piece]), None))
            for piece in (name, arguments)
        ]

    def _chunk(
        self,
        *choices: o.ChunkChoice,
        usage: o.UsageObject | UnsetType | None = UNSET,
        timings: o.TimingReport | UnsetType = UNSET,
        smart: o.SmartReport | UnsetType = UNSET,
    ) -> o.ChatChunk:
        if usage is UNSET and self._include_usage:
            usage = None
        return o.ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=list(choices),
            usage=usage,
            timings=timings,
            smart_prefill=smart,
        )


@dataclass(slots=True)
class _ChoiceText:
    """One choice, as far as it has come."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[o.MessageToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: o.FinishReason = "stop"


class ChatWhole:
    """Folds a chat reply that is not streamed."""

    def __init__(
        self,
        head: ReplyHeader,
        *,
        choices: int,
        logprobs: bool,
        parallel_tools: bool,
        smart: SmartPrefillPolicy | None = None,
    ) -> None:
        self._head = head
        self._logprobs = logprobs
        self._parallel_tools = parallel_tools
        self._answers = [_ChoiceText() for _ in range(choices)]
        self._tally = UsageTally(choices, smart)

    def feed(self, index: int, event: Planned | Event) -> None:
        answer = self._answers[index]
        match event:
            case Planned():
                self._tally.told.add(index, event.smart)
            case Delta(channel="reasoning"):
                answer.reasoning.append(event.text)
            case Delta():
                answer.text.append(event.text)
                answer.logprobs += event.logprobs or ()
            case ToolCall() if event.index == 0 or self._parallel_tools:
                function = o.FunctionCall(event.name, event.arguments)
                answer.tool_calls.append(o.MessageToolCall(event.call_id, "function", function))
            case Finished():
                answer.reason = finish_reason(event)
                self._tally.add(index, event)
            case _:
                pass

    def whole(self) -> o.ChatCompletion:
        return o.ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=[self._choice(i, answer) for i, answer in enumerate(self._answers)],
            usage=self._tally.usage(),
            timings=self._tally.timings(),
            smart_prefill=self._tally.told.report(),
        )

    def _choice(self, index: int, answer: _ChoiceText) -> o.ChatChoice:
        text, reasoning = "".join(answer.text), "".join(answer.reasoning)
        message = o.ReplyMessage(
            "assistant",
            None if answer.tool_calls and not text else text,
            reasoning or UNSET,
            answer.tool_calls or UNSET,
        )
        logprobs = chat_logprobs(answer.logprobs) if self._logprobs else None
        return o.ChatChoice(index, message, answer.reason, logprobs)


# ---- /v1/completions -------------------------------------------------------------------------------------


class TextStream:
    """Chunks of a streamed text completion: text as it comes, then an empty text with the finish reason."""

    def __init__(
        self,
        head: ReplyHeader,
        *,
        choices: int,
        per_prompt: int,
        include_usage: bool,
        echo: bool,
        smart: SmartPrefillPolicy | None = None,
    ) -> None:
        self._head = head
        self._include_usage = include_usage
        self._opens_prompt = set(range(choices)) if echo else set[int]()
        self._tally = UsageTally(per_prompt, smart)

    def feed(self, index: int, event: Planned | Event) -> list[o.TextCompletion]:
        match event:
            case Planned():
                self._tally.told.add(index, event.smart)
                return []
            case Delta() if event.text or event.logprobs:
                logprobs = None
                if event.logprobs is not None:
                    logprobs = text_logprobs(event.logprobs, opens_prompt=index in self._opens_prompt)
                    self._opens_prompt.discard(index)
                return [self._chunk(o.TextChoice(index, event.text, None, logprobs))]
            case Finished():
                self._tally.add(index, event)
                last = o.TextChoice(index, "", finish_reason(event))
                timings, told = self._tally.timing(index, event), self._tally.told.report()
                return [self._chunk(last, timings=timings, smart=told)]
            case _:
                return []

    def closing(self) -> list[o.TextCompletion]:
        if not self._include_usage:
            return []
        told = self._tally.told.report()
        return [self._chunk(usage=self._tally.usage(), timings=self._tally.timings(), smart=told)]

    def _chunk(
        self,
        *choices: o.TextChoice,
        usage: o.UsageObject | UnsetType | None = UNSET,
        timings: o.TimingReport | UnsetType = UNSET,
        smart: o.SmartReport | UnsetType = UNSET,
    ) -> o.TextCompletion:
        if usage is UNSET and self._include_usage:
            usage = None
        return _text_object(self._head, list(choices), usage, timings, smart)


class TextWhole:
    """Folds a text completion that is not streamed. What a model marks as reasoning is text here."""

    def __init__(
        self,
        head: ReplyHeader,
        *,
        choices: int,
        per_prompt: int,
        logprobs: bool,
        echo: bool,
        smart: SmartPrefillPolicy | None = None,
    ) -> None:
        self._head = head
        self._echo = echo
        self._logprobs = logprobs
        self._answers = [_ChoiceText() for _ in range(choices)]
        self._tally = UsageTally(per_prompt, smart)

    def feed(self, index: int, event: Planned | Event) -> None:
        answer = self._answers[index]
        match event:
            case Planned():
                self._tally.told.add(index, event.smart)
            case Delta():
                answer.text.append(event.text)
                answer.logprobs += event.logprobs or ()
            case Finished():
                answer.reason = finish_reason(event)
                self._tally.add(index, event)
            case _:
                pass

    def whole(self) -> o.TextCompletion:
        choices = [
            o.TextChoice(
                i,
                "".join(answer.text),
                answer.reason,
                text_logprobs(answer.logprobs, opens_prompt=self._echo) if self._logprobs else None,
            )
            for i, answer in enumerate(self._answers)
        ]
        tally = self._tally
        return _text_object(self._head, choices, tally.usage(), tally.timings(), tally.told.report())


def _text_object(
    head: ReplyHeader,
    choices: list[o.TextChoice],
    usage: o.UsageObject | UnsetType | None,
    timings: o.TimingReport | UnsetType,
    smart: o.SmartReport | UnsetType,
) -> o.TextCompletion:
    return o.TextCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.fingerprint,
        choices=choices,
        usage=usage,
        timings=timings,
        smart_prefill=smart,
    )
