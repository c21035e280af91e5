"""The gate by requests that it was not made with, and the figures of its voices."""

from __future__ import annotations

import pytest

from eval import requests, tried_voices
from eval.requests import LANGUAGES, AskedRequest
from eval.statistics import Share


@pytest.mark.parametrize(
    ("where", "whole", "part"),
    [
        pytest.param(requests.alone, 0.915, 0.055, id="alone"),
        pytest.param(requests.behind, 0.935, 0.11, id="behind", marks=pytest.mark.long),
        pytest.param(requests.in_front, 0.935, 0.1, id="in front", marks=pytest.mark.long),
    ],
)
def test_the_gate_keeps_its_measured_level(where: object, whole: float, part: float) -> None:
    assert callable(where)
    found = requests.requests("held_out")
    declined = {kind: [where(one) for one in found if one.kind == kind] for kind in ("whole", "part")}
    assert [len(each) for each in declined.values()] == [200, 200]
    assert sum(declined["whole"]) >= whole * 200
    assert sum(declined["part"]) <= part * 200


@pytest.mark.parametrize(
    ("where", "whole", "part"),
    [
        pytest.param(requests.alone, 0.99, 0.03, id="alone"),
        pytest.param(requests.behind, 0.99, 0.12, id="behind", marks=pytest.mark.long),
        pytest.param(requests.in_front, 0.99, 0.11, id="in front", marks=pytest.mark.long),
    ],
)
def test_the_gate_still_knows_what_was_once_held_out(where: object, whole: float, part: float) -> None:
    assert callable(where)
    found = [one for one in requests.requests("tune") if one.id.startswith("h")]
    declined = {kind: [where(one) for one in found if one.kind == kind] for kind in ("whole", "part")}
    assert [len(each) for each in declined.values()] == [200, 200]
    assert sum(declined["whole"]) >= whole * 200
    assert sum(declined["part"]) <= part * 200


def test_requests_are_about_documents_that_are_there() -> None:
    for name, count in (("tune", 1244), ("more", 3100), ("held_out", 400), ("other_texts", 300)):
        found = requests.requests(name)
        assert len({one.id for one in found}) == count
        assert {one.language for one in found} == set(LANGUAGES)
        assert all(one.text for one in found)


def test_rows_count_each_kind() -> None:
    found = requests.requests("tune")[:20]
    gate, *rows = requests.measured(found)
    assert sum(gate.whole[1:] + gate.part[1:]) == 20
    assert sum(row.whole[1] + row.part[1] for row in rows[: len(LANGUAGES)]) == 20
    assert str(Share(*gate.part)) in requests.table([gate])[-1]


class Likes:
    """A model that sees what is asked for."""

    async def next_token(self, text: str) -> dict[str, float]:
        request = text.rpartition("Request:")[2]
        return {" part": -0.1, " whole": -2.0} if "who" in request else {" whole": -0.1, " and": -3.0}


async def test_a_verdict_is_the_odds_of_its_labels() -> None:
    made = [
        AskedRequest(str(n), "en", "en-story.txt", request, kind)
        for n, (request, kind) in enumerate([("who?", "part"), ("all", "whole"), ("who all", "whole")])
    ]
    told = await tried_voices.verdict(Likes(), made)  # type: ignore[arg-type]
    assert (told.of, told.area) == (3, pytest.approx(0.5))
