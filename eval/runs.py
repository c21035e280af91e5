"""Runs tasks in all forms; what is counted, and the tables that come of it."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eval import forms
from eval.engine import Engine
from eval.statistics import Ratio, Share
from eval.tasks import Task, task
from fleetd.compression import elide
from fleetd.compression.document import Document
from fleetd.compression.gate import judge
from fleetd.compression.selection import Selection
from fleetd.compression.token_scores import TokenScores
from fleetd.engine.protocol import Keep

Log = Callable[[str], None]

# Multiples of it modulo 1 are spread evenly, however many there are (Weyl's sequence).
GOLDEN = 0.618034
# Tasks of which one is also answered from what people do without a selection: no bar is about that.
BASELINES_EVERY = 3


class Outcome(msgspec.Struct, frozen=True):
    """One task. ``answers``: how many there are; ``dense``: how many of them the whole prompt gave.

    ``forms``: of the dense ones, by form; ``gave``: of all, by form. ``kept``: facts that selection kept, of
    ``facts``. ``kept_ratio``: what it kept of the tokens, ``text_tokens`` what the text form has with its
    markers. ``intact``: of messages, whether what could be parsed still can; None of a text.
    """

    kind: str
    tokens: int
    ratio: float
    depth: float
    seed: int
    answers: int
    dense: int
    forms: dict[str, int] = {}
    kept: int = 0
    facts: int = 0
    kept_ratio: float = 0.0
    prompt_tokens: int = 0
    text_tokens: int = 0
    declined: str = ""
    gave: dict[str, int] = {}
    intact: bool | None = None


@dataclass(slots=True)
class RequestRunner:
    """Each engine does a task at a time. ``sparse``: False where they cannot; ``scored``: False: by the
    question's words alone."""

    engines: Sequence[Engine]
    log: Log
    sparse: bool = True
    scored: bool = True

    async def cell(
        self,
        kind: str,
        tokens: int,
        ratios: Sequence[float],
        seeds: Sequence[int],
        each: Callable[[list[Outcome]], None],
    ) -> None:
        """Every seed at every ratio; each seed at another depth. ``each`` gets all so far after every one."""
        done: dict[int, list[Outcome]] = {}
        left = iter(enumerate(seeds))

        async def work(engine: Engine) -> None:
            for i, seed in left:
                depth = (0.5 + i * GOLDEN) % 1
                one = task(kind, seed, tokens, depth, engine.count)
                done[i] = await self.run(engine, one, ratios, baselines=i % BASELINES_EVERY == 0)
                each([outcome for i in sorted(done) for outcome in done[i]])

        await asyncio.gather(*(work(engine) for engine in self.engines))
        found = [outcome for i in sorted(done) for outcome in done[i]]
        for ratio in ratios:
            mine = [outcome for outcome in found if outcome.ratio == ratio]
            shares = "  ".join(f"{form} {recall(mine, form)}" for form in form_names(mine))
            self.log(f"{kind} {tokens} tokens, ratio {ratio or 'adaptive'}: dense {dense(mine)}  {shares}")

    async def run(
        self, engine: Engine, one: Task, ratios: Sequence[float], *, baselines: bool
    ) -> list[Outcome]:
        """``baselines`` at the first ratio."""
        said = await engine.answer(one.text or one.messages, one.max_tokens)
        right = self._right(one, said.text)
        document = one.document
        scores = (await engine.scores(document))[0] if self.scored else None
        return [
            await self._at(
                engine,
                one,
                document,
                scores,
                ratio,
                right,
                said.tokens,
                baselines=baselines and ratio == ratios[0],
            )
            for ratio in ratios
        ]

    async def _at(
        self,
        engine: Engine,
        one: Task,
        document: Document,
        scores: TokenScores | None,
        ratio: float,
        right: set[str],
        prompt_tokens: int,
        *,
        baselines: bool,
    ) -> Outcome:
        selection = forms.selected(document, scores, ratio)
        found = Outcome(
            one.kind,
            one.tokens,
            ratio,
            one.depth,
            one.seed,
            answers=len(one.answers),
            dense=len(right),
            kept=len(one.facts) - len(lost(document, selection, one.facts)),
            facts=len(one.facts),
            kept_ratio=selection.ratio,
            prompt_tokens=prompt_tokens,
            declined=selection.declined,
            intact=None if one.text else intact(one.messages, _shortened(one, document, selection)),
        )
        if not right and len(one.answers) == 1:
            return found
        chosen: dict[str, Selection] = {"text": selection}
        if baselines:
            chosen["words"] = forms.selected(document, None, ratio)
            chosen["random"] = forms.at_random(document, ratio, one.seed)
            chosen["truncated"] = forms.truncated(document, ratio)
        gave: dict[str, set[str]] = {}
        text_tokens = 0
        for name, each in chosen.items():
            said = await engine.answer(_shortened(one, document, each), one.max_tokens)
            gave[name] = self._right(one, said.text)
            text_tokens = text_tokens or said.tokens
        if self.sparse:
            placed = forms.selected(document, scores, ratio, mode="sparse")
            gave["sparse"] = await self._sparse(engine, one, document, placed, right)
        return msgspec.structs.replace(
            found,
            forms={form: len(right & answers) for form, answers in gave.items()},
            gave={form: len(answers) for form, answers in gave.items()},
            text_tokens=text_tokens,
        )

    async def _sparse(
        self, engine: Engine, one: Task, document: Document, selection: Selection, right: set[str]
    ) -> set[str]:
        if selection.declined:
            return right
        keep = Keep(
            {i: list(kept) for i, kept in enumerate(selection.kept) if not selection.whole(document, i)}
        )
        said = await engine.answer(one.text or one.messages, one.max_tokens, keep)
        return self._right(one, said.text)

    @staticmethod
    def _right(one: Task, said: str) -> set[str]:
        return {answer for answer in one.answers if one.says(said, answer)}


