"""MTP heads: answers are those of plain decoding whatever a head drafts; other models' heads are refused."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chain_model
import mlx.core as mx
import mlx.nn as nn
import pytest
import speculating
import tiny_architectures
from family_params import in_turn
from hidden_drafters import (
    VOCAB,
    Even,
    lying_head,
    nemotrons_name,
    random_head,
    right_head,
    simple,
    verdict_of,
)
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run

from fleetd import limits
from fleetd.engine.cpu.packed_layers import PackedLinear, weights_bytes
from fleetd.engine.heads.drafter_files import read_drafter
from fleetd.engine.heads.head_files import read_head
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.load import loading
from fleetd.engine.load.model_reading import HeldWeights
from fleetd.engine.loop import decoding
from fleetd.engine.protocol import Cancel, Sampling, Speculate
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.speculation import hidden_source, mtp_source
from fleetd.engine.speculation.mtp_source import MtpSource, WorkerHead
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models import digest as digests
from fleetd.models.folder import read_folder
from fleetd.models.heads import TARGET

pytestmark = pytest.mark.usefixtures("cpu_installed")
PROMPT = [(7 * i + 3) % 64 for i in range(30)]
FAMILIES = ["llama", "qwen3_5", "qwen3_next", "glm4_moe", "nemotron_3"]
# No draft but those of the head.
ALONE = Speculate(sources=["mtp"])
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def model_of() -> Callable[[str], Any]:
    return functools.cache(tiny_architectures.tiny)


def spec(model: Any, head: MtpHead, **changes: Any) -> Any:
    worker = WorkerHead.measured(head)
    return speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker, **changes)


@pytest.mark.parametrize(("name", "sampling"), in_turn(FAMILIES, {"greedy": GREEDY, "seeded": SEEDED}))
def test_a_random_head_changes_no_byte(
    name: str, sampling: Sampling, model_of: Callable[[str], Any], tokenizer: Any
) -> None:
    model = model_of(name)
    plain = Run(model, tokenizer)
    plain.submit("r", PROMPT, sampling=sampling, max_tokens=24)
    plain.finish()
    run = Run(model, tokenizer, spec(model, random_head(model)))
    run.submit("r", PROMPT, sampling=sampling, max_tokens=24, speculate=ALONE)
    run.finish()
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["mtp"].drafted > report.accepted


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_is_right_by_construction_is_always_right(name: str, tokenizer: Any) -> None:
    model = simple(name)
    plain = Run(model, tokenizer)
    plain.submit("r", PROMPT, max_tokens=24)
    plain.finish()
    run = Run(model, tokenizer, spec(model, right_head(model)))
    run.submit("r", PROMPT, max_tokens=24, speculate=ALONE)
    run.finish()
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["mtp"].drafted == report.accepted > 15


@pytest.mark.parametrize(
    ("name", "kind"), in_turn(["llama", "qwen3_5", "nemotron_3"], ["right", "random", "lying"])
)
def test_several_answers_that_come_and_go_are_those_without_a_head(
    name: str, kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart and in the batch; one is cancelled and asked again, so that its prompt's rows are restored."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 0)
    model = simple(name)
    head = {"right": right_head, "random": random_head, "lying": lying_head}[kind](model)
    prompts = {"a": PROMPT, "b": [*PROMPT[:29], 9], "c": PROMPT[:20]}
    sampling = {"a": GREEDY, "b": SEEDED, "c": GREEDY}
    plain = Run(model, tokenizer)
    for request, prompt in prompts.items():
        plain.submit(request, prompt, sampling=sampling[request], max_tokens=20)
    plain.finish()
    run = Run(model, tokenizer, spec(model, head))
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


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_after_a_restored_prefix_a_head_begins_with_what_is_computed_and_says_so(
    name: str, tokenizer: Any
) -> None:
    """The head is right from the first draft on; of the prompt it needs the last token's state alone."""
    model = simple(name)
    longer = [*PROMPT, *((5 * i + 1) % 64 for i in range(40))]
    plain = Run(model, tokenizer)
    plain.submit("r", longer, max_tokens=20)
    plain.finish()
    run = Run(model, tokenizer, spec(model, right_head(model)))
    for request, prompt in (
        ("whole", longer),
        ("restored", longer),
        ("edited", [*longer[:-8], *longer[8:16]]),
    ):
        run.submit(request, prompt, max_tokens=20, speculate=ALONE)
        run.finish()
    assert run.said("restored")[:-1] == plain.said("r")[:-1]
    counts = {}
    for request in ("whole", "restored", "edited"):
        report = run.finished(request).speculation
        assert report is not None
        counts[request] = report.sources["mtp"]
        assert counts[request].drafted == counts[request].accepted > 10
    # The last token's states come with the first pass.
    assert counts["whole"].known_tokens == len(longer) - 1
    for request in ("restored", "edited"):
        assert 0 < counts[request].known_tokens < len(longer) - 1


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_3"])
def test_after_a_restored_snapshot_of_states_a_head_begins_with_what_is_computed(
    name: str, tokenizer: Any
) -> None:
    """A conversation that goes on; and one whose last words are others."""
    model, more = simple(name), [(3 * i + 1) % 64 for i in range(20)]
    run = Run(model, tokenizer, spec(model, right_head(model)))
    run.submit("first", PROMPT, max_tokens=20, speculate=ALONE)
    run.finish()
    for request, prompt in (("on", [*run.tokens["first"], *more]), ("edited", [*PROMPT, 9, *more])):
        run.submit(request, prompt, max_tokens=20, speculate=ALONE)
        run.finish()
        plain = Run(model, tokenizer)
        plain.submit(request, prompt, max_tokens=20)
        plain.finish()
        assert run.said(request)[:-1] == plain.said(request)[:-1]
        report = run.finished(request).speculation
        assert report is not None
        counts = report.sources["mtp"]
        assert counts.drafted == counts.accepted > 10
        assert 0 < counts.known_tokens < len(prompt) - 1


