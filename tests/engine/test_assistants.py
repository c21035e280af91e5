"""Assistants of Gemma 4: answers are those of plain decoding, whatever one drafts; others are refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from family_params import in_turn
from hidden_drafters import VOCAB, Even, silenced, verdict_of
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from speculating import GREEDY, Run

from fleetd.engine.heads.assistant import Assistant, AssistantConfig
from fleetd.engine.heads.drafter_files import read_drafter
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.quantised_rows import quantise_rows
from fleetd.engine.loop import decoding
from fleetd.engine.protocol import Cancel, Sampling, Speculate
from fleetd.engine.speculation.assistant_source import WorkerAssistant
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")
PROMPT = [3, 10, 17, 24, 31, 38]
ALONE = Speculate(sources=["assistant"])
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)
WIDTH = 128
TEXT = {
    "model_type": "gemma4_text",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "vocab_size": VOCAB,
    "sliding_window": tiny_architectures.WINDOW,
}
CONFIG = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": WIDTH,
    "tie_word_embeddings": False,
    "text_config": TEXT,
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 4}


def shape_of(**changes: Any) -> AssistantConfig:
    config = {name: value for name, value in CONFIG.items() if name != "model_type"}
    return replace(AssistantConfig(**config), **changes)  # type: ignore[arg-type]


@functools.cache
def target(family: str = "gemma4_text") -> Any:
    """A model whose next token depends on the newest one alone."""
    model = tiny_architectures.tiny(family, tie_word_embeddings=False)
    silenced(model)
    return model


def assistant_of(model: Any, **changes: Any) -> Assistant:
    drafter = Assistant(model, shape_of(**changes))
    mx.random.seed(1)
    for name, array in tree_flatten(drafter.parameters()):
        if name.endswith("token_ordering"):
            drafter.load_weights([(name, mx.random.permutation(VOCAB).astype(mx.int32))], strict=False)
        elif array.ndim > 1:
            drafter.load_weights([(name, 0.1 * mx.random.normal(array.shape))], strict=False)
    return drafter


def right_assistant(model: Any) -> Assistant:
    """An assistant that gives what a model like ``target`` gives."""
    drafter, weights = assistant_of(model), Stage.of(model).weights
    silenced(drafter)
    drafter.pre_projection.weight = mx.concatenate([mx.eye(WIDTH), mx.zeros((WIDTH, WIDTH))], axis=1)
    drafter.model.norm.weight, drafter.lm_head.weight = weights.norm.weight, weights.lm_head.weight
    return drafter


class LyingAssistant(Assistant):
    """Guesses another token than the assistant does, every time."""

    def _likeliest(self, own: mx.array) -> mx.array:
        return (super()._likeliest(own) + 1) % VOCAB


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


def spec(model: Any, drafter: Assistant) -> Any:
    worker = WorkerAssistant.measured(drafter)
    return speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker)


def answered(model: Any, tokenizer: Any, speculation: Any, **fields: Any) -> Run:
    run = Run(model, tokenizer, speculation)
    run.submit("r", PROMPT, **{"max_tokens": 20, **fields})
    run.finish()
    return run


@pytest.mark.parametrize(
    ("family", "sampling"),
    in_turn(["gemma4_text", "gemma4_moe"], {"greedy": GREEDY, "seeded": SEEDED}),
)
def test_a_random_assistant_changes_no_byte(family: str, sampling: Sampling, tokenizer: Any) -> None:
    model = tiny_architectures.tiny(family)
    plain = answered(model, tokenizer, None, sampling=sampling)
    speculation = spec(model, assistant_of(model, **CLUSTERS))
    run = answered(model, tokenizer, speculation, sampling=sampling, speculate=ALONE)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["assistant"].drafted > report.accepted


def test_an_assistant_reads_numbers_where_rows_are_quantised(tokenizer: Any) -> None:
    model = tiny_architectures.tiny("gemma4_text")
    assert quantise_rows(model, 8).bits == 8
    plain = answered(model, tokenizer, None)
    drafter = assistant_of(model)
    run = answered(model, tokenizer, spec(model, drafter), speculate=ALONE)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["assistant"].drafted
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    rows = drafter.rows(cache, len(PROMPT))
    assert rows is not None
    assert {array.dtype for pair in rows.values() for array in pair} == {mx.float32}


def test_an_assistant_that_is_right_by_construction_is_always_right(tokenizer: Any) -> None:
    model = target()
    plain = answered(model, tokenizer, None)
    run = answered(model, tokenizer, spec(model, right_assistant(model)), speculate=ALONE)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["assistant"].drafted == report.accepted > 12


def test_an_answer_goes_on_when_a_window_has_moved(tokenizer: Any) -> None:
    model = target()
    plain = answered(model, tokenizer, None, max_tokens=50)
    run = answered(model, tokenizer, spec(model, right_assistant(model)), max_tokens=50, speculate=ALONE)
    assert run.said("r") == plain.said("r")


def test_an_assistant_reads_the_last_layers_that_keep_rows() -> None:
    model = tiny_architectures.tiny("gemma4_text", num_kv_shared_layers=2)
    drafter = assistant_of(model)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    rows = drafter.rows(cache, len(PROMPT))
    assert rows is not None
    for kind, kept in zip(("sliding_attention", "full_attention"), cache, strict=True):
        assert mx.array_equal(rows[kind][0], kept.keys[..., : len(PROMPT), :])
        assert mx.array_equal(rows[kind][1], kept.values[..., : len(PROMPT), :])
    # Of another text it guesses something else.
    state = mx.random.normal((1, WIDTH), key=mx.random.key(3))
    other = {kind: (-keys, 2 * values) for kind, (keys, values) in rows.items()}
    assert drafter.guesses(5, 6, state, 4, rows).tolist() != drafter.guesses(5, 6, state, 4, other).tolist()
    assert drafter.rows(cache, len(PROMPT) + 1) is None


def test_clusters_give_what_all_tokens_would_if_all_are_chosen() -> None:
    model = tiny_architectures.tiny("gemma4_text")
    dense, clusters = (
        assistant_of(model, tie_word_embeddings=True),
        assistant_of(model, **{**CLUSTERS, "centroid_intermediate_top_k": 16}),
    )
    shared = [each for each in tree_flatten(dense.parameters()) if "masked" not in each[0]]
    clusters.load_weights(shared, strict=False)
    rows, state = dense.empty_rows(6), mx.random.normal((1, WIDTH), key=mx.random.key(3))
    expected = dense.guesses(5, 6, state, 6, rows).tolist()
    assert clusters.guesses(5, 6, state, 6, rows).tolist() == expected


@pytest.mark.parametrize(
    "kind", [right_assistant, assistant_of, lambda model: LyingAssistant(model, shape_of())]
)
def test_several_answers_that_come_and_go_are_those_without_an_assistant(
    kind: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart and in the batch; one is cancelled and asked again, so that its prompt's rows are restored."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 0)
    model = target()
    prompts = {"a": PROMPT, "b": [*PROMPT[:5], 9], "c": PROMPT[:4]}
    sampling = {"a": GREEDY, "b": SEEDED, "c": GREEDY}
    plain = Run(model, tokenizer)
    for request, prompt in prompts.items():
        plain.submit(request, prompt, sampling=sampling[request], max_tokens=20)
    plain.finish()
    run = Run(model, tokenizer, spec(model, kind(model)))
    monkeypatch.setattr(run.decoding.rounds, "step_s", lambda size: 100.0 * size)
    run.submit("lost", PROMPT, max_tokens=20)
    for _ in range(3):
        run.turn()
    run.scheduler.inbox.put(Cancel("lost"))
    for request, prompt in prompts.items():
        run.submit(request, prompt, sampling=sampling[request], max_tokens=20, speculate=ALONE)
        for _ in range(3):
            run.turn()
    run.finish()
    for request in prompts:
        # Of the prompt more or less was in memory.
        assert [event[:2] for event in run.said(request)[:-1]] == [
            event[:2] for event in plain.said(request)[:-1]
        ]


def test_an_answer_that_is_held_to_a_grammar_is_the_same(tokenizer: Any) -> None:
    model = target()
    plain = answered(model, tokenizer, None, matcher=Even())
    drafted = answered(model, tokenizer, spec(model, right_assistant(model)), matcher=Even())
    assert drafted.said("r") == plain.said("r")


def saved(folder: Path, drafter: Assistant, config: dict[str, Any]) -> Path:
    folder.mkdir()
    tensors = dict(tree_flatten(drafter.parameters()))
    # What publishers' files have more.
    tensors["model.layers.0.self_attn.k_proj.weight"] = mx.zeros((64, WIDTH))
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, CLUSTERS])
def test_an_assistant_is_read_by_its_publishers_names(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_architectures.tiny("gemma4_text")
    drafter = assistant_of(model, **changes)
    found = read_drafter(saved(tmp_path / "a", drafter, {**CONFIG, **changes}), model)
    ours, theirs = dict(tree_flatten(drafter.parameters())), dict(tree_flatten(found.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "ids", [[VOCAB] * VOCAB, [-1] * VOCAB, [0.0] * VOCAB], ids=["behind", "before", "f32"]
)
def test_clusters_of_tokens_that_the_model_does_not_have_are_refused(ids: list[Any], tmp_path: Path) -> None:
    model = tiny_architectures.tiny("gemma4_text")
    drafter = assistant_of(model, **CLUSTERS)
    drafter.masked_embedding.token_ordering = mx.array(ids)
    with pytest.raises(ModelUnsupported, match="token_ordering"):
        read_drafter(saved(tmp_path / "a", drafter, {**CONFIG, **CLUSTERS}), model)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gemma4_text", {"backbone_hidden_size": 64}, "it takes hidden states of 64, the model's are of 128"),
        ("gemma4_text", {"text_config": {**TEXT, "vocab_size": 100}}, "it knows 100 tokens"),
        ("gemma4_text", {"text_config": {**TEXT, "head_dim": 16}}, "cannot read the model's keys"),
        ("llama", {}, "the model has no layer of sliding_attention"),
    ],
)
def test_an_assistant_of_another_model_is_refused(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    drafter = assistant_of(tiny_architectures.tiny("gemma4_text"))
    folder = saved(tmp_path / "a", drafter, {**CONFIG, **changes})
    with pytest.raises(ModelUnsupported, match=why):
        read_drafter(folder, tiny_architectures.tiny(family))
