"""``python -m eval.learned_words``: what the gate would gain by a voice that is learned from requests' words.

    request ──► runs of characters, words, pairs ──► hash ──► ridge regression ──► learned ─┐
    the gate's signs and places ────────────────────────────────────────────────────────────┴─► log-odds

Nothing is judged by what it was learned from. What an author writes is judged by weights without that author.
Users' texts are not those of this folder, so the first table is by weights without the request's text too:
with it, the words of the text are learned as well, and the figures are too good. "held_out" and "other_texts"
are never learned from. It is no part of the gate (decision 51), and takes a minute or two.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eval.requests import FOLDER, LANGUAGES, AskedRequest, Kind, author, requests
from eval.statistics import Share, area
from fleetd.compression.gate import Evidence, evidence
from fleetd.compression.gate_signs import ONE, WHOLE

F64 = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]

BUCKETS = 1 << 17
_RUN_CHARS = range(1, 6)
_ENDING_CHARS = 8
_WORD = re.compile(r"\w+")
_DIGIT = re.compile(r"[0-9]")
# How strongly weights are held near 0 and the scale of the constant; when the search for them ends.
_RIDGE, _CONSTANT = 0.5, 2.0
_ROUNDS, _EXACT = 80, 1e-6
# How many signs, and how much of words that stand in one place only, count at most, as for the gate.
_WHOLE_SIGNS, _OWN_SIGNS, _WORDS = 3, 2, 3.6

LEARNED_FROM, UNSEEN = ("tune", "more"), ("held_out", "other_texts")
# Who wrote the requests about texts that are not kept.
_ELSEWHERE = "y"


class LooseRequest(msgspec.Struct, frozen=True):
    """A request about a text that is not kept: only its words are learned from."""

    id: str
    language: str
    request: str
    kind: Kind


def features(request: str) -> list[int]:
    """The hashes of a request's runs of characters, words and pairs of words, and how it begins and ends."""
    said = _DIGIT.sub("0", " ".join(request.lower().split()))
    words, padded = _WORD.findall(said), f" {said} "
    found = {f"{n}:{padded[i : i + n]}" for n in _RUN_CHARS for i in range(len(padded) - n + 1)}
    found |= {f"word:{word}" for word in words}
    found |= {f"pair:{one} {other}" for one, other in pairwise(words)}
    found |= {f"begins:{said[:2]}", f"ends:{said[-1:]}", f"ends:{said[-2:]}"}
    if words:
        found |= {f"first:{words[0][:_ENDING_CHARS]}", f"first:{' '.join(words[:2])}"}
        found.add(f"last:{words[-1][-_ENDING_CHARS:]}")
    return sorted({zlib.crc32(each.encode()) % BUCKETS for each in found})


@dataclass(frozen=True, slots=True)
class Rows:
    """A sparse matrix, a row for each request: columns ``at``, ``values``, row after row, and ``lengths``."""

    at: npt.NDArray[np.int64]
    values: F64
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of_requests(cls, asked: Sequence[str]) -> Rows:
        found = [features(each) for each in asked]
        lengths = np.array([len(each) for each in found])
        return cls(np.concatenate([np.array(e) for e in found]), np.repeat(lengths**-0.5, lengths), lengths)

    def only(self, chosen: Chosen) -> Rows:
        kept = np.repeat(chosen, self.lengths)
        return Rows(self.at[kept], self.values[kept], self.lengths[chosen])

    def times(self, weights: F64) -> F64:
        begins = np.cumsum(self.lengths) - self.lengths
        return np.asarray(np.add.reduceat(weights[self.at] * self.values, begins))

    def summed(self, per_row: F64) -> F64:
        weighed = np.repeat(per_row, self.lengths) * self.values
        return np.bincount(self.at, weighed, BUCKETS).astype(np.float64, copy=False)


def ridge(rows: Rows, wanted: F64) -> tuple[F64, float]:
    """The weights of the columns, and what is added, by conjugate gradients over the rows' own equations."""
    per_row, left = np.zeros(len(wanted)), wanted.copy()
    towards, size = left.copy(), float(left @ left)
    enough = size * _EXACT**2
    for _ in range(_ROUNDS):
        image = rows.times(rows.summed(towards)) + _CONSTANT * towards.sum() + _RIDGE * towards
        step = size / float(towards @ image)
        per_row += step * towards
        left -= step * image
        before, size = size, float(left @ left)
        if size < enough:
            break
        towards = left + size / before * towards
    return rows.summed(per_row), float(_CONSTANT * per_row.sum())


def logistic(values: F64, part: Chosen) -> F64:
    """Weights of the columns, and the constant last, by Newton's method."""
    columns = np.c_[values, np.ones(len(values))]
    weights = np.zeros(columns.shape[1])
    for _ in range(40):
        sure = 1 / (1 + np.exp(-columns @ weights))
        slope = columns.T @ (sure - part) + 0.01 * weights
        bend = (columns.T * (sure * (1 - sure))) @ columns + 0.01 * np.eye(len(weights))
        weights -= np.linalg.solve(bend, slope)
    return weights


