"""What importing a quantisation kind costs: measured on a small model whose weights are known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm import utils as mlx_utils
from support import gguf_kinds
from support.gguf_models import CONFIGS, Array, Kind, drawn, floats, logits, model_of, write

from fleetd.models.gguf.conversion import import_gguf

#: Kinds in the order of the page.
KINDS = (
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "MXFP4"),
    *("IQ4_NL", "IQ4_XS", "Q3_K", "IQ3_S", "Q2_K"),
)
ARCH = "llama"


@dataclass(frozen=True, slots=True)
class KindError:
    """One kind in one model.

    Attributes:
        bits: bits per weight in the file.
        stored: how MLX holds it: bits, group and mode.
        growth: bytes of the imported weights over those of the file's.
        own: root mean square of what the kind's own rounding changes about logits.
        added: the same of what the import changes, beside gguf's dequantised weights.
    """

    kind: str
    bits: float
    stored: tuple[int, int, str]
    growth: float
    own: float
    added: float


def measure(kind: str, folder: Path, *, beside: str | None = None) -> KindError:
    """Write all matrices of a model in ``kind``, import the file and compare logits.

    Args:
        folder: empty, for the files.
        beside: the kind of the matrices but the head and the second of the MLP, as in files of mixed kinds.
    """
    weights = drawn(ARCH)
    rounded: dict[str, Array] = {}

    def kind_of(name: str) -> str:
        first = beside is None or name in ("output.weight", "blk.0.ffn_down.weight")
        return kind if first else str(beside)

    def encode(name: str, values: Array) -> tuple[Kind, Array]:
        if values.ndim < 2:
            return floats(name, values)
        raw = gguf_kinds.encoded(kind_of(name), values)
        rounded[name] = gguf_kinds.decoded(kind_of(name), raw)
        return Kind[kind_of(name)], raw

    file = write(folder / "kind.gguf", ARCH, weights, encode)
    plain = write(folder / "plain.gguf", ARCH, weights, lambda name, x: floats(name, rounded.get(name, x)))
    target = folder / "kind"
    target.mkdir()
    import_gguf(file, target)
    settings = json.loads((target / "config.json").read_text())["quantization"]
    head = settings.get("lm_head", settings)
    in_file = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
    exact = logits(model_of(CONFIGS[ARCH], weights))
    theirs = logits(model_of(CONFIGS[ARCH], _weights_of(plain, weights)))
    model, _ = mlx_utils.load_model(target)
    model.set_dtype(mx.float32)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    return KindError(
        kind=kind,
        bits=8 * size / block,
        stored=(head["bits"], head["group_size"], head.get("mode", "affine")),
        growth=(target / "model.safetensors").stat().st_size / in_file,
        own=_rms(theirs - exact),
        added=_rms(logits(model) - theirs),
    )


def _weights_of(plain: Path, names: dict[str, Array]) -> dict[str, Array]:
    """Of a file of floats, as gguf's reader has them, under mlx-lm's names."""
    config = CONFIGS[ARCH]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    read = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(plain).tensors}
    found: dict[str, Array] = {}
    for name, like in names.items():
        values: Any = read[str(table.get_name(name, (".weight", ".bias")))].reshape(like.shape)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                rows = values.reshape(config[heads], -1, 2, values.shape[-1])
                values = rows.swapaxes(1, 2).reshape(like.shape)
        found[name] = values
    return found


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
