"""Block drafters: answers are those of plain decoding whatever one drafts; other models' are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import speculating
import tiny_architectures
from block_drafters import KINDS, OWN, WIDTH, config_of, drafter_of, right_drafter, saved
from family_params import in_turn
from hidden_drafters import VOCAB, Even, simple, verdict_of
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run

from fleetd import limits
from fleetd.engine.heads import block_drafter
from fleetd.engine.heads.block_config import BlockConfig
from fleetd.engine.heads.block_drafter import BlockDrafter
from fleetd.engine.heads.drafter_files import read_drafter
from fleetd.engine.load import loading
from fleetd.engine.loop import decoding
from fleetd.engine.protocol import Cancel, Sampling, Speculate
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.speculation import hidden_source
from fleetd.engine.speculation.block_source import WorkerBlocks
from fleetd.engine.speculation.sources import HiddenRows
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")
PROMPT = [(7 * i + 3) % 64 for i in range(30)]
# No draft but those of the drafter.
ALONE = Speculate(sources=["dflash"])
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)


class LyingBlocks(BlockDrafter):
    """Guesses tokens that are not the model's, every time."""

    def guesses(self, token: int, position: int, count: int, cache: list[Any]) -> mx.array:
        following = self.following
        found = []
        for _ in range(count):
            token = int(following[token])
            found.append((token + 1) % VOCAB)
        return mx.array(found, dtype=mx.int32)


def lying(model: Any) -> BlockDrafter:
    drafter = LyingBlocks(model, BlockConfig.of(config_of("dflash")))
    drafter.following = mx.argmax(model.lm_head(model.model.norm(model.model.embed_tokens.weight)), axis=-1)
    return drafter


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


def spec(model: Any, drafter: BlockDrafter) -> Any:
    worker = WorkerBlocks.measured(drafter)
    return speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker)


def answered(model: Any, tokenizer: Any, speculation: Any, **fields: Any) -> Run:
    run = Run(model, tokenizer, speculation)
    run.submit("r", PROMPT, **{"max_tokens": 24, **fields})
    run.finish()
    return run


@pytest.mark.parametrize(("kind", "sampling"), in_turn(list(KINDS), {"greedy": GREEDY, "seeded": SEEDED}))
def test_a_random_drafter_changes_no_byte(kind: str, sampling: Sampling, tokenizer: Any) -> None:
    model = tiny_architectures.tiny("llama")
    plain = answered(model, tokenizer, None, sampling=sampling)
    run = answered(model, tokenizer, spec(model, drafter_of(model, kind)), sampling=sampling, speculate=ALONE)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["dflash"].drafted > report.accepted


@pytest.mark.parametrize(("kind", "family"), in_turn(["dflash2", "dspark"], ["llama", "qwen3_5"]))
def test_a_drafter_that_is_right_by_construction_is_always_right(
    kind: str, family: str, tokenizer: Any
) -> None:
    model = simple(family)
    plain = answered(model, tokenizer, None)
    run = answered(model, tokenizer, spec(model, right_drafter(model, kind)), speculate=ALONE)
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["dflash"].drafted == report.accepted > 15


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_drafter_guesses_does_not_depend_on_how_its_rows_came(kind: str) -> None:
    drafter = drafter_of(tiny_architectures.tiny("llama"), kind)
    states = mx.random.normal((40, 2 * WIDTH), key=mx.random.key(2))
    whole, parts = drafter.make_cache(), drafter.make_cache()
    drafter.read(states, 0, whole)
    for start, end in ((0, 7), (7, 8), (8, 40)):
        drafter.read(states[start:end], start, parts)
    expected = drafter.guesses(5, 40, 7, whole).tolist()
    assert drafter.guesses(5, 40, 7, parts).tolist() == expected
    # Nothing of a block was kept.
    assert drafter.guesses(5, 40, 7, parts).tolist() == expected
    assert len({*expected}) > 1


