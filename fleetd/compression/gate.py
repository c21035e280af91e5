"""When not to shorten a prompt: its task needs all of the text, or nothing shows that a part is enough.

    question ──► signs: what people write for either          ─┐
    its other words, text ──► places: do they point at few?   ─┴─► log-odds that a part is enough ──► judge
    scores ──► do they have peaks? ─────────────────────────────────────────────────────────► least_share

A task that is taken for a question costs a wrong answer, a question that is taken for a task only time: in
doubt the prompt stays whole. The question decides before anything is loaded or scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fleetd.compression.document import Document
from fleetd.compression.gate_places import Pointing, pointing
from fleetd.compression.gate_signs import ONE, WHOLE, SignCounts, count_signs

# Log-odds that a part is enough: of a sign for the whole text; of one that the text itself has; of signs for
# a part; of a word that stands in one place only; of a text in another script, in which no word can stand.
# And how many of each count. By a logistic regression over requests of which every sign was left out at
# times, as people write what no list has (decisions 21 and 35).
_WHOLE, _WHOLE_SIGNS = -5.0, 3
_OWN, _OWN_SIGNS = -1.1, 2
_PART = 2.0
_WORD, _WORDS = 2.2, 3.6
_FOREIGN = 4.1
PRIOR = -1.45
# From here on a task plainly needs all of the text.
_PLAINLY = -3.7

# Attention is spread when its entropy is this close to that of a uniform one …
_SPREAD = 0.95
# … and then at least this much is kept, where the question's words point nowhere either.
_SPREAD_RATIO = 0.5
_SPREAD_UNITS = 8


class Evidence(msgspec.Struct, frozen=True):
    """What a request's words say: its ``signs``, and where the other words stand in the text."""

    signs: SignCounts
    points: Pointing

    @property
    def kind(self) -> str:
        """What the task is about, if it has signs of a task for the whole text."""
        kind = max(WHOLE, key=self.signs.counts.__getitem__)
        return WHOLE[kind] if self.signs.counts[kind] or self.signs.own else ""

    @property
    def by_signs(self) -> float:
        """Log-odds that a part of the text is enough."""
        whole = sum(self.signs.counts[kind] for kind in WHOLE)
        return (
            _WHOLE * min(whole, _WHOLE_SIGNS)
            + _OWN * min(self.signs.own, _OWN_SIGNS)
            + _PART * (self.signs.counts[ONE] > 0)
        )

    @property
    def by_places(self) -> float:
        return _WORD * min(self.points.words, _WORDS) + _FOREIGN * self.points.foreign

    @property
    def log_odds(self) -> float:
        return PRIOR + self.by_signs + self.by_places


class GateVerdict(msgspec.Struct, frozen=True):
    """``declined``: the reason why nothing may be dropped, or "". ``plainly``: there is no doubt about it."""

    declined: str = ""
    plainly: bool = False


def evidence(task: str, text: str) -> Evidence:
    signs = count_signs(task, text)
    return Evidence(signs, pointing(signs.rest, text))


def judge(document: Document) -> GateVerdict:
    """Whether the task of a prompt permits dropping text: by the task's words and the text."""
    material = document.material
    tasks = [evidence(task, material) for task in document.tasks]
    if not tasks:
        return GateVerdict("nothing in the prompt asks for anything", plainly=True)
    found = min(tasks, key=lambda each: each.log_odds)
    if found.log_odds > 0:
        return GateVerdict()
    if found.kind:
        return GateVerdict(f"the task is about the whole text ({found.kind})", found.log_odds < _PLAINLY)
    return GateVerdict("nothing shows that a part of the text is enough: its words point to no place in it")


def least_share(attention: Sequence[float], relevance: Sequence[float]) -> float:
    """The least share to keep of a text by its scores: 0 unless these are spread evenly.

    Args:
        attention: how much each droppable unit matters.
        relevance: how much each of them matters by the question's words alone.
    """
    even = len(attention) >= _SPREAD_UNITS and spread(attention) > _SPREAD
    return _SPREAD_RATIO if even and max(relevance, default=0.0) <= 0 else 0.0


def spread(values: Sequence[float]) -> float:
    """Entropy of the values as shares of their sum, over that of equal shares: 1 where all are equal."""
    total = math.fsum(values)
    if total <= 0 or len(values) < 2:
        return 1.0
    shares = [value / total for value in values if value > 0]
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(values))
