"""Models of well-known shapes with random weights, to measure an accelerator. What they say means nothing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import NotMeasured
from bench.harness.child import ROOT, Child
from bench.harness.daemon import MODEL

CONTEXT_TOKENS, VOCABULARY = 262_144, 151_936
# What models made here have of the default one.
TOKENIZER = ("config.json", "tokenizer.json", "tokenizer_config.json")
BITS = {"bf16": 0, "4bit": 4}
# Of an H100: bytes a second that its memory gives, and operations with bfloat16.
CARD_BYTES_S, CARD_OPS_S = 3.0e12, 790e12
# What makes a model small enough to try a measurement on a CPU. Widths keep their order: a model that scores
# has to cost less than one that answers.
_SMALL_WIDTH, _WIDTHS = 8, 64
_SMALL = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """``module``: of ``mlx_lm.models``; ``config``: what its ``ModelArgs`` reads."""

    module: str
    config: Mapping[str, Any]

    def small(self) -> Shape:
        width = max(2 * _WIDTHS, self.config["hidden_size"] // _SMALL_WIDTH // _WIDTHS * _WIDTHS)
        small = _SMALL | {"hidden_size": width}
        return Shape(self.module, {k: small.get(k, v) for k, v in self.config.items()})


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool, **more: Any) -> Shape:
    config = {
        "model_type": "qwen3_moe" if more else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if more else 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
    }
    return Shape(str(config["model_type"]), config | more)


def _gemma3(hidden: int, inner: int, layers: int, heads: int, held: int, *, window: int) -> Shape:
    return Shape(
        "gemma3_text",
        {
            "model_type": "gemma3_text",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": held,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": window,
            "sliding_window_pattern": 6,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
        },
    )


def _qwen3_5(hidden: int, inner: int, layers: int, heads: int, held: int, *, linear_values: int) -> Shape:
    return Shape(
        "qwen3_5",
        {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": held,
            "head_dim": 256,
            "linear_num_value_heads": linear_values,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    )


SHAPES = {
    "dense-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "dense-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "dense-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "dense-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "moe-30b-a3b": _qwen3(
        *(2048, 6144, 48, 32),
        tied=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "sliding-1b": _gemma3(1152, 6912, 26, 4, 1, window=512),
    "sliding-4b": _gemma3(2560, 10_240, 34, 8, 4, window=1024),
    "hybrid-0.8b": _qwen3_5(1024, 3584, 24, 8, 2, linear_values=16),
    "hybrid-4b": _qwen3_5(2560, 9216, 32, 16, 4, linear_values=32),
}


def small() -> bool:
    """Whether all shapes are tiny: for trying a measurement, whose figures mean nothing then."""
    return os.environ.get("BENCH_CARD_SHAPES") == "small"


def shape(name: str) -> tuple[Shape, int]:
    """Of a name such as ``dense-4b-4bit``: the shape, and the bits of a weight (0: bfloat16)."""
    base, _, kind = name.rpartition("-")
    found = SHAPES[base]
    return found.small() if small() else found, BITS[kind]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a token costs a model at least: ``bytes`` that are read for it, and ``products`` with weights that
    it takes as a token of a prompt. ``cuda``: False if the card's floors do not apply."""

    bytes: float
    products: float
    cuda: bool

    @classmethod
    def of(cls, name: str, weights_bytes: int, device: str) -> Reading:
        found, bits = shape(name)
        config = found.config
        # A group of 64 has a scale and a bias of two bytes each.
        each = bits / 8 + 4 / 64 if bits else 2.0
        table = VOCABULARY * config["hidden_size"]
        unread = 0 if config.get("tie_word_embeddings") else table
        if experts := config.get("num_experts"):
            idle = experts - config["num_experts_per_tok"]
            expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
            unread += config["num_hidden_layers"] * idle * expert
        read = weights_bytes - unread * each
        # The last layer's logits are of the last token only.
        return cls(read, read / each - table, device == "cuda")

    def bandwidth(self, tok_s: float) -> str:
        """The share of the card's bandwidth that so many tokens a second need; "" on another device."""
        return f"{tok_s * self.bytes / CARD_BYTES_S:.0%} of 3.0 TB/s" if self.cuda else ""

    def arithmetic(self, tok_s: float) -> str:
        """The same of its operations, for tokens of a prompt."""
        return f"{tok_s * 2 * self.products / CARD_OPS_S:.0%} of 790 TFLOP/s" if self.cuda else ""


def made(*names: str) -> Path:
    """A models folder with these, each made on the device the first time.

    ``BENCH_CARD_MODELS`` names another place for them: they are large, and read fastest from memory. Raises
    NotMeasured if the default model's tokenizer, which they have, is not there.
    """
    if lacking := [name for name in TOKENIZER if not (MODEL / name).exists()]:
        raise NotMeasured(f"{MODEL.relative_to(ROOT)} lacks {', '.join(lacking)} (docs/contributing.md)")
    usual = ROOT / ".cache" / "card-models"
    folder = Path(os.environ.get("BENCH_CARD_MODELS") or usual) / ("small" if small() else "whole")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        # Families may run beside each other.
        with (folder / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name / "config.json").exists():
                Child("card_model", name, str(folder / name), str(MODEL)).close()
    return folder