@dataclass(frozen=True, slots=True)
class Learning:
    """All requests: those about texts that are kept, with the gate's evidence ``found``, and then others."""

    found: list[Evidence]
    rows: Rows
    part: Chosen
    sets: npt.NDArray[Any]
    authors: npt.NDArray[Any]
    documents: npt.NDArray[Any]
    languages: npt.NDArray[Any]

    @classmethod
    def of_data(cls) -> Learning:
        asked = [(name, one) for name in (*LEARNED_FROM, *UNSEEN) for one in requests(name)]
        loose = msgspec.json.decode((FOLDER / "elsewhere.json").read_bytes(), type=list[LooseRequest])
        return cls.of_requests(asked, loose)

    @classmethod
    def of_requests(
        cls, asked: Sequence[tuple[str, AskedRequest]], loose: Sequence[LooseRequest]
    ) -> Learning:
        both: list[AskedRequest | LooseRequest] = [*(one for _, one in asked), *loose]
        return cls(
            [evidence(one.request, one.text) for _, one in asked],
            Rows.of_requests([one.request for one in both]),
            np.array([one.kind == "part" for one in both]),
            np.array([*(name for name, _ in asked), *("elsewhere" for _ in loose)]),
            np.array([*(author(one) for _, one in asked), *(_ELSEWHERE for _ in loose)]),
            np.array([*(one.document for _, one in asked), *("" for _ in loose)]),
            np.array([one.language for one in both]),
        )

    def learned(self, *, without_text: bool) -> F64:
        """Above 0 where a request's words are those of a question: by weights without its author."""
        said, wanted = np.zeros(len(self.found)), np.where(self.part, 1.0, -1.0)
        asked = self.documents != ""
        for who in sorted(set(self.authors[asked])):
            theirs = (self.authors == who) & asked
            others = (self.authors != who) & ~np.isin(self.sets, UNSEEN)
            for text in sorted(set(self.documents[theirs])) if without_text else ["nowhere"]:
                about = self.documents == text
                weights, bias = ridge(self.rows.only(others & ~about), wanted[others & ~about])
                chosen = theirs & about if without_text else theirs
                said[chosen[: len(said)]] = self.rows.only(chosen).times(weights) + bias
        return said

    def together(self, learned: F64) -> F64:
        """Log-odds by signs, places and ``learned``, weighed by "more" without the request's author."""
        values = np.c_[np.array([_values(each) for each in self.found]), learned]
        count = len(values)
        odds, authors, part = np.zeros(count), self.authors[:count], self.part[:count]
        for who in sorted(set(authors)):
            others = (self.sets[:count] == "more") & (authors != who)
            weights = logistic(values[others], part[others])
            odds[authors == who] = values[authors == who] @ weights[:-1] + weights[-1]
        return odds


def _values(found: Evidence) -> list[float]:
    signs, points = found.signs, found.points
    return [
        min(sum(signs.counts[kind] for kind in WHOLE), _WHOLE_SIGNS),
        min(signs.own, _OWN_SIGNS),
        signs.counts[ONE] > 0,
        min(points.words, _WORDS),
        points.foreign,
    ]


def compared(learning: Learning, learned: F64) -> Iterator[str]:
    """A row for each set and language: areas, the share of questions that the gate declines, and which shares
    of the tasks are declined with it."""
    gate, both = np.array([one.log_odds for one in learning.found]), learning.together(learned)
    count = len(gate)
    part, sets = learning.part[:count], learning.sets[:count]
    languages = learning.languages[:count]
    groups = {"more": sets == "more"}
    groups |= {f"more, {each}": (sets == "more") & (languages == each) for each in LANGUAGES}
    groups["the plain author of more"] = learning.authors[:count] == "f"
    groups |= {name: sets == name for name in UNSEEN}
    for name, chosen in groups.items():
        tasks, asked = chosen & ~part, chosen & part
        areas = [area(each[asked], each[tasks]) for each in (gate, learned, both)]
        declined = float(np.mean(gate[asked] <= 0))
        at = float(np.quantile(both[asked], declined))
        shares = [Share(int(each.sum()), int(tasks.sum())) for each in (gate[tasks] <= 0, both[tasks] <= at)]
        figures = [*(f"{each:.3f}" for each in areas), f"{100 * declined:.1f} %", *map(str, shares)]
        yield f"| {name} | {' | '.join(figures)} |"


def main() -> None:
    learning = Learning.of_data()
    for without_text in (True, False):
        print(f"\nLearned without the request's author{' and without its text' * without_text}:\n")
        print("| requests | gate's area | words' | both | questions | tasks, gate | tasks, both |")
        print("|---|---|---|---|---|---|---|")
        for row in compared(learning, learning.learned(without_text=without_text)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
