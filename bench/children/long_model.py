"""``long_model FOLDER TOKENIZER_FOLDER [LAYERS]``: write a small model with random weights for 32,768 tokens.

Small enough that a session of an agent takes seconds, deep enough that computing its beginning takes some.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.children import random_weights
from bench.harness.child import serve

CONTEXT_TOKENS = 32_768
_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write(folder: Path, tokenizer: Path, layers: int = 12) -> None:
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.set_default_device(mx.cpu)
    config = _SHAPE | {"num_hidden_layers": layers} | random_weights.of_tokenizer(tokenizer)
    random_weights.save(llama.Model(llama.ModelArgs.from_dict(config)), config, folder, tokenizer)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
    serve(lambda question: {"context_tokens": CONTEXT_TOKENS})