def test_an_answer_that_is_held_to_a_grammar_is_the_same(tokenizer: Any) -> None:
    model = simple("llama")

    def answer(speculation: Any) -> Run:
        run = Run(model, tokenizer, speculation)
        run.submit("r", PROMPT, matcher=Even(), max_tokens=16)
        run.finish()
        return run

    drafted, plain = answer(spec(model, right_head(model))), answer(None)
    assert drafted.said("r") == plain.said("r")
    assert all(token % 2 == 0 for token in plain.tokens["r"][len(PROMPT) :])


def test_a_head_begins_with_the_end_of_a_prompt_and_its_rows_stay_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPEC_HIDDEN_ROWS", 40)
    monkeypatch.setattr(mtp_source, "ROWS", 48)
    model = simple("llama")
    plain = Run(model, tokenizer)
    long = [(5 * i + 1) % 200 for i in range(150)]
    plain.submit("r", long, max_tokens=60)
    plain.finish()
    worker = WorkerHead.measured(right_head(model))
    fed: list[list[int]] = []
    due = MtpSource._due

    def spied(source: MtpSource, newest: int) -> Any:
        places, states = due(source, newest)
        fed.append(places)
        assert source._rows + len(places) <= 48
        return places, states

    monkeypatch.setattr(MtpSource, "_due", spied)
    run = Run(model, tokenizer, speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker))
    run.submit("r", long, max_tokens=60, speculate=ALONE)
    run.finish()
    assert run.said("r") == plain.said("r")
    # The prompt's last token is left to decoding; the rows of the 40 before it are read in chunks of 64.
    assert fed[0] == list(range(len(long) - 1 - 40, len(long) - 1))
    again = [places for places in fed[1:] if len(places) > 20]
    assert again
    assert all(places == list(range(places[0], places[-1] + 1)) for places in again)
    report = run.finished("r").speculation
    assert report is not None
    assert report.accepted == report.drafted


