"""When not to shorten a prompt: the task needs all of it, or nothing shows which part it needs.

Read from the question only; what is asked about may say "count" as often as it likes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Attention is spread when its entropy is this close to that of a uniform one …
_SPREAD = 0.95
# … and then at least this much is kept, where the question's words point nowhere either.
_SPREAD_RATIO = 0.5
_SPREAD_UNITS = 8

_WHOLE = (
    "(?:text|document|passage|article|report|story|conversation|transcript|chat|log|file|code|function|class|list"
    "|table|data|paper|chapter|book|e-?mails?|thread|notes|above|following|this|it|everything|all|each|every)"
)
_CODE = "(?:code|function|class|method|file|script|module|program|snippet|component)"
_LISTED = "(?:table|list|log|rows|numbers|values|entries|items|orders|sales|amounts|prices|records|lines)"
_EXTREME = (
    "(?:highest|lowest|largest|smallest|biggest|longest|shortest|oldest|youngest|most|fewest|best|worst|earliest"
    "|latest|cheapest)"
)


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


# Where a word is something to be done: "document it", and not "the document".
_DO = r"(?:^\W*|[.!?:;\n]\s?|\b(?:please|kindly|and|then|to|you|must|should|now|just|also)\s+)"
_SUMMARISE = _any(
    r"\bsummar(?:y|i[sz]e|i[sz]ing|ies)\b",
    r"\btl;?dr\b|\b(?:overview|outline|gist|recap|condense)\b|\babstract of\b",
    r"\b(?:key|main) (?:points?|takeaways?|findings?|ideas?|topics?|themes?|arguments?)\b",
    r"\bin (?:one|two|three|a few|\d+) (?:sentences?|words|bullet points)\b",
    r"\bwhat (?:is|was) (?:this|the) (?:whole |entire )?(?:text|document|passage|article|story|conversation"
    r"|log|report|chapter|book|paper) (?:mainly )?about\b",
    r"\bzusammenfass\w*|\bfass\w* .{0,60}\bzusammen\b|\br[\u00e9e]sum\w+|\bresum[ei]\w*",
    r"\b(?:describe|explain|tell me) what (?:happens|happened)\b|\bwhat (?:happens|happened) in (?:this|the) "
    rf"{_WHOLE}\b",
    r"\briassum\w+|\bsamenvatt\w*",
    r"\u603b\u7ed3|\u6982\u62ec|\u6458\u8981|\u8981\u7d04",
)
_COUNT = _any(
    r"\b(?:count(?: up)?|tally|add up|sum up|number of times|how often|how frequently|frequency of)\b",
    r"\bhow many\b.{0,60}\b(?:times?|different|distinct|unique|in total|altogether|overall"
    r"|(?:are|were) (?:there|listed|mentioned|in)|contain|appear|occur|of (?:the|these|them|all)|entries"
    r"|lines|rows|records|errors|names|words|sentences)\b",
    rf"\bhow many\b.{{0,60}}\bin (?:the|this) {_WHOLE}\b",
    r"\bhow many\b.{0,60}\b(?:have|had|has|with|without) (?:no|an?|more|less|fewer|at (?:least|most))\b",
    r"\b(?:total|sum|average|mean|median|maximum|minimum)\b"
    rf".{{0,40}}\b(?:all|each|every|entire|whole|across|over(?:all)?|listed|the {_LISTED})\b",
    r"\b(?:total|grand total|sum|average|mean|median) (?:number|amount|of|price|cost|value|score|quantity)\b",
    r"\b(?:most|least) (?:common|frequent|often|popular|frequently)\b",
    r"\bwie (?:viele|oft)\b|\bcombien de\b|\bcu[a\u00e1]nt[oa]s\b|\bquant[ie]\b|\bz\u00e4hle?\b",
)
_COMPARE = _any(
    r"\bcompare\b",
    r"\b(?:differences?|similarities|contradictions?|inconsistenc\w+) (?:between|among|in|across)\b",
    r"\b(?:list|name|find|extract|identify|enumerate|show|give|write down|collect) (?:me )?"
    r"(?:all|every|each)\b",
    r"\b(?:every|all of the|each of the|all the) (?:\w+ ){0,3}"
    r"(?:mentioned|listed|named|in the|in this|that|who)\b",
    r"\b(?:rank|sort|order|classify|categori[sz]e|group) (?:all|the|these|them|every|each)\b",
    rf"\bwhich (?:\w+ ){{1,4}}(?:the )?{_EXTREME}\b",
    rf"\b(?:who|what) (?:has|have|had|is|was) the (?:\w+ )?{_EXTREME}\b",
    r"\bin (?:chronological )?order\b(?! to\b)|\bchronological\w*\b|\btimeline\b",
    r"\bfrom (?:first|beginning|start) to (?:last|end)\b",
    rf"{_DO}list (?:the|all|every|what|which|who|any)\b",
    r"\b(?:which|what) (?:\w+ ){0,2}\w+s (?:are|were|have been) "
    r"(?:mentioned|listed|named|described|discussed)\b",
    r"\b(?:what|who|which) (?:are|were) (?:all|the \w+ of (?:all|every|each))\b",
    r"\bvergleiche\b|\bcomparez?\b|\bcompara\b",
)
_VERBATIM = _any(
    r"\bverbatim\b|\b(?:word|letter)[- ]for[- ](?:word|letter)\b|\bline by line\b",
    r"\bexact (?:text|words?|wording|code|copy|contents?|quote|lines?|implementation|definition|source)\b",
    r"\b(?:exactly|precisely) as (?:it|they|written|in|given|shown)\b|\bwithout (?:any )?changes\b",
    r"\bquote\b.{0,60}\bexactly\b|\bexactly\b.{0,20}\bquote\b",
    rf"{_DO}(?:quote|translate|proof-?read|paraphrase|rephrase|reword|transcribe|refactor)\b",
    # What is to be done to code needs all of it; "the code of the vault" is none.
    rf"{_DO}(?:fix|optimi[sz]e|simplify|improve|add|write|implement|generate|create|rename|replace|remove"
    r"|explain|describe|test|change|modify|update|find the bugs?)"
    rf"\b.{{0,60}}?\b(?:this|the|my|that|these|above|following) (?:\w+ ){{0,2}}?{_CODE}s?\b"
    r"(?! (?:of|to|for|does|is)\b)",
    rf"\bwhat(?:'s| is| does)\b.{{0,20}}\b(?:wrong with|this) (?:\w+ )?{_CODE}\b",
    r"\b(?:show|print|display|output) (?:me )?(?:the |this )?"
    r"(?:function|class|method|paragraph|section|clause)\b",
    r"\bsays? exactly\b|\bexactly says?\b|\bsay\b.{0,20}\bexactly\b|\bshorten\b",
    r"\b(?:turn|make) (?:this|it|the (?:text|above|following|code|list|table)) "
    r"(?:into|shorter|longer|simpler|clearer|better|more|less)\b",
    r"\b\u00fcbersetz\w*|\btradui\w+|\btraduc\w+",
    r"\b(?:fix|correct) (?:the |all |any )?(?:grammar|spelling|typos?|mistakes|errors|bugs?)\b",
    rf"{_DO}(?:rewrite|reformat|format|convert|port|repeat|recite|copy|reproduce|print|echo|edit|improve"
    r"|polish|clean up|review|debug|minify|document|annotate|complete|continue|extend|lint)"
    rf"\b.{{0,40}}?\b{_WHOLE}\b",
    r"\b(?:show|give|write|print|output|return|copy|reproduce|repeat) (?:me )?(?:out )?(?:the )?"
    r"(?:full|whole|entire|complete|original) \w+",
    r"\bw\u00f6rtlich\b|\bmot \u00e0 mot\b|\btextualmente\b|\u7ffb\u8bd1|\u7ffb\u8b6f|\u9010\u5b57",
)
_INTENTS = {"verbatim": _VERBATIM, "summarise": _SUMMARISE, "count": _COUNT, "compare": _COMPARE}
_REASONS = {
    "verbatim": "the task needs the text as it is (quote, rewrite, translate)",
    "summarise": "the task is about the whole text (summarise)",
    "count": "the task is about the whole text (count, total)",
    "compare": "the task is about the whole text (compare, list all)",
}


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """``declined``: the reason why nothing may be dropped, or "". ``at_least``: the smallest share to
    keep.
    """

    declined: str = ""
    at_least: float = 0.0


def judge(task: str, attention: Sequence[float] | None, relevance: Sequence[float]) -> GateVerdict:
    """Whether the task permits dropping text, and how much.

    Args:
        task: the part of the question that states the task.
        attention: how much each droppable unit matters; None if the text was not scored.
        relevance: how much each of them matters by the question's words alone.
    """
    found = intent(task)
    if found:
        return GateVerdict(_REASONS[found])
    if attention is None:
        if relevance and max(relevance) <= 0:
            return GateVerdict("no word of the question stands in the text, and nothing was scored")
        return GateVerdict()
    if len(attention) >= _SPREAD_UNITS and spread(attention) > _SPREAD and max(relevance, default=0.0) <= 0:
        return GateVerdict(at_least=_SPREAD_RATIO)
    return GateVerdict()


def intent(task: str) -> str:
    """ "verbatim", "summarise", "count" or "compare"; "" for a question about a part of the text."""
    # Runs of spaces as one: patterns take time that grows with the square of theirs.
    said = "\n".join(" ".join(line.split()) for line in task.splitlines() if line.strip())
    return next((name for name, pattern in _INTENTS.items() if pattern.search(said)), "")


def spread(values: Sequence[float]) -> float:
    """Entropy of the values as shares of their sum, over that of equal shares: 1 where all are equal."""
    total = math.fsum(values)
    if total <= 0 or len(values) < 2:
        return 1.0
    shares = [value / total for value in values if value > 0]
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(values))
