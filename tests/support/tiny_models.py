"""Small random models with the shapes of real ones, for tests that compare bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, llama, qwen3

VOCAB = 512


def smollm2() -> Any:
    """SmolLM2-135M's layer: 9 query heads on 3 key heads of 64."""
    return _random(
        llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=576,
                num_hidden_layers=2,
                intermediate_size=1536,
                num_attention_heads=9,
                num_key_value_heads=3,
                rms_norm_eps=1e-5,
                vocab_size=VOCAB,
                rope_theta=100000.0,
                tie_word_embeddings=True,
            )
        )
    )


def qwen3_06b() -> Any:
    """Qwen3-0.6B's layer: 16 query heads on 8 key heads of 128."""
    return _random(
        qwen3.Model(
            qwen3.ModelArgs(
                model_type="qwen3",
                hidden_size=1024,
                num_hidden_layers=1,
                intermediate_size=3072,
                num_attention_heads=16,
                rms_norm_eps=1e-6,
                vocab_size=VOCAB,
                num_key_value_heads=8,
                max_position_embeddings=4096,
                rope_theta=1000000.0,
                head_dim=128,
                tie_word_embeddings=True,
            )
        )
    )


def sliding(window: int = 32) -> Any:
    """Gemma 3's pattern: a layer that sees everything after one with a window; its cache rotates."""
    return _random(
        gemma3_text.Model(
            gemma3_text.ModelArgs(
                model_type="gemma3_text",
                hidden_size=128,
                num_hidden_layers=2,
                intermediate_size=256,
                num_attention_heads=4,
                head_dim=32,
                vocab_size=VOCAB,
                num_key_value_heads=2,
                sliding_window=window,
                sliding_window_pattern=2,
                query_pre_attn_scalar=32,
            )
        )
    )


def prompt(n: int, seed: int = 3) -> list[int]:
    tokens: list[int] = mx.random.randint(0, VOCAB, (n,), key=mx.random.key(seed)).tolist()
    return tokens


def _random(model: nn.Module) -> nn.Module:
    keys = iter(mx.random.split(mx.random.key(11), 200))

    def draw(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return noise * 0.05 if array.ndim > 1 else 1.0 + noise * 0.1

    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    return model
