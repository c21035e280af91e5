"""A head that is fitted to a model drafts as it was trained to, and a run that is cut off goes on."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_architectures
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from eval import head_answers, head_prompts, head_training
from eval.head_answers import Answers, Piece
from eval.head_prompts import KINDS
from eval.head_training import Recipe
from fleetd.engine.heads.head_files import read_head
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.sequence_state import rollback

VOCAB = tiny_architectures.VOCAB
RECIPE = Recipe(draft_tokens=32, steps=(1, 1, 1, 2), common=16, others=8, rows=4, matrix_rate=0.2, rate=0.02)


@functools.cache
def model() -> Any:
    return tiny_architectures.tiny("llama", tie_word_embeddings=True)


@functools.cache
def simple() -> Any:
    """A model whose next token depends on the newest one alone, so that a head can foresee it."""
    return silenced(tiny_architectures.tiny("llama", tie_word_embeddings=True))


def silenced(module: Any) -> Any:
    """The same module, whose layers add nothing."""
    for name, array in tree_flatten(module.parameters()):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            module.load_weights([(name, mx.zeros_like(array))], strict=False)
    return module


@functools.cache
def answers(whose: Callable[[], Any] = model) -> list[Answers]:
    """Two batches of eight answers."""
    prompts = tuple(tuple((7 * row + 3 * at) % VOCAB for at in range(6)) for row in range(8))
    pieces = [Piece(number, KINDS * 4, prompts, held_out=False) for number in range(2)]
    return [head_answers.answer(whose(), piece, [0]) for piece in pieces]


def test_prompts_are_different_and_of_two_kinds() -> None:
    training, held_out = head_prompts.training(), head_prompts.held_out()
    assert len(set(training) | set(held_out)) == len(training) + len(held_out)
    for prompts in (training, held_out, training[:200]):
        kinds = Counter(prompt.kind for prompt in prompts)
        assert kinds["text"] == kinds["code"]


def test_a_held_out_prompt_speaks_of_what_no_other_does() -> None:
    trained = {prompt.text for prompt in head_prompts.training()}
    for subject in ("working from home", "a shipwreck"):
        assert any(subject in prompt.text for prompt in head_prompts.held_out())
        assert not any(subject in text for text in trained)


class Counting:
    """A tokenizer that makes a token of each word."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> list[int]:
        return [len(word) for word in messages[0]["content"].split()]


def test_prompts_are_answered_again_by_another_chance_once_all_of_them_were() -> None:
    pieces = head_answers.pieces(Counting())
    others = [piece for piece in pieces if not piece.held_out]
    # A piece's number is its seed.
    assert [piece.number for piece in others] == [*range(len(others))]
    assert len(others) < head_answers.HELD_PIECES
    once = len(others) // head_answers.ROUNDS
    first, second = ([piece.prompts for piece in others[at : at + once]] for at in (0, once))
    assert first != second
    assert sorted(first) == sorted(second)


def test_an_answer_is_that_of_the_seed_and_its_hidden_states_are_those_of_its_tokens() -> None:
    found = answers()[0]
    again = head_answers.answer(model(), Piece(0, found.kinds, _prompts(found), held_out=False), [0])
    assert (found.tokens == again.tokens).all()
    hidden = model().model(mx.array(found.tokens[:, :-1]), cache=make_prompt_cache(model()))
    np.testing.assert_allclose(found.hidden, np.array(hidden), atol=0.02)


def test_a_row_counts_up_to_the_token_that_ends_its_answer() -> None:
    tokens = np.array([[9, 9, 5, 1, 5], [9, 9, 5, 5, 5]], dtype=np.int32)
    assert head_answers._lengths(tokens, 2, [1]).tolist() == [4, 5]


def test_a_piece_is_read_as_it_was_written(tmp_path: Path) -> None:
    head_answers.write(tmp_path, 3, answers()[0])
    head_answers.write(tmp_path, head_answers.HELD_PIECES, answers()[1])
    [file] = head_answers.pieces_of(tmp_path, tokens=1)
    found = head_answers.read(file)
    assert (found.kinds, found.prompt_tokens) == (answers()[0].kinds, 6)
    assert (found.hidden == answers()[0].hidden).all()
    [held] = head_answers.held_out(tmp_path)
    assert (head_answers.read(held).tokens == answers()[1].tokens).all()