@pytest.mark.parametrize("kind", ["right", "random", "lying"])
def test_several_answers_that_come_and_go_are_those_without_a_drafter(
    kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart and in the batch; one is cancelled and asked again, so that its prompt's rows are restored."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 0)
    model = simple("llama")
    makers: dict[str, Callable[[], BlockDrafter]] = {
        "right": lambda: right_drafter(model, "dspark"),
        "random": lambda: drafter_of(model, "dflash"),
        "lying": lambda: lying(model),
    }
    prompts = {"a": PROMPT, "b": [*PROMPT[:29], 9], "c": PROMPT[:20]}
    sampling = {"a": GREEDY, "b": SEEDED, "c": GREEDY}
    plain = Run(model, tokenizer)
    for request, prompt in prompts.items():
        plain.submit(request, prompt, sampling=sampling[request], max_tokens=20)
    plain.finish()
    run = Run(model, tokenizer, spec(model, makers[kind]()))
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
    model = simple("llama")
    plain = answered(model, tokenizer, None, matcher=Even())
    drafted = answered(model, tokenizer, spec(model, right_drafter(model, "dspark")), matcher=Even())
    assert drafted.said("r") == plain.said("r")


def test_the_rows_of_a_long_text_stay_bounded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SPEC_HIDDEN_ROWS", 40)
    monkeypatch.setattr(block_drafter, "ROWS", 64)
    drafter = drafter_of(simple("llama"), "dflash")
    source = WorkerBlocks.measured(drafter).source()
    assert source is not None
    for start in range(0, 400, 10):
        rows = mx.random.normal((10, WIDTH))
        source.note(HiddenRows(start, {0: rows, 2: rows}))
        if start % 30 == 0 and start:
            source.propose(speculating.Context([1] * (start + 10), 4))
            assert max(kept.held for kept in source._cache) <= 64
        assert source._noted.count(0, 400) <= 40 + 10
    assert source._fed == 399


def test_a_drafter_that_is_hardly_ever_right_is_switched_off_and_says_so(tokenizer: Any) -> None:
    model = simple("llama")
    worker = WorkerBlocks.measured(lying(model))
    run = Run(model, tokenizer, speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker))
    for i in range(4):
        run.submit(f"r{i}", PROMPT, max_tokens=30, speculate=ALONE)
        run.finish()
    assert worker.judged >= hidden_source.JUDGED
    assert worker.off.startswith("off: 0 of its ")
    assert run.scheduler._figures().draft_head == worker.off
    assert worker.source() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_drafter_is_read_by_its_publishers_names(kind: str, prefix: str, tmp_path: Path) -> None:
    model = tiny_architectures.tiny("llama")
    drafter = drafter_of(model, kind)
    found = read_drafter(saved(tmp_path / "d", drafter, config_of(kind), prefix), model)
    ours, theirs = dict(tree_flatten(drafter.parameters())), dict(tree_flatten(found.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_packed_drafter_is_read(tmp_path: Path) -> None:
    model = tiny_architectures.tiny("llama")
    drafter = drafter_of(model, "dflash")
    nn.quantize(drafter, 32, 8)
    found = read_drafter(saved(tmp_path / "d", drafter, config_of("dflash")), model)
    assert found.fc.bits == 8


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": 64}, "it takes hidden states of 64, the model's are of 128"),
        ({"num_target_layers": 36}, "it was made for a model of 36 layers; this one has 4"),
        ({"dflash_config": {**OWN, "target_layer_ids": [0, 7]}}, "a model of 8 layers"),
        ({"vocab_size": 1000}, "it knows 1000 tokens; the model has 256"),
        ({"num_attention_heads": 8}, "Expected shape"),
        ({"dflash_config": {**OWN, "mask_token_id": 256}}, "its mask is no token"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "does not fit"),
        ({"layer_types": ["sliding_attention"] * 2}, "how large"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_a_drafter_of_another_model_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = tiny_architectures.tiny("llama")
    folder = saved(tmp_path / "d", drafter_of(model, "dflash"), {**config_of("dflash"), **changes})
    with pytest.raises(ModelUnsupported, match=why):
        read_drafter(folder, model)


@pytest.fixture
def target(chain_path: Path, tmp_path: Path) -> Path:
    """A model's folder of its own."""
    return Path(shutil.copytree(chain_path, tmp_path / "m"))


def loaded(folder: Path, **changes: Any) -> loading.Loaded:
    settings = WorkerSettings("m", str(folder), device="cpu", **changes)
    return loading.load(settings, "cpu", lambda _: None)


def test_a_load_takes_the_named_drafter_or_says_why_not(target: Path, tmp_path: Path) -> None:
    model, config = load_model(target)
    own = {**OWN, "target_layer_ids": [0, 1], "mask_token_id": 1}
    layers, width = len(model.layers), config["hidden_size"]
    shape = config_of("dflash", num_target_layers=layers, hidden_size=width, dflash_config=own)
    shape["vocab_size"] = model.model.embed_tokens.weight.shape[0]
    folder = saved(tmp_path / "d", BlockDrafter(model, BlockConfig.of(shape)), shape)
    before = loaded(target)
    found = loaded(target, drafter=str(folder))
    assert found.facts.draft_head.startswith("dflash: ")
    assert found.facts.draft_head.endswith(" ms for 7 tokens")
    assert found.facts.shape.weights_bytes > before.facts.shape.weights_bytes
    (folder / "config.json").write_text(json.dumps({**shape, "num_target_layers": 99}))
    found = loaded(target, drafter=str(folder))
    assert found.head is None
    assert found.facts.draft_head == (
        f"off: d does not belong to this model: it was made for a model of 99 layers; this one has {layers}"
    )
    # It answers nothing itself.
    with pytest.raises(ModelUnsupported, match="it drafts for another model"):
        loaded(folder)
