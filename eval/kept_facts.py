"""Facts that selection keeps of long texts, by the scorer alone: no answer is generated.

Many questions share a text: keys of the text do not depend on a question that stands behind it, so they are
computed once for all questions. Scores are those of the worker, which computes the same passes.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer

from eval import forms
from eval.long_texts import LongText, long_text
from eval.runs import lost
from eval.statistics import Share
from eval.tasks import Count
from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.token_scores import POOL, SegmentScores, TokenScores, merge, pooled
from fleetd.engine.protocol import Profile, Score

if TYPE_CHECKING:  # needs MLX, which is set up first
    from fleetd.engine.load.loading import Loaded

RATIOS = (0.3, 0.1, 0.05, 0.02)
FORMS = ("scores", "BM25", "the end", "random")
# At which the others are measured, and how many random choices take turns.
RIVALS_RATIO, _DRAWS = 0.1, 8
# Of texts that nobody asks about. Facts of other kinds are rows of records like all the others.
UNASKED_KINDS = ("one needle", "one key of forty", "four values of a key", "variables passed on")
UNASKED_RATIOS = (0.5, 0.3, 0.1)
UNASKED_FORMS = ("surprise", "rare words", "the end", "random")
THIRDS = ("front", "middle", "back")
_CHUNK_TOKENS = 512


class KeptFacts(msgspec.Struct):
    """Counts of one kind at one length and ratio.

    ``kept``: facts kept, of facts, by form, and by third of the text for the scores. ``declined``: questions
    for which nothing was selected, by form: the whole text would be read, and they are not in ``kept``.
    ``seconds``: of scoring a text for all its questions; ``kept_ratio``: sum of the shares of tokens kept.
    """

    kind: str
    tokens: int
    ratio: float
    passes: int
    questions: int = 0
    kept: dict[str, tuple[int, int]] = {}
    declined: dict[str, int] = {}
    seconds: float = 0.0
    kept_ratio: float = 0.0

    def add(self, form: str, share: Share) -> None:
        hits, of = self.kept.get(form, (0, 0))
        self.kept[form] = hits + share.hits, of + share.of

    def share(self, form: str) -> Share:
        return Share(*self.kept.get(form, (0, 0)))


class TextScorer:
    """Scores of one text for many questions. ``passes``: in how many it is computed at least, as in Score."""

    def __init__(self, loaded: Loaded, profile: Profile) -> None:
        self._loaded = loaded
        self._profile = profile

    def scores(self, documents: Sequence[Document], passes: int) -> list[TokenScores]:
        """Of documents that differ in the question behind the same text."""
        from fleetd.engine.scoring.scoring_layout import lay_out

        search = self._loaded.search
        context = self._loaded.facts.shape.context_tokens
        laid = [
            lay_out(
                Score("eval", document.text, list(document.questions), passes=passes),
                search.tokenizer,
                context,
            )
            for document in documents
        ]
        if len({len(layout.passes) for layout in laid}) != 1:
            raise ValueError("the questions differ too much in length to share passes")
        found: list[list[SegmentScores]] = [[] for _ in laid]
        for index in range(len(laid[0].passes)):
            self._pass(index, laid, found)
        return [merge(each) for each in found]

    def unasked(self, document: Document, passes: int) -> TokenScores:
        """Of a text by itself, by the surprise of the model, as a worker scores it."""
        from fleetd.engine.scoring.scoring_layout import lay_out
        from fleetd.engine.scoring.surprise_pass import SurprisePass, surprise_scores

        search = self._loaded.search
        score = Score("eval", document.text, passes=passes, without_question=True)
        layout = lay_out(score, search.tokenizer, self._loaded.facts.shape.context_tokens)
        found = []
        for each in layout.passes:
            one = SurprisePass(search.model, each)
            while not one.finished:
                one.step(_CHUNK_TOKENS)
            own = slice(each.first, each.first + each.count)
            found.append(surprise_scores(layout.starts[own], layout.ends[own], one.surprise))
        return merge(found)

    def _pass(self, index: int, laid: Sequence[Any], found: list[list[SegmentScores]]) -> None:
        from mlx_lm.models.cache import trim_prompt_cache

        from fleetd.engine.scoring import score_guests
        from fleetd.engine.scoring.attention_pass import AttentionPass
        from fleetd.engine.sequence_state.kinds import kind_of

        tap, heads = self._loaded.search.tap, self._profile.heads
        kept = {layer: score_guests._key_heads(tap, layer, heads) for layer, _ in heads}
        first = laid[0].passes[index]
        end = first.own + first.count
        shared = AttentionPass(tap, first, kept)
        while shared.done < end:
            shared.step(min(_CHUNK_TOKENS, end - shared.done))
        caches = shared._caches
        for layout, scores in zip(laid, found, strict=True):
            work = layout.passes[index]
            if work.tokens[:end] != first.tokens[:end]:
                raise ValueError("the passes of two questions begin differently")
            one = AttentionPass(tap, work, kept, done=end)
            one._stage, one._caches = shared._stage, list(caches)
            one._keys = {layer: list(rows) for layer, rows in shared._keys.items()}
            one._queries = {}
            one.step(len(work.tokens))
            # Back to the shared text. The last layer's keys are only seen, and its cache holds a count alone.
            trim_prompt_cache(caches[:-1], len(work.tokens) - end)
            kind_of(caches[-1]).set_held(caches[-1], end)
            scores.append(score_guests._scores(tap, layout, one, heads))


def measured(
    scorer: TextScorer, text: LongText, passes: int, into: dict[tuple[str, float], KeptFacts]
) -> None:
    """Add what is kept of a text, for each of its questions, at each kind and ratio of ``into``."""
    began_s = time.monotonic()
    documents = [Document.of_text(f"{text.text}\n\n{asked.question}") for asked in text.asked]
    scored = scorer.scores(documents, passes)
    seconds = time.monotonic() - began_s
    for kept in into.values():
        kept.seconds += seconds
    # What neither a question nor a score chooses is the same for all questions.
    plain = {"the end": [forms.truncated(documents[0], RIVALS_RATIO)]}
    plain["random"] = [forms.at_random(documents[0], RIVALS_RATIO, draw) for draw in range(_DRAWS)]
    for index, (asked, document, scores) in enumerate(zip(text.asked, documents, scored, strict=True)):
        for ratio in RATIOS:
            kept = into[asked.kind, ratio]
            kept.questions += 1
            chosen = {"scores": forms.selected(document, scores, ratio)}
            if ratio == RIVALS_RATIO:
                chosen["BM25"] = forms.selected(document, None, ratio)
                chosen |= {form: draws[index % len(draws)] for form, draws in plain.items()}
            kept.kept_ratio += chosen["scores"].ratio
            for form, selection in chosen.items():
                if selection.declined:
                    kept.declined[form] = kept.declined.get(form, 0) + 1
                    continue
                gone = lost(document, selection, asked.facts)
                kept.add(form, Share(len(asked.facts) - len(gone), len(asked.facts)))
                if form == "scores":
                    for fact in asked.facts:
                        third = THIRDS[min(2, 3 * text.text.find(fact) // max(1, len(text.text)))]
                        kept.add(third, Share(int(fact not in gone), 1))


def measured_unasked(scorer: TextScorer, text: LongText, passes: int, into: dict[float, KeptFacts]) -> None:
    """Add what is kept of a text that nobody asks about, all of whose facts may be asked for later."""
    began_s = time.monotonic()
    document = Document.of_text(text.text, asks=False)
    surprise = scorer.unasked(document, passes)
    seconds = time.monotonic() - began_s
    facts = sorted({fact for asked in text.asked for fact in asked.facts})
    for index, (ratio, kept) in enumerate(into.items()):
        kept.questions += 1
        kept.seconds += seconds
        chosen = {
            "surprise": forms.unasked(document, surprise, ratio),
            "rare words": forms.unasked(document, rare_words(document.text, surprise), ratio),
            "the end": forms.truncated(document, ratio),
            "random": forms.at_random(document, ratio, index),
        }
        kept.kept_ratio += chosen["surprise"].ratio
        for form, selection in chosen.items():
            gone = lost(document, selection, facts)
            kept.add(form, Share(len(facts) - len(gone), len(facts)))


def rare_words(text: str, like: TokenScores) -> TokenScores:
    """Scores of the tokens of ``like`` by how rare their words are in the text: no model reads it."""
    import numpy as np

    words = list(re.finditer(r"\w+", text))
    counts = Counter(word.group().lower() for word in words)
    total = sum(counts.values())
    by_char = np.zeros(len(text) + 1, np.float32)
    for word in words:
        by_char[word.start() : word.end()] = math.log(total / counts[word.group().lower()])
    # A token may begin with the blank before its word.
    last = np.maximum(like.starts, like.ends - 1)
    return TokenScores(like.starts, like.ends, pooled(by_char[last], POOL))


def of_unasked(folder: Path, kind: str, tokens: int, seeds: Sequence[int]) -> list[KeptFacts]:
    """What a scorer keeps of a text per seed without a question, at each ratio."""
    scorer, count = _scorer(folder)
    passes = max(1, tokens // limits.SMART_PASS_TOKENS)
    found = {ratio: KeptFacts(kind, tokens, ratio, passes) for ratio in UNASKED_RATIOS}
    for seed in seeds:
        measured_unasked(scorer, long_text((kind,), tokens, seed, count), passes, found)
    return list(found.values())


def of_group(
    folder: Path, kinds: Sequence[str], tokens: int, seeds: Sequence[int], part: float = 1.0
) -> list[KeptFacts]:
    """What a scorer keeps of a text per seed that ``kinds`` share, by kind and ratio.

    ``part``: which share of the questions is asked. Loads the model into this process once."""
    scorer, count = _scorer(folder)
    passes = max(1, tokens // limits.SMART_PASS_TOKENS)
    found = {(kind, ratio): KeptFacts(kind, tokens, ratio, passes) for kind in kinds for ratio in RATIOS}
    for seed in seeds:
        text = long_text(kinds, tokens, seed, count)
        measured(scorer, some(text, part), passes, found)
    return list(found.values())


def some(text: LongText, part: float) -> LongText:
    """The text with ``part`` of the questions of each kind, spread evenly; at least one of each."""
    numbers: Counter[str] = Counter()
    asked = []
    for each in text.asked:
        at = numbers[each.kind]
        numbers[each.kind] += 1
        if at == 0 or int((at + 1) * part) > int(at * part):
            asked.append(each)
    return replace(text, asked=tuple(asked))


@cache
def _scorer(folder: Path) -> tuple[TextScorer, Count]:
    from eval.profile import loaded

    model = loaded(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scorer = TextScorer(model, model.search.profile())
    return scorer, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
