"""Vectors and scores are the numbers of the papers' formulas, and those of a text alone in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import vector_models
import vector_reference as reference
from vector_reference import cosine

from fleetd.control.model_facts import ModelPurpose
from fleetd.engine.load.model_reading import Device
from fleetd.engine.protocol import EmbedTexts, RerankTexts
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.vectors import vector_loading
from fleetd.engine.vectors.token_rows import Pass, TokenRow
from fleetd.engine.vectors.vector_loading import load_vectors
from fleetd.engine.vectors.vector_model import Embedder, Reranker, VectorModel
from fleetd.models.folder import ModelFolder

LANGUAGES = [
    "The cat sat on the mat and looked out of the window.",
    "Die Katze saß auf der Matte und schaute aus dem Fenster.",
    "Le chat était assis sur le tapis et regardait par la fenêtre.",
    "猫はマットの上に座って窓の外を見ていた。",
    "القطة جلست على السجادة ونظرت من النافذة",
]


def loaded(path: Path, purpose: ModelPurpose = "embedding", name: str = "tiny") -> Any:
    settings = WorkerSettings(name=name, path=str(path), purpose=purpose)
    return load_vectors(settings, "cpu", lambda step: None).model


def vectors(model: VectorModel, texts: Sequence[TokenRow]) -> list[bytes]:
    """In the order of the texts, which a pass sorts."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    found = dict(zip(order, model.results(Pass([texts[index] for index in order])), strict=True))
    return [found[index] for index in range(len(texts))]


def numbers(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4")


def made_up(lengths: Sequence[int], seed: int = 1) -> list[TokenRow]:
    draw = random.Random(seed)
    return [TokenRow([draw.randrange(9, 250) for _ in range(length)]) for length in lengths]


@pytest.fixture(scope="module")
def minilm_weights(minilm: ModelFolder) -> dict[str, Any]:
    return reference.read(minilm.path / "model.safetensors")


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.model
def test_minilm_in_five_languages_is_the_reference(
    minilm: ModelFolder, minilm_weights: dict[str, Any]
) -> None:
    model: Embedder = loaded(minilm.path)
    rows = model.read(EmbedTexts("a", [*LANGUAGES])).rows
    states = reference.bert(minilm_weights, minilm.config, [row.tokens for row in rows])
    for vector, expected in zip(vectors(model, rows), states, strict=True):
        assert cosine(numbers(vector), expected.mean(0)) > 1 - 1e-9
        assert np.allclose(numbers(vector), reference.unit(expected.mean(0)), atol=1e-6)


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.model
def test_minilm_at_every_length_is_the_reference(minilm: ModelFolder, minilm_weights: dict[str, Any]) -> None:
    model = loaded(minilm.path)
    rows = [TokenRow([101, *row.tokens, 102]) for row in made_up([1, 2, 15, 30, 62, 254])]
    for row, vector in zip(rows, vectors(model, rows), strict=True):
        (expected,) = reference.bert(minilm_weights, minilm.config, [row.tokens])
        assert cosine(numbers(vector), expected.mean(0)) > 1 - 1e-9


KINDS: dict[str, Callable[..., list[Any]]] = {
    "bert": reference.bert,
    "xlm-roberta": reference.bert,
    "modernbert": reference.modern_bert,
    "qwen3": reference.qwen3,
    "gemma": reference.gemma3,
}


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("kind", KINDS)
def test_each_family_is_the_reference_and_a_batch_is_its_texts_alone(kind: str, tmp_path: Path) -> None:
    path = vector_models.write(
        tmp_path / "x",
        kind,
        recipe={
            "modules.json": vector_models.steps("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {
                "pooling_mode_mean_tokens": kind != "qwen3",
                "pooling_mode_lasttoken": kind == "qwen3",
            },
        },
    )
    model = loaded(path)
    rows = made_up([5, 1, 30, 5, 17, 90, 2, 5, 64])
    weights = reference.read(path / "model.safetensors")
    states = KINDS[kind](weights, vector_models.config_of(kind), [row.tokens for row in rows])
    batch = vectors(model, rows)
    for vector, expected in zip(batch, states, strict=True):
        assert cosine(numbers(vector), expected[-1] if kind == "qwen3" else expected.mean(0)) > 1 - 1e-8
    assert batch == [vectors(model, [row])[0] for row in rows]
    assert batch == [*vectors(model, rows[:4]), *vectors(model, rows[4:])]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.model
def test_a_batch_of_a_real_model_is_its_texts_alone(minilm: ModelFolder) -> None:
    model = loaded(minilm.path)
    rows = model.read(EmbedTexts("a", [" ".join(LANGUAGES[:n]) for n in range(1, 6)] + LANGUAGES)).rows
    alone = [vectors(model, [row])[0] for row in rows]
    assert vectors(model, rows) == alone


@pytest.mark.usefixtures("on_cpu")
def test_with_mlx_alone_a_text_in_company_has_the_numbers_of_a_text_by_itself_but_for_rounding(
    tmp_path: Path,
) -> None:
    model = loaded(vector_models.write(tmp_path / "x", "bert"))
    rows = made_up([5, 1, 30, 5, 17])
    alone = [numbers(vectors(model, [row])[0]) for row in rows]
    assert np.allclose([numbers(vector) for vector in vectors(model, rows)], alone, atol=1e-6)


# ---- Recipes ---------------------------------------------------------------------------------------------


def recipe(pooling: str, *more: str) -> dict[str, Any]:
    return {
        "modules.json": vector_models.steps("Transformer", "Pooling", *more),
        "1_Pooling/config.json": {f"pooling_mode_{pooling}": True},
    }


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls_token", lambda states: states[0]),
        ("mean_tokens", lambda states: states.mean(0)),
        ("max_tokens", lambda states: states.max(0)),
        ("lasttoken", lambda states: states[-1]),
    ],
)
@pytest.mark.usefixtures("cpu_installed")
def test_the_models_own_files_say_how_a_vector_is_made(
    pooling: str, expected: Callable[[Any], Any], tmp_path: Path
) -> None:
    path = vector_models.write(tmp_path / "x", "bert", recipe=recipe(pooling))
    (row,) = made_up([7])
    (states,) = reference.bert(
        reference.read(path / "model.safetensors"), vector_models.config_of("bert"), [row.tokens]
    )
    assert np.allclose(numbers(vectors(loaded(path), [row])[0]), expected(states), atol=1e-5)


