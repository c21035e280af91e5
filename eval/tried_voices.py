"""Two more kinds of evidence for the gate, which cost a model: what they tell of the requests of "held_out".

*verdict*: a few-shot prompt asks the small model which kind a request is; log-odds of its two labels.
*peaks*: how much of all attention the twentieth of tokens with the most of it has; a question has peaks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from eval.engine import Engine
from eval.requests import AskedRequest, as_turns
from eval.statistics import area
from fleetd.compression.document import Document
from fleetd.compression.gate import evidence

_SHOTS = """A text is given. Does the request need one place of it, or the whole of it?

Request: When did Anna sell the mill?
Needs: part

Request: Summarise it in five lines.
Needs: whole

Request: ¿Qué puerto usa el servidor de correo?
Needs: part

Request: Übersetze das ins Englische.
Needs: whole

Request: 谁签了第二份合同
Needs: part

Request: Liste tous les lieux qui sont cités.
Needs: whole

Request: What did the nurse say about the key?
Needs: part

Request: How often does the word mill occur?
Needs: whole

Request: {}
Needs:"""
_LABELS = (" part", " whole")
_TOP_SHARE = 20
# What a deviation of such a value may be worth beside the gate's own log-odds.
_WORTHS = np.linspace(0, 4, 41)


class Told(msgspec.Struct, frozen=True):
    """``area``: how often a question gets a higher value than a task for the whole text (0.5 tells nothing);
    ``questions``: of these, how many are lost where 95 % of the tasks are declined. ``gate``: the area of the
    gate's own log-odds; ``both``: of these and the value together, weighted as is best for these requests,
    so that it is the most that the value may add."""

    area: float
    questions: float
    of: int
    gate: float = 0.0
    both: float = 0.0


async def verdict(engine: Engine, found: Sequence[AskedRequest]) -> Told:
    values = []
    for one in found:
        top = await engine.next_token(_SHOTS.format(one.request))
        least = min(top.values())
        part, whole = (top.get(label, least) for label in _LABELS)
        values.append(part - whole)
    return _told(found, values)


async def peaks(engine: Engine, found: Sequence[AskedRequest]) -> Told:
    values = []
    for one in found:
        scores, _ = await engine.scores(Document.of_messages(as_turns([one.text, one.request])))
        shares = np.sort(scores.values)[::-1] / scores.values.sum()
        values.append(float(shares[: max(1, len(shares) // _TOP_SHARE)].sum()))
    return _told(found, values)


def _told(found: Sequence[AskedRequest], values: Sequence[float]) -> Told:
    part = np.array([one.kind == "part" for one in found])
    value = np.array(values)
    gate = np.array([evidence(one.request, one.text).log_odds for one in found])
    deviation = (value - value.mean()) / (value.std() or 1.0)
    lost = float(np.mean(value[part] <= np.quantile(value[~part], 0.95)))
    added = [gate + worth * deviation for worth in _WORTHS]
    both = max(area(each[part], each[~part]) for each in added)
    return Told(area(value[part], value[~part]), lost, len(found), area(gate[part], gate[~part]), both)
