"""What a question's words say about each unit: BM25 of its n-grams, and of the words that these lead to.

    "Who guards the vault that Marta owns?"    Marta ─► "Marta owns the vault Kestrel." ─► Kestrel (one hop)
                                                        "The guard of Kestrel is Tom."  ◄──┘
Needs no model. It finds what is named, where attention finds what is meant.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from fleetd.compression.words import words

# n-grams of the question, and what each is worth beside a single word: that words stand together in the same
# order is hardly ever chance.
_ORDERS = {1: 1.0, 2: 1.0, 4: 2.0}
# BM25's usual constants; length counts little, as units are of a size.
_K1, _B = 1.2, 0.3
# A word that leads on stands in few units, one of which the question names.
_HOP_UNITS, _HOP_DF, _HOP_WEIGHT = 3, 4, 0.4
_QUESTION_WORDS = 400
_STOP_WORDS = """
    a an and are as at be been but by can could did do does for from had has have he her his how i
    if in into is it its me my no not of on or our she should so that the their them then there
    these they this to us was we were what when where which who whom whose why will with would you
    your please tell answer question give find name list following text document passage according
    based context der die das und ist ein eine wer wie le la les des est que de en el los
"""
_STOP = frozenset(_STOP_WORDS.split())


def relevance(question: str, units: Sequence[str]) -> list[float]:
    """BM25 score of each unit's text for the question's words; 0 if it has none of them."""
    # A text has far fewer words than places for them.
    stems: dict[str, str] = {}
    asked = _terms(words(question)[-_QUESTION_WORDS:], stems)
    found = [_terms(words(unit), stems) for unit in units]
    frequency: Counter[tuple[str, ...]] = Counter()
    for terms in found:
        frequency.update(terms.keys())
    scores = _bm25(dict.fromkeys(asked, 1.0), found, frequency)
    hop = _leads(asked, scores, found, frequency)
    if hop:
        further = _bm25(hop, found, frequency)
        scores = [score + _HOP_WEIGHT * more for score, more in zip(scores, further, strict=True)]
    return scores


def _terms(found: Sequence[str], stems: dict[str, str]) -> Counter[tuple[str, ...]]:
    """n-grams that have a word with a meaning in them. ``stems`` remembers those of words."""
    for word in found:
        if word not in stems:
            stems[word] = _stem(word)
    of = [stems[word] for word in found]
    # Places of words with a meaning up to each place: where the number grows, there is one.
    means = [0, *itertools.accumulate(word not in _STOP for word in found)]
    terms: Counter[tuple[str, ...]] = Counter()
    for order in _ORDERS:
        grams = zip(*(of[i:] for i in range(order)), strict=False)
        terms.update(gram for i, gram in enumerate(grams) if means[i + order] > means[i])
    return terms


def _bm25(
    asked: dict[tuple[str, ...], float],
    found: Sequence[Counter[tuple[str, ...]]],
    frequency: Counter[tuple[str, ...]],
) -> list[float]:
    """BM25 (Robertson and Zaragoza, 2009) with IDF over the units, weighted by the order of each n-gram."""
    n = len(found)
    mean = max(1.0, sum(terms.total() for terms in found) / max(1, n))
    worth = {
        term: weight * _ORDERS[len(term)] * math.log(1 + (n - df + 0.5) / (df + 0.5))
        for term, weight in asked.items()
        if (df := frequency[term])
    }
    scores = []
    for terms in found:
        norm = _K1 * (1 - _B + _B * terms.total() / mean)
        scores.append(
            sum(w * tf * (_K1 + 1) / (tf + norm) for term, w in worth.items() if (tf := terms[term]))
        )
    return scores


def _leads(
    asked: Counter[tuple[str, ...]],
    scores: Sequence[float],
    found: Sequence[Counter[tuple[str, ...]]],
    frequency: Counter[tuple[str, ...]],
) -> dict[tuple[str, ...], float]:
    """Rare words of the best units that the question lacks, each weighted by its unit's score."""
    best = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-scores[i], i))
    leads: dict[tuple[str, ...], float] = {}
    for i in best[:_HOP_UNITS]:
        for term in found[i]:
            if len(term) == 1 and term not in asked and 2 <= frequency[term] <= _HOP_DF:
                leads[term] = max(leads.get(term, 0.0), scores[i] / scores[best[0]])
    return leads


def _stem(word: str) -> str:
    """The word without its English ending, roughly: question and answer often differ in it."""
    for ending in ("ies", "ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word.rstrip("e") if len(word) > 4 else word