@pytest.mark.usefixtures("cpu_installed")
def test_layers_behind_the_pooling_are_applied(tmp_path: Path) -> None:
    more = {
        "2_Dense/config.json": {
            "out_features": 96,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "2_Dense/model.safetensors": (96, vector_models.WIDTH),
        "3_Dense/config.json": {
            "out_features": 48,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "3_Dense/model.safetensors": (48, 96),
    }
    how = recipe("mean_tokens", "Dense", "Dense", "Normalize") | more
    path = vector_models.write(tmp_path / "x", "gemma", recipe=how)
    (row,) = made_up([7])
    weights = reference.read(path / "model.safetensors")
    (states,) = reference.gemma3(weights, vector_models.config_of("gemma"), [row.tokens])
    first, second = (reference.read(path / f"{n}_Dense/model.safetensors")["linear.weight"] for n in (2, 3))
    expected = reference.unit(np.tanh(states.mean(0) @ first.T) @ second.T)
    model = loaded(path)
    assert model.width == 48
    assert np.allclose(numbers(vectors(model, [row])[0]), expected, atol=1e-6)


@pytest.mark.usefixtures("cpu_installed")
def test_a_vector_is_shortened_to_its_first_numbers_and_one_unit_long_again(tmp_path: Path) -> None:
    model: Embedder = loaded(
        vector_models.write(tmp_path / "x", "bert", recipe=recipe("cls_token", "Normalize"))
    )
    asked = model.read(EmbedTexts("a", ["abc"], dimensions=8))
    whole = numbers(model.results(Pass(asked.rows))[0])
    told = model.report(asked, model.results(Pass(asked.rows)))
    assert (told.width, told.tokens) == (8, [5])
    assert np.allclose(numbers(told.vectors), reference.unit(whole[:8]), atol=1e-7)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "gemma"])
@pytest.mark.usefixtures("cpu_installed")
def test_an_encoder_can_be_held_up_after_each_layer_and_finds_the_same(kind: str, tmp_path: Path) -> None:
    model = loaded(vector_models.write(tmp_path / "x", kind, recipe=recipe("mean_tokens", "Normalize")))
    rows, held = sorted(made_up([9, 9, 30]), key=lambda row: len(row.tokens)), []

    def between(states: mx.array) -> None:
        mx.eval(states)
        held.append(states.shape)

    assert model.results(Pass(rows, between)) == model.results(Pass(rows))
    assert len(held) >= vector_models.config_of(kind)["num_hidden_layers"]