def test_a_head_that_is_hardly_ever_right_is_switched_off_and_says_so(tokenizer: Any) -> None:
    model = simple("llama")
    # What is right and one more is wrong every time; a random guess would be right now and then.
    worker = WorkerHead.measured(lying_head(model))
    run = Run(model, tokenizer, speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker))
    for i in range(4):
        run.submit(f"r{i}", PROMPT, max_tokens=30, speculate=ALONE)
        run.finish()
    assert worker.judged >= hidden_source.JUDGED
    assert worker.off.startswith("off: 0 of its ")
    assert run.scheduler._figures().draft_head == worker.off
    assert worker.source() is None


NAMES: dict[str, Callable[[str], str]] = {
    "qwen": lambda name: f"mtp.{name}",
    "deepseek": lambda name: (
        "model.layers.4." + _renamed(name, "eh_proj", "enorm", "hnorm", "shared_head.norm")
    ),
    "mimo": lambda name: (
        "model.mtp_layers.0."
        + _renamed(name, "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    ),
    "nemotron": lambda name: f"mtp.{nemotrons_name(name)}",
}


def _renamed(name: str, *publishers: str) -> str:
    own = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    for ours, theirs in zip(own, publishers, strict=True):
        if name.rpartition(".")[0] == ours:
            return f"{theirs}.{name.rpartition('.')[2]}"
    return name.removeprefix("layers.0.")


def saved(folder: Path, file: str, head: MtpHead, names: str = "qwen", **more: mx.array) -> Path:
    tensors = {NAMES[names](name): array for name, array in tree_flatten(head.parameters())}
    if names == "mimo":
        first, second = mx.split(tensors["model.mtp_layers.0.input_proj.weight"], 2, axis=1)
        tensors["model.mtp_layers.0.input_proj.weight"] = mx.concatenate([second, first], axis=1)
    mx.save_safetensors(str(folder / file), {**tensors, **more}, metadata={"format": "mlx"})
    return folder


@pytest.mark.parametrize(
    ("family", "names", "file"),
    [
        ("llama", "qwen", "mtp.safetensors"),
        ("qwen3_next", "qwen", "model.safetensors"),
        ("qwen3_5_moe", "qwen", "mtp.safetensors"),
        ("deepseek_v3", "deepseek", "model.safetensors"),
        ("deepseek_v32", "deepseek", "model.safetensors"),
        ("glm4_moe", "deepseek", "model-00002-of-00002.safetensors"),
        ("glm_moe_dsa", "deepseek", "model.safetensors"),
        ("qwen2", "mimo", "model.safetensors"),
        ("nemotron_3", "nemotron", "model-00014-of-00014.safetensors"),
        ("nemotron_3", "nemotron", "mtp.safetensors"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_head_is_found_by_its_publishers_names(
    family: str, names: str, file: str, tmp_path: Path, *, packed: bool
) -> None:
    model = tiny_architectures.tiny(family)
    head = random_head(model)
    if packed:
        nn.quantize(head, 32, 8, class_predicate=lambda name, layer: name != "fc" and _can_be_packed(layer))
    found = read_head(saved(tmp_path, file, head, names), model)
    assert found is not None
    assert found.feeds_normed == (names != "deepseek")
    ours, theirs = dict(tree_flatten(head.parameters())), dict(tree_flatten(found.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_head_of_several_layers_is_read_as_its_publisher_has_it(tmp_path: Path) -> None:
    """With experts one by one, and beside a convolution as mlx-lm has none; it computes the formula."""
    model = tiny_architectures.tiny("nemotron_3")
    head = random_head(model)
    drawn = [
        (name, mx.random.normal(array.shape, key=mx.random.key(at)) * 0.1 + (array.ndim == 1))
        for at, (name, array) in enumerate(tree_flatten(head.parameters()))
    ]
    head.load_weights(drawn)
    tensors = {f"mtp.{nemotrons_name(name)}": array for name, array in drawn}
    for theirs, ours in (("up_proj", "fc1"), ("down_proj", "fc2")):
        for number, expert in enumerate(tensors.pop(f"mtp.layers.1.mixer.switch_mlp.{ours}.weight")):
            tensors[f"mtp.layers.1.mixer.experts.{number}.{theirs}.weight"] = expert
    tensors["backbone.layers.0.mixer.conv1d.weight"] = mx.zeros((8, 1, 4))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, metadata={"format": "mlx"})
    found = read_head(tmp_path, model)
    assert found is not None
    tokens = mx.array([[3, 4, 5, 6, 7]])
    hidden = mx.random.normal((1, 5, found.width), key=mx.random.key(99))
    normed = functools.partial(_normed, model.args.layer_norm_epsilon, tensors)
    embedded = model.backbone.embeddings(tokens)
    both = mx.concatenate([normed("0.enorm", embedded), normed("0.hnorm", hidden)], -1)
    state = both @ tensors["mtp.layers.0.eh_proj.weight"].T
    attention, experts = found.layers
    state = state + attention.mixer(normed("0.norm", state), mask="causal")
    state = state + experts.mixer(normed("1.norm", state))
    given, expected = found(tokens, hidden), normed("1.final_layernorm", state)
    assert mx.allclose(found.fed_back(given), expected, atol=1e-5)
    assert mx.allclose(found.logits(given), expected @ model.lm_head.weight.T, atol=1e-5)


def _normed(eps: float, tensors: dict[str, mx.array], name: str, x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[f"mtp.layers.{name}.weight"]


@pytest.mark.parametrize("pattern", ["M*E", "*-", "E"])
def test_layers_that_a_head_cannot_have_are_refused(pattern: str, tmp_path: Path) -> None:
    """A running state cannot be taken back guess by guess; and the model has no layer of a plain MLP."""
    model = tiny_architectures.tiny("nemotron_3")
    other = tiny_architectures.tiny("nemotron_3", hybrid_override_pattern=[*"ME*-"])
    head = tree_flatten(random_head(other).parameters())
    tensors = {f"mtp.{nemotrons_name(name)}": array for name, array in head if not name.startswith("layers.")}
    for number, kind in enumerate(pattern):
        layer = other.layers["ME*-".index(kind)]
        tensors |= {f"mtp.layers.{number}.{n}": a for n, a in tree_flatten(layer.parameters())}
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), tensors, metadata={"format": "mlx"})
    why = {"M*E": "something else than a row", "*-": "not of kinds that the model has", "E": "None of its"}
    with pytest.raises(ModelUnsupported, match=why[pattern]):
        read_head(tmp_path, model)


def _can_be_packed(layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def test_norms_that_a_publisher_writes_less_by_one_are_read_as_the_model_s_own(tmp_path: Path) -> None:
    model = tiny_architectures.tiny("qwen3_5")
    head = MtpHead(model)
    raw = mx.zeros((8, 1, 4))  # as a publisher has it: mlx-lm's own has the last two changed over
    found = read_head(
        saved(tmp_path, "model.safetensors", head, **{"model.layers.0.linear_attn.conv1d.weight": raw}), model
    )
    assert found is not None
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        assert mx.array_equal(found[name].weight, head[name].weight + 1.0)
    assert mx.array_equal(found.fc.weight, head.fc.weight)


def test_a_folder_without_a_head_has_none(tmp_path: Path) -> None:
    folder = tiny_architectures.write(tmp_path / "m", "llama")
    assert read_head(folder, tiny_architectures.tiny("llama")) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [({"hidden_size": 64}, "Expected shape"), ({"num_key_value_heads": 4}, "Expected shape")],
)
def test_a_head_of_another_model_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    other = MtpHead(tiny_architectures.tiny("llama", **change))
    with pytest.raises(ModelUnsupported, match=why):
        read_head(saved(tmp_path, "mtp.safetensors", other), tiny_architectures.tiny("llama"))


@pytest.mark.parametrize("ids", [[3, VOCAB], [-1, 4], []])
def test_draft_tokens_that_the_model_does_not_have_are_refused(ids: list[int], tmp_path: Path) -> None:
    model = tiny_architectures.tiny("llama")
    more = {"mtp.draft_tokens": mx.array(ids, dtype=mx.int32)}
    with pytest.raises(ModelUnsupported, match="draft_tokens"):
        read_head(saved(tmp_path, "mtp.safetensors", MtpHead(model), **more), model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [0, 8])
def test_a_head_guesses_among_its_draft_tokens_alone(tmp_path: Path, bits: int, *, tied: bool) -> None:
    model = tiny_architectures.tiny("llama", tie_word_embeddings=tied)
    if bits:
        nn.quantize(model, 32, bits)
    ids = [200, 7, 30, 31, 32]
    more = {"mtp.draft_tokens": mx.array(ids, dtype=mx.int32)}
    whole = MtpHead(model)
    head = read_head(saved(tmp_path, "mtp.safetensors", whole, **more), model)
    assert head is not None
    given = mx.random.normal((1, 20, head.width), key=mx.random.key(1))
    expected = [ids[at] for at in mx.argmax(whole.logits(given)[0][:, mx.array(ids)], axis=-1).tolist()]
    assert head.likeliest(given)[0].tolist() == expected
    assert len(set(expected)) > 1


@pytest.fixture
def folder(chain_path: Path, tmp_path: Path) -> Path:
    """A model's folder of its own."""
    return Path(shutil.copytree(chain_path, tmp_path / "m"))


def loaded(folder: Path, **changes: Any) -> loading.Loaded:
    settings = WorkerSettings("m", str(folder), device="cpu", **changes)
    return loading.load(settings, "cpu", lambda _: None)


@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
def test_a_load_finds_the_head_and_counts_its_bytes_once(folder: Path, arithmetic: Any) -> None:
    before = loaded(folder, cpu_arithmetic=arithmetic)
    assert (before.head, before.facts.draft_head) == (None, "")
    model, _ = load_model(folder)
    saved(folder, "mtp.safetensors", MtpHead(model))
    found = loaded(folder, cpu_arithmetic=arithmetic)
    assert found.head is not None
    assert found.facts.draft_head.startswith("mtp: ")
    own = found.facts.shape.weights_bytes - before.facts.shape.weights_bytes
    assert own == weights_bytes(found.head.head) > 0
    assert loaded(folder, speculation="off").facts.draft_head == ""


@pytest.mark.parametrize("drafts", [True, False])
def test_a_head_of_a_quantised_model_is_held_in_int8(*, drafts: bool) -> None:
    """A model's own weights that its publisher left plain are not."""
    model = tiny_architectures.tiny("llama")
    nn.quantize(model, 32, 4)
    held, head = HeldWeights("cpu", "int8", packed=True, on_disk=0, expected=0), MtpHead(model)
    expected = held.bytes_of(head, tied=False, drafts=drafts)
    held.hold(head, drafts=drafts)
    assert isinstance(head.fc, PackedLinear) is drafts
    assert weights_bytes(head) == expected


def test_a_head_that_does_not_fit_is_named_and_the_model_loads(folder: Path) -> None:
    saved(folder, "mtp.safetensors", MtpHead(tiny_architectures.tiny("llama")))
    found = loaded(folder)
    assert found.head is None
    assert found.facts.draft_head.startswith("off: Its tensors are not those of a head of this model")


def test_a_damaged_sidecar_is_damage_of_the_model(folder: Path) -> None:
    (folder / "mtp.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(ModelCorrupt, match=r"mtp\.safetensors"):
        loaded(folder)


# ---- heads in folders of their own, and what heads say of their model ------------------------------------


def lone(folder: Path, head: MtpHead, prefix: str = "", **config: Any) -> Path:
    """A head as it is published by itself: with the config of the text model that it was taken from."""
    folder.mkdir()
    text = {"hidden_size": head.width, "num_hidden_layers": 4, "vocab_size": VOCAB, **config}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp", "text_config": text}))
    tensors = {f"{prefix}{name}": array for name, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("prefix", ["", "mtp."])
@pytest.mark.parametrize("less_by_one", [False, True])
def test_a_head_in_a_folder_of_its_own_is_read(
    family: str, prefix: str, tmp_path: Path, *, less_by_one: bool
) -> None:
    model = tiny_architectures.tiny(family)
    head, written = MtpHead(model), MtpHead(model)
    written.load_weights(tree_flatten(head.parameters()))
    # Only families whose norms mlx-lm shifts are published with such that are less by one.
    if less_by_one and family == "qwen3_5":
        norms = [(n, a - 1) for n, a in tree_flatten(head.parameters()) if a.ndim == 1 and "norm" in n]
        written.load_weights(norms, strict=False)
    found = read_drafter(lone(tmp_path / "head", written, prefix), model)
    assert isinstance(found, MtpHead)
    ours, theirs = dict(tree_flatten(head.parameters())), dict(tree_flatten(found.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("prefix", ["", "mtp."])
def test_nemotrons_head_in_a_folder_of_its_own_is_read(
    prefix: str, tmp_path: Path, *, numbered: bool
) -> None:
    """Some who took it out of its publisher's files left numbers before what is no layer, others did not."""
    model = tiny_architectures.tiny("nemotron_3")
    head = random_head(model)
    folder = lone(tmp_path / "head", head)
    tensors = {nemotrons_name(name): array for name, array in tree_flatten(head.parameters())}
    if not numbered:
        outside = re.compile(r"layers\.\d\.(?=eh_proj|enorm|hnorm|final)")
        tensors = {outside.sub("", name): array for name, array in tensors.items()}
    written = {f"{prefix}{name}": array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), written, metadata={"format": "mlx"})
    found = read_drafter(folder, model)
    assert isinstance(found, MtpHead)
    ours, theirs = dict(tree_flatten(head.parameters())), dict(tree_flatten(found.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_head_that_names_another_shape_is_refused(name: str, tmp_path: Path) -> None:
    model = tiny_architectures.tiny("llama")
    folder = lone(tmp_path / "head", MtpHead(model), **{name: 7})
    with pytest.raises(ModelUnsupported, match=f"made for a model with {name} 7"):
        read_drafter(folder, model)


def test_a_head_in_a_folder_of_its_own_drafts_if_the_settings_name_it(folder: Path, tmp_path: Path) -> None:
    model, _ = load_model(folder)
    right = right_head(model)
    drafter = lone(tmp_path / "head", right, num_hidden_layers=2, vocab_size=chain_model.HIDDEN)
    found = loaded(folder, drafter=str(drafter))
    assert found.facts.draft_head.startswith("mtp: ")
    with pytest.raises(ModelUnsupported, match="drafts for another model"):
        loaded(drafter)


@pytest.mark.parametrize("made_for", ["these", "others", ""])
def test_a_head_that_says_it_was_made_for_other_weights_is_not_used(folder: Path, made_for: str) -> None:
    """Of the same shape; heads that say nothing are judged by their drafts."""
    record = folder.parent / "record.json"
    own = digests.digest(read_folder(folder, name="m", source="folder", revision=None), record).weights
    target = {"these": own, "others": "0" * 64, "": ""}[made_for]
    model, _ = load_model(folder)
    head = MtpHead(model)
    tensors = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    notes = {"format": "mlx"} | ({TARGET: target} if target else {})
    mx.save_safetensors(str(folder / "mtp.safetensors"), tensors, metadata=notes)
    found = loaded(folder, record=str(record))
    if made_for == "others":
        assert found.head is None
        assert "off: mtp.safetensors was made for weights with the digest 0000" in found.facts.draft_head
    else:
        assert found.facts.draft_head.startswith("mtp: ")
