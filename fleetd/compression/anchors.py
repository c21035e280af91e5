"""What a question's words say about each unit: BM25 of its n-grams, and of the words that these lead to.

    "Who guards the vault that Marta owns?"    Marta ─► "Marta owns the vault Kestrel." ─► Kestrel (one hop)
                                                        "The guard of Kestrel is Tom."  ◄──┘
Needs no model. It finds what is named, where attention finds what is meant.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fleetd.compression.words import sentences, words

# n-grams of the question, and what each is worth beside a single word: that words stand together in the same
# order is hardly ever chance.
_ORDERS = {1: 1.0, 2: 1.0, 4: 2.0}
# BM25's usual constants; length counts little, as units are of a size.
_K1, _B = 1.2, 0.3
# What leads on stands in few units, one of which the question names; or in one that was led to, and so on.
_HOPS, _HOP_UNITS, _HOP_DF, _HOP_WEIGHT = 3, 8, 4, 0.4
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
    worth = _worth(dict.fromkeys(asked, 1.0), frequency, len(units))
    scores = reached = _bm25(worth, found)
    known, weight = set(asked), _HOP_WEIGHT
    for _ in range(_HOPS):
        leads = _leads(known, worth, reached, units, found, stems, frequency)
        if not leads:
            break
        known |= leads.keys()
        worth = _worth(leads, frequency, len(units))
        reached = _bm25(worth, found)
        scores = [score + weight * more for score, more in zip(scores, reached, strict=True)]
        weight *= _HOP_WEIGHT
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


def _worth(
    asked: Mapping[tuple[str, ...], float], frequency: Counter[tuple[str, ...]], n: int
) -> dict[tuple[str, ...], float]:
    """The IDF over n units of each term that is in one, weighted by its order."""
    return {
        term: weight * _ORDERS[len(term)] * math.log(1 + (n - df + 0.5) / (df + 0.5))
        for term, weight in asked.items()
        if (df := frequency[term])
    }


def _bm25(worth: Mapping[tuple[str, ...], float], found: Sequence[Counter[tuple[str, ...]]]) -> list[float]:
    """BM25 (Robertson and Zaragoza, 2009) of each unit."""
    mean = max(1.0, sum(terms.total() for terms in found) / max(1, len(found)))
    scores = []
    for terms in found:
        norm = _K1 * (1 - _B + _B * terms.total() / mean)
        scores.append(
            sum(w * tf * (_K1 + 1) / (tf + norm) for term, w in worth.items() if (tf := terms[term]))
        )
    return scores


def _leads(
    known: Collection[tuple[str, ...]],
    worth: Mapping[tuple[str, ...], float],
    scores: Sequence[float],
    units: Sequence[str],
    found: Sequence[Counter[tuple[str, ...]]],
    stems: dict[str, str],
    frequency: Counter[tuple[str, ...]],
) -> dict[tuple[str, ...], float]:
    """Rare words, and rare pairs of them, that are not ``known``, of the sentences that made units the best;
    each is weighted by its unit's score. A full name may be rare if neither of its words is.

    Units that have a term which is rare itself come first: many sentences of a long text have all of a
    question's usual words, and one has the number or the name that it asks about.
    """
    rare = {term for term in worth if frequency[term] <= _HOP_DF}
    best = sorted(
        (i for i, score in enumerate(scores) if score > 0),
        key=lambda i: (rare.isdisjoint(found[i]), -scores[i], i),
    )
    leads: dict[tuple[str, ...], float] = {}
    for i in best[:_HOP_UNITS]:
        spans = sentences(units[i], 0, len(units[i]))
        said = [_terms(words(units[i][start:end]), stems) for start, end in spans]
        values = [sum(worth.get(term, 0.0) for term in terms) for terms in said]
        for terms in (terms for terms, value in zip(said, values, strict=True) if value == max(values)):
            for term in terms:
                if term not in known and 2 <= frequency[term] <= _HOP_DF and _names(term):
                    share = min(1.0, scores[i] / scores[best[0]])
                    leads[term] = max(leads.get(term, 0.0), share)
    return leads


def _names(term: tuple[str, ...]) -> bool:
    return len(term) <= 2 and not any(word in _STOP for word in term)


def _stem(word: str) -> str:
    """The word without its English ending, roughly: question and answer often differ in it."""
    for ending in ("ies", "ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word.rstrip("e") if len(word) > 4 else word