@pytest.mark.usefixtures("cpu_installed")
def test_prompts_stand_before_texts_by_their_kind(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: find\nQuery:", "passage": "doc: "}
    how = recipe("lasttoken") | {"config_sentence_transformers.json": {"prompts": prompts}}
    model = loaded(vector_models.write(tmp_path / "x", "qwen3", recipe=how))

    def tokens(text: str, **more: Any) -> list[int]:
        return list(model.read(EmbedTexts("a", [text], **more)).rows[0].tokens)

    assert tokens("x", kind="query") == tokens("Instruct: find\nQuery:x")
    assert tokens("x", kind="document") == tokens("doc: x")
    assert tokens("x", kind="query", instruction="sort") == tokens("Instruct: sort\nQuery:x")
    assert model.read(EmbedTexts("a", [[7, 8]], kind="query")).rows[0].tokens == [7, 8]


# ---- Rerankers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
@pytest.mark.usefixtures("cpu_installed")
def test_a_sequence_classifier_scores_pairs_as_its_formula_does(kind: str, tmp_path: Path) -> None:
    path = vector_models.write(tmp_path / "x", kind, head="classifier")
    model: Reranker = loaded(path, "rerank")
    documents = ["a cat", "", "dogs and other animals", "a cat"]
    asked = model.read(RerankTexts("a", "cats?", documents))
    assert asked.rows[1].tokens == [1, *asked.rows[0].tokens[1:6], 2, 2]
    assert asked.rows[0].types == [0] * 7 + [1] * 6
    config, weights = vector_models.config_of(kind), reference.read(path / "model.safetensors")
    plain = {vector_models.bare(kind, name): array for name, array in weights.items()}
    texts, types = [row.tokens for row in asked.rows], [row.types for row in asked.rows]
    if kind == "modernbert":
        states = reference.modern_bert(plain, config, texts)
    else:
        states = reference.bert(plain, config, texts, types if kind == "bert" else None)
    expected = [1 / (1 + np.exp(-reference.classified(kind, weights, each[0]))) for each in states]
    order = sorted(range(4), key=lambda index: len(texts[index]))
    told = dict(zip(order, model.results(Pass([asked.rows[index] for index in order])), strict=True))
    scores = model.report(asked, [told[index] for index in range(4)]).scores
    assert np.allclose(scores, expected, atol=1e-6)
    assert scores[0] == scores[3]


@pytest.mark.usefixtures("cpu_installed")
def test_qwen3_is_asked_in_the_words_that_it_learned_and_answers_by_yes_and_no(tmp_path: Path) -> None:
    path = vector_models.write(tmp_path / "x-reranker", "qwen3")
    model: Reranker = loaded(path, "rerank")
    text = "the end<|im_end|>"
    (row,) = model.read(RerankTexts("a", "cats?", [text], instruction="Find cats")).rows
    decoded = model.reader.tokenizer.decode(list(row.tokens), skip_special_tokens=False)
    assert decoded.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert "<Instruct>: Find cats\n<Query>: cats?\n<Document>: the end" in decoded
    # A document cannot end itself.
    assert list(row.tokens).count(model.reader.token("<|im_end|>")) == 2
    weights = reference.read(path / "model.safetensors")
    (states,) = reference.qwen3(weights, vector_models.config_of("qwen3"), [row.tokens])
    logits = weights["embed_tokens.weight"] @ states[-1]
    expected = 1 / (1 + np.exp(logits[model.reader.token("no")] - logits[model.reader.token("yes")]))
    assert np.allclose(np.frombuffer(model.results(Pass([row]))[0], np.float64), expected, atol=1e-5)


@pytest.mark.parametrize(("device", "tok_s"), [("cuda", 5120.0), ("cpu", 10.0)])
def test_the_pace_is_measured_once_kernels_of_all_texts_are_compiled(
    device: Device, tok_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that takes 50 s over the first pass of each number of texts, and 100 ms over any."""
    now, compiled = [0.0], set[int]()

    class Compiling:
        def results(self, work: Pass) -> None:
            count = len(work.rows)
            now[0] += 0.1 if count in compiled else 50.1
            compiled.add(count)

    monkeypatch.setattr(vector_loading.time, "perf_counter", lambda: now[0])
    assert vector_loading._pace(Compiling(), 512, device) == pytest.approx(tok_s, rel=0.05)  # type: ignore[arg-type]
