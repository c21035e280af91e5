"""Write a model of Qwen 3.5's shape with random weights: ``hybrid_model FOLDER TOKENIZER_FOLDER``.

Three layers of four keep a running state, as there; it is deep enough to be shared and small enough for two
workers of this machine. What it says means nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.children import random_weights
from bench.harness.child import serve

LAYERS = 16
_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


def write(folder: Path, tokenizer: Path) -> None:
    import mlx.core as mx
    from mlx_lm.models import qwen3_5

    given = random_weights.of_tokenizer(tokenizer)
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": _TEXT | {"vocab_size": given["vocab_size"]},
        "eos_token_id": given["eos_token_id"],
        "torch_dtype": "float32",
    }
    mx.set_default_device(mx.cpu)
    random_weights.save(qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config)), config, folder, tokenizer)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
    serve(lambda question: {"layers": LAYERS})
