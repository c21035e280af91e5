"""A run from task to outcome, with an engine that answers what it is shown."""

from __future__ import annotations

from typing import Any

import pytest

from eval.engine import Said
from eval.runs import Outcome, RequestRunner, compared, intact, recall
from eval.statistics import Ratio
from fleetd.compression.words import estimate_tokens
from fleetd.engine.protocol import Keep


class EchoReader:
    """Says all that it is shown; of sparse prompts it is shown the kept characters."""

    def count(self, text: str) -> int:
        return estimate_tokens(text)

    async def answer(
        self, asked: str | list[dict[str, Any]], max_tokens: int, keep: Keep | None = None
    ) -> Said:
        texts = [asked] if isinstance(asked, str) else [str(message["content"]) for message in asked]
        if keep is not None:
            parts = {i: keep.parts.get(i, [(0, len(text))]) for i, text in enumerate(texts)}
            texts = [" ".join(text[a:b] for a, b in parts[i]) for i, text in enumerate(texts)]
        said = "\n".join(texts)
        return Said(said, estimate_tokens(said), 0.0)


@pytest.mark.parametrize("kind", ["single", "needles4", "hop", "json", "code", "dialogue", "table"])
async def test_what_is_kept_is_what_is_answered(kind: str) -> None:
    seen: list[list[Outcome]] = []
    logged: list[str] = []
    runner = RequestRunner([EchoReader(), EchoReader()], logged.append, scored=False)  # type: ignore[list-item]
    await runner.cell(kind, 800, (0.3, 0.0), range(3), seen.append)
    found = seen[-1]
    assert len(found) == 6
    assert len({outcome.depth for outcome in found}) == 3
    assert all(outcome.dense == outcome.answers for outcome in found)
    first = [outcome for outcome in found if outcome.ratio == 0.3]
    assert set(first[0].forms) == {"text", "words", "random", "truncated", "sparse"}
    assert set(first[1].forms) == {"text", "sparse"}
    assert [outcome.seed for outcome in first] == [0, 1, 2]
    assert recall(first, "text").value >= 0.9
    assert recall(first, "text").value > recall(first, "truncated").value
    assert all(outcome.text_tokens < outcome.prompt_tokens / 2 for outcome in first)
    assert len(logged) == 2


def test_of_several_answers_others_in_their_place_are_no_loss() -> None:
    lost = Outcome("needles4", 800, 0.3, 0.5, 1, answers=4, dense=2, forms={"text": 1}, gave={"text": 2})
    found = Outcome("needles4", 800, 0.3, 0.5, 2, answers=4, dense=0, forms={"text": 0}, gave={"text": 1})
    assert recall([lost], "text").value == 0.5
    assert compared([lost], "text").value == 1
    assert compared([lost, found], "text").value == 1.5
    assert compared([lost], "sparse").of == 0


def test_a_ratio_s_interval_is_of_its_cases() -> None:
    ratio = Ratio.of_pairs([(2, 4), (4, 4), (3, 4), (4, 4)])
    assert ratio.value == 13 / 16
    assert 0.5 <= ratio.interval[0] < ratio.value < ratio.interval[1] <= 1
    assert ratio == Ratio.of_pairs([(2, 4), (4, 4), (3, 4), (4, 4)])
    assert str(Ratio.of_pairs([])) == "none"


def test_a_conversation_is_intact_if_only_contents_are_shorter() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    told = {"role": "tool", "tool_call_id": "1", "content": '{"rows": [1, 2]}'}
    code = {"role": "user", "content": "```\na\nb\n```\nSo?"}
    whole = [call, told, code]
    assert intact(whole, whole)
    assert intact(
        whole, [call, {**told, "content": '{"rows": ["less"]}'}, {**code, "content": "```\na\n```\nSo?"}]
    )
    assert not intact(whole, [call, {**told, "content": '{"rows": [1,'}, code])
    assert not intact(whole, [call, told, {**code, "content": "```\na\nSo?"}])
    assert not intact(whole, [{**call, "tool_calls": []}, told, code])
    assert not intact(whole, whole[1:])