def _shortened(one: Task, document: Document, selection: Selection) -> Any:
    return (
        elide.texts(document, selection)[0] if one.text else elide.messages(document, selection, one.messages)
    )


def intact(original: Sequence[Mapping[str, Any]], shortened: Sequence[Mapping[str, Any]]) -> bool:
    """True if only the contents of messages differ, and contents that were JSON still are."""
    return len(original) == len(shortened) and all(
        {**before, "content": None} == {**after, "content": None}
        and (not _parses(before["content"]) or _parses(after["content"]))
        and before["content"].count("```") % 2 == after["content"].count("```") % 2
        for before, after in zip(original, shortened, strict=True)
    )


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def lost(document: Document, selection: Selection, facts: Sequence[str]) -> list[str]:
    """Facts of which not every character is kept."""
    kept = "".join(
        block.text[start:end] + "\0"
        for block, ranges in zip(document.blocks, selection.kept, strict=True)
        for start, end in ranges
    )
    return [fact for fact in facts if fact not in kept]


# ---- Selection alone -----------------------------------------------------------------------------------


async def selection_recall(
    engine: Engine, tasks: Sequence[Task], ratio: float, *, segments: int = 1, exit_layer: int = 0
) -> Share:
    """Facts that selection keeps; no answer is generated."""
    found = Share(0, 0)
    for one in tasks:
        document = one.document
        scores, _ = await engine.scores(document, segments, exit_layer)
        gone = lost(document, forms.selected(document, scores, ratio), one.facts)
        found += Share(len(one.facts) - len(gone), len(one.facts))
    return found


def gate(count: Callable[[str], int], kinds: Sequence[str], seeds: Sequence[int]) -> dict[str, Share]:
    """How often tasks of each kind are declined for what they ask."""
    found: dict[str, Share] = defaultdict(lambda: Share(0, 0))
    for kind in kinds:
        for seed in seeds:
            one = task(kind, seed, 600, 0.5, count)
            found[kind] += Share(int(bool(judge(one.document).declined)), 1)
    return dict(found)


# ---- Counting ------------------------------------------------------------------------------------------


def form_names(outcomes: Sequence[Outcome]) -> list[str]:
    return [form for form in forms.FORMS if any(form in outcome.forms for outcome in outcomes)]


def dense(outcomes: Sequence[Outcome]) -> Share:
    """Answers that the whole prompt gave."""
    return Share(sum(o.dense for o in outcomes), sum(o.answers for o in outcomes))


def recall(outcomes: Sequence[Outcome], form: str) -> Share:
    """The share of the whole prompt's answers that a form gave too."""
    mine = [o for o in outcomes if form in o.forms]
    return Share(sum(o.forms[form] for o in mine), sum(o.dense for o in mine))


def compared(outcomes: Sequence[Outcome], form: str) -> Ratio:
    """All answers that a form gave, over all that the whole prompt gave.

    For tasks of which the whole prompt gives only some answers: which ones is chance, and a form that gives
    as many others has lost nothing.
    """
    mine = [o for o in outcomes if form in o.gave]
    return Ratio.of_pairs([(o.gave[form], o.dense) for o in mine])


def unbroken(outcomes: Sequence[Outcome]) -> Share:
    """Conversations that are still what they were but for what is missing."""
    known = [o.intact for o in outcomes if o.intact is not None]
    return Share(sum(known), len(known))


def kept(outcomes: Sequence[Outcome]) -> Share:
    """Facts that selection kept."""
    return Share(sum(o.kept for o in outcomes), sum(o.facts for o in outcomes))
