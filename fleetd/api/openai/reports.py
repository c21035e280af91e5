"""Usage, timings and smart prefill as the objects of OpenAI's dialect. Pure."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from fleetd.api.generation.smart_prefill_reports import SmartPrefillReports, scorers
from fleetd.api.generation.usage_tally import EngineWork
from fleetd.api.openai import objects as o
from fleetd.engine.protocol import Usage


def usage_object(billed: Usage) -> o.UsageObject:
    """The usage object for ``UsageTally.billed``."""
    return o.UsageObject(
        prompt_tokens=billed.prompt_tokens,
        completion_tokens=billed.completion_tokens,
        total_tokens=billed.prompt_tokens + billed.completion_tokens,
        prompt_tokens_details=o.PromptDetails(billed.cached_tokens),
        completion_tokens_details=o.CompletionDetails(billed.reasoning_tokens),
    )


def timing_report(work: EngineWork) -> o.TimingReport:
    """``decode_s`` runs from the first to the last token, so the first token of each stream is not in it."""
    usage, timings = work.usage, work.timings
    prefilled = max(0, usage.prompt_tokens - usage.cached_tokens - work.not_prefilled)
    stepped = max(0, usage.completion_tokens - work.streams)
    drafts = [each for each in work.drafts if each is not None]
    return o.TimingReport(
        prompt_n=prefilled,
        cache_n=usage.cached_tokens,
        prompt_ms=_ms(timings.prefill_s),
        prompt_per_second=_rate(prefilled, timings.prefill_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=_ms(timings.decode_s),
        predicted_per_second=_rate(stepped, timings.decode_s),
        queue_ms=_ms(timings.queue_s),
        restored_n=timings.restored_tokens or UNSET,
        restore_ms=_ms(timings.restore_s) if timings.restored_tokens else UNSET,
        fetched_n=timings.fetched_tokens or UNSET,
        fetch_ms=_ms(timings.fetch_s) if timings.fetched_tokens else UNSET,
        fetched_from=timings.fetched_from or UNSET,
        score_ms=UNSET if work.smart is None else _ms(work.smart.score_s),
        draft_n=sum(each.drafted for each in drafts) if drafts else UNSET,
        draft_n_accepted=sum(each.accepted for each in drafts) if drafts else UNSET,
    )


def smart_report(reports: SmartPrefillReports) -> o.SmartReport | UnsetType:
    """Each prompt once, however many choices answer it; UNSET for a request without smart prefill."""
    found = reports.per_prompt
    if reports.policy is None or not found:
        return UNSET
    best = next((each for each in found if each.used), found[0])
    slowest = reports.slowest or best
    settings = msgspec.structs.asdict(reports.policy)
    del settings["enabled"]
    return o.SmartReport(
        mode=best.form or "full",
        compressor=best.compressor,
        nodes=scorers(found),
        original_tokens=sum(each.original_tokens for each in found),
        compressed_tokens=sum(
            each.compressed_tokens if each.used else each.original_tokens for each in found
        ),
        score_ms=_ms(slowest.score_s),
        scored=best.scored,
        parked=next((each.parked for each in found if each.parked is not None), UNSET),
        skipped=next((each.skipped for each in found if not each.used), ""),
        settings=settings,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
