"""A tiny real model that reads images: Gemma 3 in every respect, with random weights.

Its window is shorter than an image. ``write`` makes its folder; its tensors have the names of the makers'
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from seeing_model import write_folder

SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
SPECIAL += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
WIDTH, LAYERS, PATCH, SIZE, ROWS = 32, 2, 4, 48, 16
TEXT_WIDTH, TEXT_LAYERS, WINDOW = 64, 4, 12

# As Gemma's own, without roles.
TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}{{ '<start_of_turn>model\\n' }}"
)


def config(vocab: int) -> dict[str, Any]:
    """Of a model whose tokenizer has so many tokens."""
    first = vocab - len(SPECIAL)
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": first + SPECIAL.index("<start_of_image>"),
        "eoi_token_index": first + SPECIAL.index("<end_of_image>"),
        "image_token_index": first + SPECIAL.index("<image_soft_token>"),
        "mm_tokens_per_image": ROWS,
        "eos_token_id": [first + 1, first + SPECIAL.index("<end_of_turn>")],
        "torch_dtype": "float32",
        "vocab_size": vocab,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": TEXT_WIDTH,
            "num_hidden_layers": TEXT_LAYERS,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "rms_norm_eps": 1e-6,
            "vocab_size": vocab,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    }


def vision_weights() -> dict[str, np.ndarray[Any, Any]]:
    """Of the image encoder and what follows it."""
    rng = np.random.default_rng(7)

    def drawn(*shape: int, near: float = 0.0) -> np.ndarray[Any, Any]:
        return (near + 0.2 * rng.standard_normal(shape)).astype(np.float32)

    tower = "vision_tower.vision_model."
    found = {
        f"{tower}embeddings.patch_embedding.weight": drawn(WIDTH, 3, PATCH, PATCH),
        f"{tower}embeddings.patch_embedding.bias": drawn(WIDTH),
        f"{tower}embeddings.position_embedding.weight": drawn((SIZE // PATCH) ** 2, WIDTH),
        f"{tower}post_layernorm.weight": drawn(WIDTH, near=1),
        f"{tower}post_layernorm.bias": drawn(WIDTH),
        "multi_modal_projector.mm_input_projection_weight": drawn(WIDTH, TEXT_WIDTH),
        "multi_modal_projector.mm_soft_emb_norm.weight": drawn(WIDTH),
    }
    for layer in range(LAYERS):
        own = f"{tower}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{own}self_attn.{name}.weight"] = drawn(WIDTH, WIDTH)
            found[f"{own}self_attn.{name}.bias"] = drawn(WIDTH)
        for name, shape in (("fc1", (48, WIDTH)), ("fc2", (WIDTH, 48))):
            found[f"{own}mlp.{name}.weight"] = drawn(*shape)
            found[f"{own}mlp.{name}.bias"] = drawn(shape[0])
        for name in ("layer_norm1", "layer_norm2"):
            found[f"{own}{name}.weight"] = drawn(WIDTH, near=1)
            found[f"{own}{name}.bias"] = drawn(WIDTH)
    return found


def text_weights(vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    """Of the text model, whose table of embeddings is its head."""
    rng = np.random.default_rng(11)

    def drawn(*shape: int, near: float = 0.0, by: float = 0.25) -> np.ndarray[Any, Any]:
        return (near + by * rng.standard_normal(shape)).astype(np.float32)

    own = "language_model.model."
    found = {
        # Small: else the last token's own embedding decides the next one.
        f"{own}embed_tokens.weight": drawn(vocab, TEXT_WIDTH, by=0.04),
        f"{own}norm.weight": drawn(TEXT_WIDTH, near=4),
    }
    for layer in range(TEXT_LAYERS):
        here = f"{own}layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (64, TEXT_WIDTH),
            "self_attn.k_proj": (32, TEXT_WIDTH),
            "self_attn.v_proj": (32, TEXT_WIDTH),
            "self_attn.o_proj": (TEXT_WIDTH, 64),
            "mlp.gate_proj": (128, TEXT_WIDTH),
            "mlp.up_proj": (128, TEXT_WIDTH),
            "mlp.down_proj": (TEXT_WIDTH, 128),
        }.items():
            found[f"{here}{name}.weight"] = drawn(*shape)
        for name in ("q_norm", "k_norm"):
            found[f"{here}self_attn.{name}.weight"] = drawn(16)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            found[f"{here}{name}.weight"] = drawn(TEXT_WIDTH)
    return found


def write(folder: Path, *, vision: bool = True) -> Path:
    """The model in ``folder``; without ``vision`` as converters for text alone leave it."""
    return write_folder(
        folder,
        SPECIAL,
        {
            "eos_token": "<eos>",
            "chat_template": TEMPLATE,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        config,
        {
            "size": {"height": SIZE, "width": SIZE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "resample": 2,
        },
        lambda vocab: text_weights(vocab) | (vision_weights() if vision else {}),
    )
