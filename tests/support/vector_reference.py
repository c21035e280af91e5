"""Forward passes of readers of texts in NumPy, as papers write them: padded batches with masks, in float64.

The engine's numbers are held against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Weights = Mapping[str, F64]


def _erf(x: F64) -> F64:
    return np.array(mx.erf(mx.array(x.astype(np.float32))), np.float64)


def read(file: Path) -> dict[str, F64]:
    """The tensors of a safetensors file."""
    arrays: Any = mx.load(str(file))
    return {name: np.array(array.astype(mx.float32), np.float64) for name, array in arrays.items()}


def gelu(x: F64) -> F64:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def linear(w: Weights, name: str, x: F64) -> F64:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def layer_norm(w: Weights, name: str, x: F64, eps: float) -> F64:
    centred = x - x.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return out * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x: F64, base: float) -> F64:
    """(B, H, T, D), by the halves of D."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * base ** (-np.arange(half) / half)[None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def attention(q: F64, k: F64, v: F64, scale: float, seen: npt.NDArray[np.bool_]) -> F64:
    """q (B, H, T, D), k and v (B, K, T, D); ``seen``: broadcastable to (B, 1, T, T)."""
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    # A row of padding sees itself: it is thrown away.
    seen = seen | np.eye(q.shape[2], dtype=np.bool_)
    scores = np.where(seen, scale * q @ k.swapaxes(-1, -2), -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = scores / scores.sum(-1, keepdims=True) @ v
    return out.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


def heads(x: F64, count: int) -> F64:
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(0, 2, 1, 3)


def padded(
    texts: Sequence[Sequence[int]], more: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Ids (B, T), and where they are a text's; ``more``: how much longer than the longest text T is."""
    longest = max(map(len, texts)) + more
    ids = np.zeros((len(texts), longest), np.int64)
    real = np.zeros(ids.shape, np.bool_)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        real[row, : len(text)] = True
    return ids, real


def bert(
    w: Weights, config: Mapping[str, Any], texts: Sequence[Sequence[int]], types: Any = None, more: int = 0
) -> list[F64]:
    """States (length, width) of each text; ``w`` with no prefix before "embeddings" and "encoder"."""
    ids, real = padded(texts, more)
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    kinds = padded(types, more)[0] if types is not None else np.zeros_like(ids)
    eps, count = config["layer_norm_eps"], config["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][kinds]
    x = x + w["embeddings.position_embeddings.weight"][first + np.arange(ids.shape[1])]
    x = layer_norm(w, "embeddings.LayerNorm", x, eps)
    for index in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{index}"
        q, k, v = (
            heads(linear(w, f"{at}.attention.self.{part}", x), count) for part in ("query", "key", "value")
        )
        out = attention(q, k, v, q.shape[-1] ** -0.5, real[:, None, None])
        x = layer_norm(
            w, f"{at}.attention.output.LayerNorm", x + linear(w, f"{at}.attention.output.dense", out), eps
        )
        inner = gelu(linear(w, f"{at}.intermediate.dense", x))
        x = layer_norm(w, f"{at}.output.LayerNorm", x + linear(w, f"{at}.output.dense", inner), eps)
    return [x[row, : len(text)] for row, text in enumerate(texts)]


def modern_bert(
    w: Weights, config: Mapping[str, Any], texts: Sequence[Sequence[int]], more: int = 0
) -> list[F64]:
    ids, real = padded(texts, more)
    eps, count = config["norm_eps"], config["num_attention_heads"]
    x = layer_norm(w, "embeddings.norm", w["embeddings.tok_embeddings.weight"][ids], eps)
    places = np.arange(ids.shape[1])
    close = np.abs(places[:, None] - places[None]) <= config["local_attention"] // 2
    for index in range(config["num_hidden_layers"]):
        at, near = f"layers.{index}", index % config["global_attn_every_n_layers"] != 0
        base = config["local_rope_theta"] if near else config["global_rope_theta"]
        h = layer_norm(w, f"{at}.attn_norm", x, eps) if index else x
        q, k, v = (heads(part, count) for part in np.split(linear(w, f"{at}.attn.Wqkv", h), 3, -1))
        seen = real[:, None, None] & (close[None, None] if near else True)
        out = attention(rope(q, base), rope(k, base), v, q.shape[-1] ** -0.5, seen)
        x = x + linear(w, f"{at}.attn.Wo", out)
        inner, gate = np.split(linear(w, f"{at}.mlp.Wi", layer_norm(w, f"{at}.mlp_norm", x, eps)), 2, -1)
        x = x + linear(w, f"{at}.mlp.Wo", gelu(inner) * gate)
    x = layer_norm(w, "final_norm", x, eps)
    return [x[row, : len(text)] for row, text in enumerate(texts)]


def qwen3(w: Weights, config: Mapping[str, Any], texts: Sequence[Sequence[int]]) -> list[F64]:
    eps, places = config["rms_norm_eps"], None
    found = []
    for text in texts:
        x = w["embed_tokens.weight"][np.array([text])]
        places = np.arange(len(text))
        seen = (places[:, None] >= places[None])[None, None]
        for index in range(config["num_hidden_layers"]):
            at = f"layers.{index}"
            h = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
            q = heads(linear(w, f"{at}.self_attn.q_proj", h), config["num_attention_heads"])
            k, v = (
                heads(linear(w, f"{at}.self_attn.{part}_proj", h), config["num_key_value_heads"])
                for part in "kv"
            )
            q = rope(rms_norm(q, w[f"{at}.self_attn.q_norm.weight"], eps), config["rope_theta"])
            k = rope(rms_norm(k, w[f"{at}.self_attn.k_norm.weight"], eps), config["rope_theta"])
            x = x + linear(w, f"{at}.self_attn.o_proj", attention(q, k, v, config["head_dim"] ** -0.5, seen))
            h = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
            gate = linear(w, f"{at}.mlp.gate_proj", h)
            x = x + linear(
                w, f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(w, f"{at}.mlp.up_proj", h)
            )
        found.append(rms_norm(x, w["norm.weight"], eps)[0])
    return found


def gemma3(w: Weights, config: Mapping[str, Any], texts: Sequence[Sequence[int]]) -> list[F64]:
    """EmbeddingGemma: all of a text is seen, in sliding layers what is near."""
    eps = config["rms_norm_eps"]
    found = []
    for text in texts:
        x = w["embed_tokens.weight"][np.array([text])] * config["hidden_size"] ** 0.5
        places = np.arange(len(text))
        close = np.abs(places[:, None] - places[None]) < config["sliding_window"] // 2 + 1
        for index in range(config["num_hidden_layers"]):
            at, near = f"layers.{index}", (index + 1) % config["sliding_window_pattern"] != 0
            base = config["rope_local_base_freq"] if near else config["rope_theta"]

            def norm(name: str, x: F64, at: str = at) -> F64:
                return rms_norm(x, 1 + w[f"{at}.{name}.weight"], eps)

            h = norm("input_layernorm", x)
            q = heads(linear(w, f"{at}.self_attn.q_proj", h), config["num_attention_heads"])
            k, v = (
                heads(linear(w, f"{at}.self_attn.{part}_proj", h), config["num_key_value_heads"])
                for part in "kv"
            )
            q, k = rope(norm("self_attn.q_norm", q), base), rope(norm("self_attn.k_norm", k), base)
            seen = (close if near else np.ones_like(close))[None, None]
            out = attention(q, k, v, config["query_pre_attn_scalar"] ** -0.5, seen)
            x = x + norm("post_attention_layernorm", linear(w, f"{at}.self_attn.o_proj", out))
            h = norm("pre_feedforward_layernorm", x)
            gate = linear(w, f"{at}.mlp.gate_proj", h)
            gate = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            inner = gate * linear(w, f"{at}.mlp.up_proj", h)
            x = x + norm("post_feedforward_layernorm", linear(w, f"{at}.mlp.down_proj", inner))
        found.append(rms_norm(x, 1 + w["norm.weight"], eps)[0])
    return found


def classified(kind: str, w: Weights, first: F64) -> float:
    """The logit of a sequence classifier for the state of a pair's first token."""
    if kind == "modernbert":
        inner = layer_norm(w, "head.norm", gelu(linear(w, "head.dense", first)), 1e-5)
        return float(linear(w, "classifier", inner)[0])
    dense, out = (
        ("bert.pooler.dense", "classifier") if kind == "bert" else ("classifier.dense", "classifier.out_proj")
    )
    return float(linear(w, out, np.tanh(linear(w, dense, first)))[0])


def unit(vector: F64) -> F64:
    return vector / np.linalg.norm(vector)


def cosine(a: Any, b: Any) -> float:
    return float(unit(np.asarray(a, np.float64)) @ unit(np.asarray(b, np.float64)))
