"""A llama of random weights behind SmolLM2's tokenizer. What it says means nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.daemon import MODEL


def build(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write a model folder. ``sizes``: as in its config; a head has 64 dimensions."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for path in MODEL.iterdir():
        if path.name.startswith(("token", "special", "vocab", "merges", "chat_template", "added")):
            shutil.copyfile(path, folder / path.name)
    known = json.loads((MODEL / "config.json").read_text())
    known.pop("quantization", None)
    known.pop("quantization_config", None)
    config = known | dict(sizes) | {"tie_word_embeddings": True, "torch_dtype": "float16", "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(1)
    wide, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    small = config["num_key_value_heads"] * config["head_dim"]

    def random(*shape: int) -> np.ndarray[Any, Any]:
        return (draw.standard_normal(shape, np.float32) * 0.02).astype(np.float16)

    ones = np.ones(wide, np.float16)
    weights = {"model.embed_tokens.weight": random(config["vocab_size"], wide), "model.norm.weight": ones}
    # All layers have the same ones: to draw them takes longer than to load them.
    layer = {
        "self_attn.q_proj": random(wide, wide),
        "self_attn.k_proj": random(small, wide),
        "self_attn.v_proj": random(small, wide),
        "self_attn.o_proj": random(wide, wide),
        "mlp.gate_proj": random(inner, wide),
        "mlp.up_proj": random(inner, wide),
        "mlp.down_proj": random(wide, inner),
        "input_layernorm": ones,
        "post_attention_layernorm": ones,
    }
    for n in range(layers):
        weights |= {f"model.layers.{n}.{name}.weight": array for name, array in layer.items()}
    save_file(weights, folder / "model.safetensors")
