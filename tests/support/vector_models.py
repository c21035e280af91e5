"""Small random readers of texts as folders of files, with the names that publishers give to tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB, WIDTH = 300, 64
_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "intermediate_size": 48, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
        "max_position_embeddings": 128, "pad_token_id": 0,
    },
    "xlm-roberta": {
        "model_type": "xlm-roberta", "intermediate_size": 48, "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        "max_position_embeddings": 130, "pad_token_id": 1,
    },
    "modernbert": {
        "model_type": "modernbert", "intermediate_size": 40, "norm_eps": 1e-5, "local_attention": 8,
        "global_attn_every_n_layers": 3, "local_rope_theta": 10_000.0, "global_rope_theta": 160_000.0,
        "max_position_embeddings": 128, "num_hidden_layers": 4,
    },
    "qwen3": {
        "model_type": "qwen3", "intermediate_size": 48, "rms_norm_eps": 1e-6, "num_key_value_heads": 2,
        "head_dim": 16, "rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    "gemma": {
        "model_type": "gemma3_text", "intermediate_size": 48, "rms_norm_eps": 1e-6, "num_key_value_heads": 1,
        "head_dim": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 16,
        "sliding_window": 8, "sliding_window_pattern": 3, "max_position_embeddings": 128,
        "num_hidden_layers": 3, "use_bidirectional_attention": True,
    },
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    shared = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB}
    return shared | CONFIGS[kind] | changes


def write(
    folder: Path, kind: str, *, head: str = "", recipe: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A model with random weights.

    Args:
        head: "" for none; "classifier" for a reranker that is a sequence classifier.
        recipe: contents of sentence-transformers' files, by their names.
    """
    folder.mkdir(parents=True)
    config = config_of(kind, **changes)
    if head:
        config["architectures"] = ["XForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(5)
    weights = {name: _random(draw, name, shape) for name, shape in _SHAPES[kind](config).items()}
    if head:
        weights = {f"{_PREFIX[kind]}{name}": array for name, array in weights.items()}
        weights |= {name: _random(draw, name, shape) for name, shape in _HEADS[kind].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    for name, content in (recipe or {}).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, tuple):
            mx.save_safetensors(
                str(file), {"linear.weight": _random(draw, "weight", content)}, {"format": "pt"}
            )
        else:
            file.write_text(json.dumps(content))
    return folder


def bare(kind: str, name: str) -> str:
    """A tensor's name without what a head puts before it."""
    return name.removeprefix(_PREFIX[kind])


def steps(*kinds: str) -> list[dict[str, Any]]:
    """The content of modules.json."""
    return [
        {
            "idx": index,
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]


def _random(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> mx.array:
    made = draw.normal(0, 0.3 if len(shape) == 2 else 0.1, shape)
    if len(shape) == 1 and name.endswith("weight"):
        made = made + 1
    return mx.array(made.astype(np.float32))


def _tokenizer() -> Tokenizer:
    """Bytes, and special tokens, of which two stand around each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*_SPECIAL[:3], *alphabet])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIAL)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return made


def _linear(name: str, width: int, out: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _bert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (VOCAB, width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
    } | _norm("embeddings.LayerNorm", width)  # fmt: skip
    for index in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{index}"
        for part in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ):
            shapes |= _linear(f"{at}.{part}", width, width)
        shapes |= _linear(f"{at}.intermediate.dense", width, inner) | _linear(
            f"{at}.output.dense", inner, width
        )
        shapes |= _norm(f"{at}.attention.output.LayerNorm", width) | _norm(f"{at}.output.LayerNorm", width)
    return shapes


def _modern_bert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.tok_embeddings.weight": (VOCAB, width),
        "embeddings.norm.weight": (width,),
        "final_norm.weight": (width,),
    }
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}"
        shapes |= {f"{at}.attn_norm.weight": (width,)} if index else {}
        shapes |= _linear(f"{at}.attn.Wqkv", width, 3 * width, bias=False)
        shapes |= _linear(f"{at}.attn.Wo", width, width, bias=False) | {f"{at}.mlp_norm.weight": (width,)}
        shapes |= _linear(f"{at}.mlp.Wi", width, 2 * inner, bias=False)
        shapes |= _linear(f"{at}.mlp.Wo", inner, width, bias=False)
    return shapes


def _decoder(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, width), "norm.weight": (width,)}
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}"
        shapes |= {f"{at}.{name}.weight": (width,) for name in norms}
        shapes |= {f"{at}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
        shapes |= _linear(f"{at}.self_attn.q_proj", width, queries, bias=False)
        shapes |= _linear(f"{at}.self_attn.k_proj", width, keys, bias=False)
        shapes |= _linear(f"{at}.self_attn.v_proj", width, keys, bias=False)
        shapes |= _linear(f"{at}.self_attn.o_proj", queries, width, bias=False)
        shapes |= _linear(f"{at}.mlp.gate_proj", width, inner, bias=False)
        shapes |= _linear(f"{at}.mlp.up_proj", width, inner, bias=False)
        shapes |= _linear(f"{at}.mlp.down_proj", inner, width, bias=False)
    return shapes


_SHAPES: dict[str, Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]] = {
    "bert": _bert, "xlm-roberta": _bert, "modernbert": _modern_bert, "qwen3": _decoder, "gemma": _decoder,
}  # fmt: skip
_PREFIX = {"bert": "bert.", "xlm-roberta": "roberta.", "modernbert": "model."}
_HEADS: dict[str, dict[str, tuple[int, ...]]] = {
    "bert": _linear("bert.pooler.dense", WIDTH, WIDTH) | _linear("classifier", WIDTH, 1),
    "xlm-roberta": _linear("classifier.dense", WIDTH, WIDTH) | _linear("classifier.out_proj", WIDTH, 1),
    "modernbert": _linear("head.dense", WIDTH, WIDTH, bias=False)
    | {"head.norm.weight": (WIDTH,)}
    | _linear("classifier", WIDTH, 1),
}
