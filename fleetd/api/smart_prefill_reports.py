"""What a client is told of smart prefill: headers, a comment in a stream, an object in the body. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from fleetd.api.openai import objects as o
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.smart_prefill_result import SmartPrefillResult

# Printable ASCII besides letters: a header holds one line of that.
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"
_HEADER_CHARS = 500


def headers(told: Sequence[SmartPrefillResult]) -> Mapping[str, str]:
    """Of all prompts of one request; none where nobody asked for it."""
    if not told:
        return {}
    used = [each for each in told if each.used]
    skipped = next((each.skipped for each in told if not each.used), "")
    found = {}
    if used:
        found = {
            "X-SmartPrefill-Compressor": line(used[0].compressor),
            "X-SmartPrefill-Original-Tokens": str(sum(each.original_tokens for each in used)),
            "X-SmartPrefill-Compressed-Tokens": str(sum(each.compressed_tokens for each in used)),
            "X-SmartPrefill-Mode": used[0].form,
        }
    if skipped:
        found["X-SmartPrefill-Skipped"] = line(skipped)
    return found


def sentence(told: SmartPrefillResult) -> str:
    """For a comment in a stream, once the headers are out."""
    if not told.used:
        return f"skipped: {told.skipped}"
    return (
        f"{told.form}; compressor={quote(told.compressor, safe='/')}; "
        f"tokens={told.compressed_tokens}/{told.original_tokens}"
    )


class SmartPrefillReports:
    """What came of the prompts of one request, by choice; ``report`` is the object of its body."""

    def __init__(self, policy: SmartPrefillPolicy | None, per_prompt: int) -> None:
        self._policy = policy
        self._per_prompt = per_prompt
        self._told: dict[int, SmartPrefillResult] = {}

    def add(self, index: int, told: SmartPrefillResult | None) -> None:
        if told is not None:
            self._told[index] = told

    def of(self, index: int) -> SmartPrefillResult:
        return self._told.get(index) or SmartPrefillResult()

    @property
    def slowest(self) -> SmartPrefillResult | None:
        """Of prompts that are scored side by side; None where nobody asked."""
        return max(self._told.values(), key=lambda told: told.score_s, default=None)

    def report(self) -> o.SmartReport | msgspec.UnsetType:
        """Each prompt once, however many choices answer it; nothing where nobody asked."""
        told = [told for index, told in sorted(self._told.items()) if index % self._per_prompt == 0]
        if self._policy is None or not told:
            return msgspec.UNSET
        best = next((each for each in told if each.used), told[0])
        return o.SmartReport(
            mode=best.form or "full",
            compressor=best.compressor,
            nodes=list(best.nodes),
            original_tokens=sum(each.original_tokens for each in told),
            compressed_tokens=sum(
                each.compressed_tokens if each.used else each.original_tokens for each in told
            ),
            score_ms=round(max(each.score_s for each in self._told.values()) * 1000, 3),
            skipped=next((each.skipped for each in told if not each.used), ""),
            settings=settings(self._policy),
        )


def settings(policy: SmartPrefillPolicy) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(policy).items() if name != "enabled"}


def line(text: str) -> str:
    """Any text as one that a header can hold."""
    return quote(" ".join(text.split()), safe=_PLAIN)[:_HEADER_CHARS]
