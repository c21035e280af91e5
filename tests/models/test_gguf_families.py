"""A small model of every family, written as llama.cpp's converter writes it and imported back."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import RopeScalingType
from gguf.constants import MODEL_ARCH_NAMES
from mlx_lm import utils as mlx_utils
from support import gguf_kinds
from support.gguf_models import CONFIGS, drawn, floats, logits, model_of, write

from fleetd import limits
from fleetd.engine.cpu import packed_layers, products
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.folder import read_folder
from fleetd.models.gguf.conversion import import_gguf, read_plan
from fleetd.models.gguf.families import FAMILIES
from fleetd.models.memory_need import WORKING_BYTES, WeightRules, needed_bytes
from fleetd.models.verify import verify

FAMILIES_HERE = sorted(CONFIGS)


def imported(source: Path) -> Path:
    folder = source.with_suffix("")
    folder.mkdir()
    import_gguf(source, folder)
    return folder


def loaded(folder: Path) -> Any:
    model, _ = mlx_utils.load_model(folder)
    model.set_dtype(mx.float32)
    return model


def test_every_family_has_a_small_model_here() -> None:
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize("arch", FAMILIES_HERE)
def test_the_imported_model_says_what_the_written_one_says(tmp_path: Path, arch: str) -> None:
    weights = drawn(arch)
    folder = imported(write(tmp_path / "model.gguf", arch, weights, floats))
    verify(folder)
    expected = logits(model_of(CONFIGS[arch], weights))
    # exp and log of a decay are not each other's inverse to the last bit; nothing else is computed twice.
    tolerance = 2e-5 if arch.startswith("qwen35") else 0
    np.testing.assert_allclose(logits(loaded(folder)), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("arch", FAMILIES_HERE)
def test_quantised_weights_find_the_same_places_as_plain_ones(tmp_path: Path, arch: str) -> None:
    """Rows, columns and experts of packed tensors are moved packed: the same model from the numbers that they
    stand for says the same."""
    weights = drawn(arch)

    def kind_of(name: str, values: np.ndarray[Any, Any]) -> str | None:
        if values.ndim < 2 or "ffn_gate_inp" in name or "conv1d" in name:
            return None
        if name.endswith("_exps.weight"):
            return "MXFP4" if arch == "gpt-oss" else "Q4_K"
        return {"attn_k": "Q5_0", "ssm_out": "Q6_K", "ffn_down": "Q6_K"}.get(name.split(".")[-2], "Q8_0")

    def packed(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        kind = kind_of(name, values)
        return floats(name, values) if kind is None else (Kind[kind], gguf_kinds.encoded(kind, values))

    def unpacked(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        kind = kind_of(name, values)
        if kind is None:
            return floats(name, values)
        return Kind.F32, gguf_kinds.decoded(kind, gguf_kinds.encoded(kind, values)).reshape(values.shape)

    packed_folder = imported(write(tmp_path / "packed.gguf", arch, weights, packed))
    plain_folder = imported(write(tmp_path / "plain.gguf", arch, weights, unpacked))
    config = json.loads((packed_folder / "config.json").read_text())
    assert "quantization" in config
    assert "quantization" not in json.loads((plain_folder / "config.json").read_text())
    expected, found = logits(loaded(plain_folder)), logits(loaded(packed_folder))
    # Logits have a deviation of 0.8. The grids are rounded to 16 bits, and Q6_K is fitted. At a token here
    # and there a mixture of experts may choose another expert for it.
    assert np.median(np.sqrt(np.mean((found - expected) ** 2, axis=-1))) < 0.02


def test_biases_of_the_llama_family_are_put_in_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "llama", CONFIGS["llama"] | {"attention_bias": True})
    weights = drawn("llama")
    expected = logits(model_of(CONFIGS["llama"], weights))
    folder = imported(write(tmp_path / "model.gguf", "llama", weights, floats))
    np.testing.assert_array_equal(logits(loaded(folder)), expected)
    del weights["model.layers.0.self_attn.o_proj.bias"]
    with pytest.raises(ModelUnsupported, match="in a part of its attention"):
        imported(write(tmp_path / "part.gguf", "llama", weights, floats))


def test_a_tied_head_is_written_where_mlx_lm_has_one_of_its_own(tmp_path: Path) -> None:
    weights = drawn("glm4")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    expected = logits(model_of(CONFIGS["glm4"], weights))
    del weights["lm_head.weight"]
    folder = imported(write(tmp_path / "tied.gguf", "glm4", weights, floats))
    np.testing.assert_array_equal(logits(loaded(folder)), expected)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    weights = drawn("qwen35")
    file = tmp_path / "model.gguf"
    write(file, "qwen35", weights, floats, add_nextn_predict_layers=1)
    folder = imported(file)
    assert json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"] == 1
    names = mx.load(str(folder / "model.safetensors"))
    assert not any(".layers.1." in name for name in names)


def test_a_family_that_is_not_known_says_what_to_take_instead(tmp_path: Path) -> None:
    """Those that people have files of in 2026."""
    file = write(tmp_path / "m.gguf", "qwen3", drawn("qwen3"), floats, add_name="Some Model 7B")
    raw = file.read_bytes()

    def named(arch: str) -> bytes:
        return b"general.architecture\x08\0\0\0" + len(arch).to_bytes(8, "little") + arch.encode()

    for arch in ("qwen3next", "gemma4", "glm4moe", "minimax-m2", "nemotron_h_moe", "lfm2", "mistral4"):
        assert arch in MODEL_ARCH_NAMES.values(), "gguf calls it otherwise now"
        file.write_bytes(raw.replace(named("qwen3"), named(arch)) + bytes(64))
        with pytest.raises(ModelUnsupported, match=f"architecture {arch!r}") as caught:
            import_gguf(file, tmp_path)
        assert "fleetctl models pull" in caught.value.hint
        assert "mlx-community/Some-Model-7B-4bit" in caught.value.hint


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("qwen3", {"add_type": "adapter"}, "an adapter for a model"),
        ("qwen3", {"add_type": "mmproj"}, "reads images"),
        ("qwen3moe", {"add_rope_scaling_type": RopeScalingType.YARN}, "scales RoPE by 'yarn'"),
        ("gemma3", {"add_final_logit_softcapping": 30.0}, "caps its logits"),
        ("glm4", {"add_rope_dimension_sections": [8, 12, 12, 0]}, "reads images"),
    ],
)
def test_variants_that_mlx_lm_would_compute_wrongly_are_refused(
    tmp_path: Path, arch: str, changes: dict[str, Any], words: str
) -> None:
    file = write(tmp_path / "m.gguf", arch, drawn(arch), floats, **changes)
    with pytest.raises(ModelUnsupported, match=words):
        imported(file)


@pytest.mark.parametrize(
    ("arch", "tensor", "shape"),
    [
        ("llama", "blk.0.attn_q.weight", (254, 256)),
        ("qwen35", "blk.0.attn_qkv.weight", (510, 256)),
        ("qwen35", "blk.0.ssm_out.weight", (256, 192)),
        ("qwen35", "blk.0.ssm_a", (5,)),
    ],
)
def test_shapes_that_heads_do_not_divide_are_corrupt(
    tmp_path: Path, arch: str, tensor: str, shape: tuple[int, ...]
) -> None:
    def changed(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        return floats(name, np.zeros(shape, np.float32) if name == tensor else values)

    with pytest.raises(ModelCorrupt, match="impossible"):
        imported(write(tmp_path / "m.gguf", arch, drawn(arch), changed))


def test_factors_for_more_frequencies_than_a_head_has_are_corrupt(tmp_path: Path) -> None:
    def longer(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        return floats(name, np.ones(1 << 13, np.float32) if name == "rope_factors_long.weight" else values)

    with pytest.raises(ModelCorrupt, match="rope_factors_long"):
        imported(write(tmp_path / "m.gguf", "phi3", drawn("phi3"), longer))


@pytest.mark.parametrize(
    "change",
    [
        {"add_expert_count": 1 << 30},
        {"add_expert_used_count": 5},
        {"add_expert_feed_forward_length": 0},
    ],
    ids=str,
)
def test_impossible_numbers_of_experts_are_corrupt(tmp_path: Path, change: dict[str, int]) -> None:
    file = write(tmp_path / "m.gguf", "qwen3moe", drawn("qwen3moe"), floats, **change)
    with pytest.raises(ModelCorrupt, match="expert"):
        imported(file)


@pytest.mark.parametrize("arch", ["llama", "gpt-oss", "qwen35moe"])
def test_headers_tell_what_an_imported_model_takes(tmp_path: Path, arch: str) -> None:
    """On the disk before it is imported; in memory afterwards, as packed or on a CPU as f32."""

    def packed(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        if values.ndim < 2 or "conv1d" in name:
            return floats(name, values)
        kind = "Q6_K" if "down" in name else "MXFP4" if "exps" in name else "Q4_K"
        return Kind[kind], gguf_kinds.encoded(kind, values)

    file = write(tmp_path / "model.gguf", arch, drawn(arch), packed)
    folder = imported(file)
    found = read_folder(folder, name="x", source="gguf", revision=None)
    # The file of the weights has a header too.
    assert 0 <= found.weights_bytes - read_plan(file).size_bytes < 16_384
    assert needed_bytes(found, WeightRules("metal")) - WORKING_BYTES == found.weights_bytes
    model, _ = mlx_utils.load_model(folder)
    # Experts stay packed on a CPU.
    assert needed_bytes(found, WeightRules("cpu")) - WORKING_BYTES == products.float32_bytes(model)
    packed = needed_bytes(found, WeightRules("cpu", available=True)) - WORKING_BYTES
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    assert packed == pytest.approx(packed_layers.int8_bytes(model, plain=False, tied=tied), rel=0.001)


def test_a_model_spread_over_several_files_is_one_model(tmp_path: Path) -> None:
    weights = drawn("qwen3")
    write(tmp_path / "model.gguf", "qwen3", weights, floats, tensors_per_file=9)
    files = sorted(tmp_path.glob("model-*.gguf"))
    assert len(files) > 2
    folder = tmp_path / "out"
    folder.mkdir()
    import_gguf(files[0], folder)
    expected = logits(model_of(CONFIGS["qwen3"], weights))
    np.testing.assert_array_equal(logits(loaded(folder)), expected)
    files[1].unlink()
    with pytest.raises(ModelCorrupt, match="00002-of"):
        import_gguf(files[0], folder)


def test_a_part_of_another_model_is_corrupt(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "qwen3", drawn("qwen3"), floats, tensors_per_file=9)
    files = sorted(tmp_path.glob("model-*.gguf"))
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(ModelCorrupt, match=r"is in two of its files|says that it has"):
        import_gguf(files[0], tmp_path)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F32"])
def test_memory_does_not_grow_with_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(limits, "GGUF_SLICE_WEIGHTS", 1 << 14)
    weights = drawn("llama")
    weights["model.embed_tokens.weight"] = np.zeros((4_000, 256), np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    def packed(name: str, values: np.ndarray[Any, Any]) -> tuple[Kind, np.ndarray[Any, Any]]:
        if kind == "F32" or values.ndim < 2:
            return floats(name, values)
        return Kind[kind], gguf_kinds.encoded(kind, values)

    file = write(tmp_path / "model.gguf", "llama", weights, packed)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        import_gguf(file, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Either of the two large tensors has a million weights, 4 MiB as f32.
    assert peak < 2 << 20