def test_drafts_in_training_are_those_of_the_head_when_it_drafts() -> None:
    """All drafts of a text at once, against one draft after the other over the head's own cache."""
    head = _begun()
    found = answers()[0]
    tokens, hidden = mx.array(found.tokens[:1, :20]), mx.array(found.hidden[:1, :19]).astype(mx.float32)
    together = head_training.unrolled(head, model().model.embed_tokens(tokens), hidden, 3)
    cache = head.make_cache()
    for at in range(16):
        given = head(tokens[:, at + 1 : at + 2], hidden[:, at : at + 1], cache)
        for step in range(3):
            np.testing.assert_allclose(
                np.array(together[step][0, at]), np.array(head.norm(given)[0, 0]), rtol=1e-3, atol=1e-4
            )
            if step < 2:
                given = head(tokens[:, at + step + 2 : at + step + 3], head.fed_back(given), cache)
        rollback.take_back(cache, 2)


def test_training_brings_a_head_nearer_to_its_model_and_goes_on_after_it_was_cut_off(tmp_path: Path) -> None:
    class CutOff(Exception):
        pass

    def cut_off(epoch: int, mean: float) -> None:
        if epoch == 0:
            raise CutOff

    said, file = answers(simple), tmp_path / "cut.safetensors"
    whole, again = _begun(simple), _begun(simple)
    before = _loss(whole)
    head_training.trained(whole, simple(), said, RECIPE, tmp_path / "whole.safetensors")
    assert _loss(whole) < 0.9 * before
    with pytest.raises(CutOff):
        head_training.trained(again, simple(), said, RECIPE, file, cut_off)
    again = _begun(simple)
    head_training.trained(again, simple(), said, RECIPE, file)
    for (name, one), (_, other) in zip(
        tree_flatten(whole.parameters()), tree_flatten(again.parameters()), strict=True
    ):
        assert mx.array_equal(one, other), name


def test_a_fitted_head_is_found_beside_the_model(tmp_path: Path) -> None:
    head = _begun()
    head_training.save(head, tmp_path / "mtp.safetensors")
    found = read_head(tmp_path, model())
    assert found is not None
    token, hidden = mx.array([[5]]), mx.ones((1, 1, head.width))
    np.testing.assert_allclose(
        np.array(found.logits(found(token, hidden))), np.array(head.logits(head(token, hidden))), atol=0.02
    )
    assert found.draft_tokens is not None
    assert len(found.draft_tokens) == 32


def test_a_head_that_is_right_by_construction_is_counted_right() -> None:
    head = silenced(MtpHead(simple(), mx.arange(VOCAB)))
    head.pre_fc_norm_embedding.weight = mx.ones(head.width)
    head.fc.weight = mx.concatenate([mx.eye(head.width), mx.zeros((head.width, head.width))], axis=1)
    said = head_answers.answer(simple(), Piece(0, KINDS, ((1, 2, 3), (4, 5, 6)), held_out=True), [])
    assert head_training.acceptance(head, simple(), [said], 3) == {"text": [1, 1, 1], "code": [1, 1, 1]}


def _begun(whose: Callable[[], Any] = model) -> MtpHead:
    draft_tokens, share = head_training.commonest(answers(whose), RECIPE.draft_tokens, VOCAB)
    assert 0 < share <= 1
    return head_training.begun(whose(), draft_tokens, answers(whose))


def _loss(head: MtpHead) -> float:
    texts = head_training.Texts.of(answers(simple)[0], range(8))
    among = mx.arange(RECIPE.draft_tokens)
    return float(head_training.loss(head, simple(), RECIPE, texts, among, 2))


def _prompts(found: Answers) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(token) for token in row[: found.prompt_tokens]) for row in found.tokens)
