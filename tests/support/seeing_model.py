"""A tiny real model that reads images: Mistral 3 in every respect, with random weights.

``write`` makes its folder; its tensors have the names that transformers gives them. ``picture`` makes files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from chain_model import byte_alphabet
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
WIDTH, LAYERS, TEXT_WIDTH, PATCH, SIDE = 32, 2, 64, 4, 2
LONGEST = 48

# As Mistral's own: parts of a content one after the other.
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST]' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '[IMG]' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
)


def picture(seed: int, height: int = 40, width: int = 24, form: str = "PNG", **options: Any) -> bytes:
    """An image's file. ``options``: Pillow's for the form."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def config(vocab: int) -> dict[str, Any]:
    """Of a model whose tokenizer has so many tokens."""
    return {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": vocab - len(SPECIAL) + SPECIAL.index("[IMG]"),
        "spatial_merge_size": SIDE,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "eos_token_id": vocab - len(SPECIAL) + 1,
        "torch_dtype": "float32",
        "text_config": {
            "model_type": "mistral",
            "hidden_size": TEXT_WIDTH,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "vocab_size": vocab,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "head_dim": WIDTH // 2,
            "num_channels": 3,
            "image_size": LONGEST,
            "patch_size": PATCH,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
        },
    }


def vision_weights() -> dict[str, np.ndarray[Any, Any]]:
    """Of the image encoder and what follows it."""
    rng = np.random.default_rng(5)

    def drawn(*shape: int, near: float = 0.0) -> np.ndarray[Any, Any]:
        return (near + 0.2 * rng.standard_normal(shape)).astype(np.float32)

    found = {
        "vision_tower.patch_conv.weight": drawn(WIDTH, 3, PATCH, PATCH),
        "vision_tower.ln_pre.weight": drawn(WIDTH, near=1),
        "multi_modal_projector.norm.weight": drawn(WIDTH, near=1),
        "multi_modal_projector.patch_merger.merging_layer.weight": drawn(WIDTH, WIDTH * SIDE * SIDE),
        "multi_modal_projector.linear_1.weight": drawn(TEXT_WIDTH, WIDTH),
        "multi_modal_projector.linear_2.weight": drawn(TEXT_WIDTH, TEXT_WIDTH),
    }
    for layer in range(LAYERS):
        own = f"vision_tower.transformer.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{own}attention.{name}.weight"] = drawn(WIDTH, WIDTH)
        found[f"{own}feed_forward.gate_proj.weight"] = drawn(48, WIDTH)
        found[f"{own}feed_forward.up_proj.weight"] = drawn(48, WIDTH)
        found[f"{own}feed_forward.down_proj.weight"] = drawn(WIDTH, 48)
        found[f"{own}attention_norm.weight"] = drawn(WIDTH, near=1)
        found[f"{own}ffn_norm.weight"] = drawn(WIDTH, near=1)
    return found


def text_weights(vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    """Of the text model."""
    rng = np.random.default_rng(6)

    def drawn(*shape: int, near: float = 0.0) -> np.ndarray[Any, Any]:
        return (near + 0.25 * rng.standard_normal(shape)).astype(np.float32)

    own = "language_model."
    found = {
        f"{own}model.embed_tokens.weight": drawn(vocab, TEXT_WIDTH),
        f"{own}model.norm.weight": drawn(TEXT_WIDTH, near=1),
        f"{own}lm_head.weight": drawn(vocab, TEXT_WIDTH),
    }
    for layer in range(2):
        here = f"{own}model.layers.{layer}."
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
        found[f"{here}input_layernorm.weight"] = drawn(TEXT_WIDTH, near=1)
        found[f"{here}post_attention_layernorm.weight"] = drawn(TEXT_WIDTH, near=1)
    return found


def write(folder: Path, *, vision: bool = True) -> Path:
    """The model in ``folder``; without ``vision`` as converters for text alone leave it."""
    return write_folder(
        folder,
        SPECIAL,
        {"eos_token": "</s>", "chat_template": TEMPLATE},
        config,
        {"size": {"longest_edge": LONGEST}, "patch_size": PATCH},
        lambda vocab: text_weights(vocab) | (vision_weights() if vision else {}),
    )


def write_folder(
    folder: Path,
    special: list[str],
    tokenizer_config: dict[str, Any],
    config_of: Callable[[int], dict[str, Any]],
    preprocessor: dict[str, Any],
    weights_of: Callable[[int], dict[str, np.ndarray[Any, Any]]],
) -> Path:
    """A model of bytes and ``special`` tokens in ``folder``. What depends on their number is given it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    vocab = len(alphabet) + len(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config_of(vocab)))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    save_file(weights_of(vocab), folder / "model.safetensors")
    return folder
