"""Reports about smart prefill in every dialect: headers, and a comment in a stream. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.smart_prefill_result import SmartPrefillResult

# Printable ASCII besides letters: a header holds one line of that.
_PLAIN = " !\"#$%&'()*+,-./:;<=>?@[]^_`{|}~"
# A percent sign that a reader would take for the beginning of an escaped byte.
_LIKE_ESCAPE = re.compile("%(?=[0-9A-Fa-f]{2})")
_HEADER_CHARS = 500


def headers(results: Sequence[SmartPrefillResult]) -> Mapping[str, str]:
    """Headers about all prompts of one request; none if smart prefill was not asked for."""
    if not results:
        return {}
    used = [each for each in results if each.used]
    skipped = next((each.skipped for each in results if not each.used), "")
    found = {}
    if used:
        found = {
            "X-SmartPrefill-Compressor": line(used[0].compressor),
            "X-SmartPrefill-Original-Tokens": str(sum(each.original_tokens for each in used)),
            "X-SmartPrefill-Compressed-Tokens": str(sum(each.compressed_tokens for each in used)),
            "X-SmartPrefill-Mode": used[0].form,
        }
        if used[0].scored == "without question":
            found["X-SmartPrefill-Scored"] = used[0].scored
    if nodes := scorers(results):
        found["X-SmartPrefill-Nodes"] = ",".join(quote(node, safe=" ") for node in nodes)
    if parked := _parked(results):
        found["X-SmartPrefill-Parked"] = parked
    if skipped:
        found["X-SmartPrefill-Skipped"] = line(skipped)
    return found


def scorers(results: Sequence[SmartPrefillResult]) -> list[str]:
    """All machines that scored a prompt of these."""
    return list(dict.fromkeys(node for each in results for node in each.nodes))


def sentence(result: SmartPrefillResult) -> str:
    """The comment in a stream whose headers are already out."""
    parked = f"; parked: {loads}" if (loads := _parked([result])) else ""
    if not result.used:
        return f"skipped: {result.skipped}{parked}"
    nodes = f"nodes={','.join(quote(node, safe=' ') for node in result.nodes)}; " if result.nodes else ""
    return (
        f"{result.form}; compressor={quote(result.compressor, safe='/')}; {nodes}"
        f"tokens={result.compressed_tokens}/{result.original_tokens}{parked}"
    )


def _parked(results: Sequence[SmartPrefillResult]) -> str:
    """What loads took while the model that answers gave way, in seconds; "" if it did not."""
    loads = next((each.parked for each in results if each.parked is not None), None)
    return "" if loads is None else f"scorer={loads.scorer_s:.2f}; model={loads.model_s:.2f}"


class SmartPrefillReports:
    """The smart prefill results of one request, by choice.

    Args:
        policy: None for a request without smart prefill.
        per_prompt: choices that answer each prompt.
    """

    def __init__(self, policy: SmartPrefillPolicy | None, per_prompt: int) -> None:
        self.policy = policy
        self._choices_per_prompt = per_prompt
        self._results: dict[int, SmartPrefillResult] = {}

    def add(self, index: int, result: SmartPrefillResult | None) -> None:
        if result is not None:
            self._results[index] = result

    def of(self, index: int) -> SmartPrefillResult:
        """The result of one choice's prompt; an empty one if there is none."""
        return self._results.get(index) or SmartPrefillResult()

    @property
    def slowest(self) -> SmartPrefillResult | None:
        """The result that took longest; prompts are scored side by side. None if there is none."""
        return max(self._results.values(), key=lambda result: result.score_s, default=None)

    @property
    def per_prompt(self) -> list[SmartPrefillResult]:
        """One result per prompt, in the order of the prompts."""
        return [
            result for index, result in sorted(self._results.items()) if index % self._choices_per_prompt == 0
        ]


def line(text: str) -> str:
    """Any text as one line that a header can hold: what is not ASCII is percent-encoded, and only that."""
    plain = _LIKE_ESCAPE.sub("%25", " ".join(text.split()))
    return quote(plain, safe=_PLAIN)[:_HEADER_CHARS]
