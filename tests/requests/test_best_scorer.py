"""Which of the models that could score a prompt does: the cheapest of those that find enough."""

from __future__ import annotations

from typing import Any

import pytest

from fleetd.control.model_facts import ModelShape
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.requests.members.members import Member
from fleetd.requests.smart_prefill.scorers import ModelHolder, choose

MIB = 1 << 20


def member(name: str, *, here: bool = False) -> Member:
    return Member(Card(name, 1, 1, name=name), name, here=here)


def holder(
    name: str, recall: float, price_s: float, *, on: str = "this", role: str = "compressor", size: int = 100
) -> ModelHolder:
    model = ModelCard(
        name, digest=name[0] * 64, roles=[role], shape=ModelShape(weights_bytes=size * MIB), state="loaded"
    )
    return ModelHolder(member(on, here=on == "this"), model, recall=recall, price_s=price_s)


def chosen(*found: ModelHolder, named: str = "", target: int = 8000) -> list[tuple[str, str]]:
    return [(each.model.name, each.member.name) for each in choose(named, found, target * MIB)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # About as good: the cheaper one.
        ([holder("a", 1.0, 3.0, size=600), holder("b", 0.92, 1.0)], "b"),
        # Clearly better: it may cost more.
        ([holder("a", 1.0, 3.0, size=600), holder("b", 0.6, 1.0)], "a"),
        # A larger model on a faster machine is the cheaper one.
        ([holder("a", 1.0, 0.5, size=600, on="studio"), holder("b", 1.0, 1.0)], "a"),
        # What is not known is not taken for good.
        ([holder("a", 0.0, 0.1), holder("b", 0.8, 1.0)], "b"),
        # Nothing is known of any.
        ([holder("a", 0.0, 0.5), holder("b", 0.0, 1.0)], "a"),
    ],
)
def test_the_cheapest_of_those_that_find_about_as_much_as_the_best_scores(
    found: list[ModelHolder], expected: str
) -> None:
    assert {name for name, _ in chosen(*found)} == {expected}
    assert {name for name, _ in chosen(*reversed(found))} == {expected}


def test_all_machines_with_the_chosen_files_share_the_work() -> None:
    slow, fast = holder("a", 1.0, 5.0), holder("a", 0.0, 1.0, on="studio")
    assert chosen(slow, fast, holder("b", 0.7, 0.1)) == [("a", "this"), ("a", "studio")]


def test_a_model_that_is_named_scores_whatever_it_finds() -> None:
    assert chosen(holder("a", 1.0, 0.1), holder("b", 0.5, 9.0), named="b") == [("b", "this")]


def test_a_chat_model_scores_only_without_a_compressor_and_for_a_clearly_larger_one() -> None:
    chats: list[Any] = [
        holder("a", 1.0, 1.0, role="chat", size=600),
        holder("b", 1.0, 2.0, role="chat", size=100),
    ]
    assert chosen(*chats, target=8000) == [("a", "this")]
    assert chosen(*chats, target=1000) == [("b", "this")]
    assert chosen(*chats, target=300) == []
    assert chosen(*chats, holder("c", 0.6, 9.0)) == [("c", "this")]
