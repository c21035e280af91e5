"""``python -m eval.requests NAME``: how many requests of a set of ``data/gate`` the gate declines.

By language, by voice, by where they stand, and by author: the first letter of an id stands for one.

A voice is one kind of evidence by itself: *signs*, what people write for either kind of task, and *places*,
where the request's words stand in the text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from eval.statistics import Share
from fleetd.compression.document import Document
from fleetd.compression.gate import PRIOR, evidence, judge

FOLDER = Path(__file__).parent / "data" / "gate"
# What the rows are called for the gate by where the request stands.
GATE, BEHIND, IN_FRONT = "the gate", "request behind the text", "request in front of the text"
LANGUAGES = ("en", "de", "fr", "es", "zh")
Kind = Literal["whole", "part"]
# Authors are known by the first letter of an id; these letters are another author's too.
_SAME_AUTHOR = {"h": "t", "p": "w", "n": "y"}


class AskedRequest(msgspec.Struct, frozen=True):
    id: str
    language: str
    document: str
    request: str
    kind: Kind

    @property
    def text(self) -> str:
        return _text(self.document)


class Declined(msgspec.Struct, frozen=True):
    """Of requests of each kind, how many were declined, as (hits, of)."""

    by: str
    whole: tuple[int, int]
    part: tuple[int, int]


def requests(name: str) -> list[AskedRequest]:
    """Those of "tune", "more", "held_out" or "other_texts"."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=list[AskedRequest])


def author(one: AskedRequest) -> str:
    letter = one.id[0]
    return _SAME_AUTHOR.get(letter, letter)


def alone(one: AskedRequest) -> bool:
    """Declined as a message of its own behind the text."""
    return _declined([one.text, one.request])


def behind(one: AskedRequest) -> bool:
    return _declined([f"{one.text}\n\n{one.request}"])


def in_front(one: AskedRequest) -> bool:
    return _declined([f"{one.request}\n\n{one.text}"])


def by_signs(one: AskedRequest) -> bool:
    """Declined by signs alone, and where there are none."""
    return evidence(one.request, one.text).by_signs <= 0


def by_places(one: AskedRequest) -> bool:
    return PRIOR + evidence(one.request, one.text).by_places <= 0


VOICES: Mapping[str, Callable[[AskedRequest], bool]] = {
    "signs alone": by_signs,
    "places alone": by_places,
    BEHIND: behind,
    IN_FRONT: in_front,
}


def measured(found: Sequence[AskedRequest]) -> list[Declined]:
    """The gate, then its languages, then its voices."""
    rows = [_row(GATE, found, alone)]
    rows += [_row(each, [one for one in found if one.language == each], alone) for each in LANGUAGES]
    return rows + [_row(name, found, declines) for name, declines in VOICES.items()]


def _row(by: str, found: Sequence[AskedRequest], declines: Callable[[AskedRequest], bool]) -> Declined:
    whole, part = ([declines(one) for one in found if one.kind == kind] for kind in ("whole", "part"))
    return Declined(by, (sum(whole), len(whole)), (sum(part), len(part)))


def table(rows: Sequence[Declined]) -> list[str]:
    head = ["| by | tasks for the whole text declined | questions declined |", "|---|---|---|"]
    return head + [f"| {row.by} | {Share(*row.whole)} | {Share(*row.part)} |" for row in rows]


def as_turns(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def _declined(texts: Sequence[str]) -> bool:
    return bool(judge(Document.of_messages(as_turns(texts))).declined)


@cache
def _text(name: str) -> str:
    return (FOLDER / "documents" / name).read_text(encoding="utf-8")


def _authors(found: Sequence[AskedRequest]) -> list[Declined]:
    letters = sorted({one.id[0] for one in found})
    return [_row(f"author {each}", [one for one in found if one.id[0] == each], alone) for each in letters]


if __name__ == "__main__":
    chosen = requests(sys.argv[1])
    print("\n".join(table([*measured(chosen), *_authors(chosen)])))
