"""mlx-lm's decoders as readers of texts: their states before the head.

A causal model takes texts of a pass as one batch, with what is missing of the shorter ones at their ends,
where no token of a text sees it. One whose config says ``use_bidirectional_attention`` takes texts of one
length at a time, as the mask of a batch would have to say where each text ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.vectors.token_rows import Pass, TokenRow, by_run, joined
from fleetd.errors import ModelUnsupported

# How much longer than the shortest the longest text of a batch is at most: what is filled up is computed.
_SPREAD = 1.25


def batches(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
    """Texts, the shorter ones first, parted so that little is filled up in each part."""
    found: list[list[TokenRow]] = []
    for row in rows:
        if found and len(row.tokens) <= _SPREAD * len(found[-1][0].tokens):
            found[-1].append(row)
        else:
            found.append([row])
    return found


class CausalDecoder(nn.Module):  # type: ignore[misc]
    """States (T, width) of a pass's tokens, each of which sees those before it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = _mlx_lm(config)

    def __call__(self, texts: Pass) -> mx.array:
        return joined([part for rows in batches(texts.rows) for part in self._states(rows)])

    def _states(self, rows: Sequence[TokenRow]) -> list[mx.array]:
        """The states of each of these texts, computed as one batch."""
        longest = max(len(row.tokens) for row in rows)
        batch = mx.array([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in rows])
        states = self.model.model(batch)
        return [states[index, : len(row.tokens)] for index, row in enumerate(rows)]

    @staticmethod
    def renamed(name: str) -> str:
        """The name in mlx-lm of a tensor in publishers' files: without a head they leave "model." out."""
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    def cleaned(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The weights as mlx-lm wants them; the head is only there if the files have it."""
        found = self.model.sanitize(weights) if hasattr(self.model, "sanitize") else weights
        if "lm_head.weight" not in found:
            self.model.pop("lm_head", None)
        return {f"model.{name}": array for name, array in found.items()}


class BidirectionalGemma(CausalDecoder):
    """EmbeddingGemma: each token sees all of its text, in most layers what is near of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        layers = self.model.model.layers
        if not all(hasattr(layer.self_attn, "is_sliding") for layer in layers):
            raise ModelUnsupported(f"Models of type {config['model_type']!r} are read forwards only.")
        # Both ends of a window count, and the token in its middle.
        self.window = config.get("sliding_window", 512) // 2
        self.scale = config["hidden_size"] ** 0.5

    def __call__(self, texts: Pass) -> mx.array:
        inner = self.model.model
        h = inner.embed_tokens(texts.tokens)
        h = h * mx.array(self.scale, h.dtype)
        parts = [self._run(by_run(h, run), inner, texts) for run in texts.runs]
        found: mx.array = inner.norm(joined(parts))
        return found

    def _run(self, h: mx.array, inner: Any, texts: Pass) -> mx.array:
        close = texts.near(h.shape[1], self.window) if h.shape[1] - 1 > self.window else None
        for layer in inner.layers:
            h = layer(h, close if layer.self_attn.is_sliding else None, None)
            texts.between_layers(h)
        return h


def _mlx_lm(config: Mapping[str, Any]) -> Any:
    """The model that mlx-lm has for a config, with no weights yet."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config=dict(config))
    return model_class(arguments.from_dict(dict(config)))
