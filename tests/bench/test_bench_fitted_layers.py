"""A drafter whose head is fitted to its layers: what is found, what is written, when it is left out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_architectures
from mlx_lm.utils import load_model

from bench.figures import Figure
from bench.harness import drafting
from bench.scenarios import drafter_beside_local as beside
from eval import cut_fitting, head_answers
from eval.head_answers import Answers, Piece
from eval.head_prompts import KINDS

VOCAB = tiny_architectures.VOCAB


@functools.cache
def model() -> Any:
    """Its later layers add little, so that the first one's output tells most of what it will say."""
    found = tiny_architectures.tiny("llama", tie_word_embeddings=True)
    for layer in found.model.layers[1:]:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0.1
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.1
    # A norm that the map has to find.
    found.model.norm.weight = mx.linspace(0.2, 3.0, found.args.hidden_size)
    return found


def answers(number: int) -> Answers:
    prompts = tuple(tuple((7 * row + 3 * at + number) % VOCAB for at in range(6)) for row in range(12))
    return head_answers.answer(model(), Piece(number, KINDS * 6, prompts, held_out=number > 3), [0])


def test_a_fitted_head_foresees_what_the_model_says() -> None:
    learnt, held = [answers(number) for number in range(4)], [answers(4)]
    found = cut_fitting.fitted(model(), 1, learnt)
    assert np.array_equal(found, cut_fitting.fitted(model(), 1, learnt))
    plain = np.eye(len(found), dtype=np.float32)
    right = cut_fitting.right(model(), 1, found, held)
    assert right > max(0.5, cut_fitting.right(model(), 1, plain, held))


def test_a_fitted_head_is_written_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that model says is what was fitted."""
    folder = tiny_architectures.write(tmp_path / "whole", "llama", tie_word_embeddings=True)
    monkeypatch.setattr(drafting, "MODEL", folder)
    whole = tiny_architectures.tiny("llama", tie_word_embeddings=True)
    found = np.random.default_rng(3).normal(size=(128, 128)).astype(np.float32)
    head = cut_fitting.output_head(whole, found)
    made, _ = load_model(drafting.first_layers(tmp_path / "cut", 2, head))
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_hidden_layers"] == 2
    tokens = mx.array([[3, 4, 5]])
    state = whole.model.embed_tokens(tokens)
    for layer in whole.model.layers[:2]:
        state = layer(state, "causal", None)
    normed = mx.fast.rms_norm(state, mx.ones(128), whole.args.rms_norm_eps)
    expected = whole.model.embed_tokens.as_linear(normed @ mx.array(found))
    assert mx.allclose(made(tokens), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kept", [False, True])
def test_a_drafter_is_left_out_loudly_if_no_answers_are_kept(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[Path, list[beside.Side]]] = []

    async def measured(runs: int, drafters: dict[Path, list[beside.Side]]) -> list[Figure]:
        asked.append(drafters)
        return []

    monkeypatch.setattr(beside, "why_no_cores", lambda: "")
    monkeypatch.setattr(beside, "kept_answers", lambda: tmp_path)
    monkeypatch.setattr(beside, "first_layers", lambda folder, layers: folder)
    monkeypatch.setattr(beside, "_fit", lambda folder: 0.25)
    monkeypatch.setattr(beside, "_measure", measured)
    if kept:
        head_answers.write(tmp_path, 0, answers(0))
    how = beside.measure(3).how
    [drafters] = asked
    titles = [side.title for sides in drafters.values() for side in sides]
    fitted = [title for title in titles if "a head fitted to them" in title]
    said = "was left out: no answers of the model are kept to fit it to: python -m eval.fit_head"
    assert len(titles) == 3 * len(drafters)
    assert len(fitted) == (3 if kept else 0)
    assert (said in how) is not kept
    assert ("LEFT OUT" in capsys.readouterr().out) is not kept
