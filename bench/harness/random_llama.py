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
    for n in range(layers):
        at = f"model.layers.{n}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": random(wide, wide),
            f"{at}.self_attn.k_proj.weight": random(small, wide),
            f"{at}.self_attn.v_proj.weight": random(small, wide),
            f"{at}.self_attn.o_proj.weight": random(wide, wide),
            f"{at}.mlp.gate_proj.weight": random(inner, wide),
            f"{at}.mlp.up_proj.weight": random(inner, wide),
            f"{at}.mlp.down_proj.weight": random(wide, inner),
            f"{at}.input_layernorm.weight": ones,
            f"{at}.post_attention_layernorm.weight": ones,
        }
    save_file(weights, folder / "model.safetensors")
