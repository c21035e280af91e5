"""A GGUF file of a well-known shape with random weights in 4 bits, behind the default model's tokenizer.

fleetd imports the same file that llama.cpp reads, so both compute with the same weights. What they say means
nothing.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from bench.harness.card_models import SHAPES
from bench.harness.gguf_file import gguf as default_model

Bytes = npt.NDArray[np.uint8]
_BLOCK = 32
# Weights of a block are between -8 and 7 of these; as large as those of a trained model.
_SCALE = np.float16(0.004)
_CONTEXT_TOKENS = 8192


def write(path: Path, shape: str) -> None:
    """``shape``: one of Qwen3's dense ones in ``card_models.SHAPES``."""
    config, dice = SHAPES[shape].config, np.random.default_rng(11)
    wide, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(_CONTEXT_TOKENS)
    writer.add_embedding_length(wide)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    vocabulary = _add_tokenizer(writer)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = rows * columns // _BLOCK
        data = np.empty((blocks, 2 + _BLOCK // 2), dtype=np.uint8)
        data[:, :2] = np.frombuffer(_SCALE.tobytes(), dtype=np.uint8)
        data[:, 2:] = dice.integers(0, 256, (blocks, _BLOCK // 2), dtype=np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=Kind.Q4_0)

    def ones(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("token_embd.weight", vocabulary, wide)
    for layer in range(config["num_hidden_layers"]):
        at = f"blk.{layer}"
        for name, width in (
            ("attn_norm", wide),
            ("attn_q_norm", head),
            ("attn_k_norm", head),
            ("ffn_norm", wide),
        ):
            ones(f"{at}.{name}.weight", width)
        matrix(f"{at}.attn_q.weight", heads * head, wide)
        matrix(f"{at}.attn_k.weight", key_heads * head, wide)
        matrix(f"{at}.attn_v.weight", key_heads * head, wide)
        matrix(f"{at}.attn_output.weight", wide, heads * head)
        matrix(f"{at}.ffn_gate.weight", inner, wide)
        matrix(f"{at}.ffn_up.weight", inner, wide)
        matrix(f"{at}.ffn_down.weight", wide, inner)
    ones("output_norm.weight", wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> int:
    """The default model's; returns how many tokens it has."""
    fields = gguf.GGUFReader(default_model()).fields
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    return len(fields["tokenizer.ggml.tokens"].contents())
