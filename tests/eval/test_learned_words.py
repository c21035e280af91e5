"""What requests' words say is judged by requests that it was not learned from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from eval import learned_words
from eval.learned_words import Chosen, Learning, LooseRequest, Rows, features, ridge
from eval.requests import requests

LOOSE = [
    LooseRequest("y1", "en", "Who signed it?", "part"),
    LooseRequest("y2", "en", "Sum it up.", "whole"),
]
DOCUMENTS = ("en-story.txt", "en-incident.txt")


@cache
def learning() -> Learning:
    every = {"tune": 6, "more": 10, "held_out": 4}
    asked = [
        (name, one)
        for name, step in every.items()
        for one in [one for one in requests(name) if one.document in DOCUMENTS][::step]
    ]
    return Learning.of_requests(asked, LOOSE)


def turned(chosen: Chosen) -> Learning:
    """The chosen requests are said to be of the other kind."""
    return replace(learning(), part=learning().part ^ chosen)


def known(chosen: Chosen) -> Chosen:
    """Without the requests about texts that are not kept."""
    return chosen[: len(learning().found)]


@pytest.mark.parametrize("without_text", [True, False], ids=["author and text", "author"])
def test_nothing_is_judged_by_what_it_was_learned_from(*, without_text: bool) -> None:
    said = learning().learned(without_text=without_text)

    theirs = learning().authors == "a"
    other = turned(theirs).learned(without_text=without_text)
    assert theirs.any()
    assert np.array_equal(said[known(theirs)], other[known(theirs)])
    assert not np.array_equal(said[known(~theirs)], other[known(~theirs)])

    about = learning().documents == DOCUMENTS[0]
    other = turned(about).learned(without_text=without_text)
    assert about.any()
    assert np.array_equal(said[known(about)], other[known(about)]) == without_text


def test_what_is_held_out_teaches_nothing() -> None:
    unseen = np.isin(learning().sets, learned_words.UNSEEN)
    assert unseen.any()
    said = learning().learned(without_text=True)
    assert np.array_equal(said, turned(unseen).learned(without_text=True))


def test_words_that_questions_have_speak_for_a_part() -> None:
    rows = Rows.of_requests(["who signed it", "who left", "sum it up", "sum this up"])
    weights, added = ridge(rows, np.array([1.0, 1.0, -1.0, -1.0]))
    who, short = Rows.of_requests(["who paid", "sum up"]).times(weights) + added
    assert who > 0 > short


def test_features_know_no_figures_and_no_capitals() -> None:
    assert features("Page 17?") == features("page  35?")
    assert features("Page 17?") != features("page 5?")


def test_what_is_learned_is_weighed_beside_signs_and_places() -> None:
    part = known(learning().part)
    odds = learning().together(np.where(part, 1.0, -1.0))
    assert odds[part].min() > odds[~part].max()
