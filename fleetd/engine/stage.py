"""Layers [first, last) of a model, run on hidden states.

The layers, their caches, masks and kernels are mlx-lm's own, called as the whole model calls them: a model's
stages one after the other give the bits of the whole, chunk by chunk. A stage holds the weights of its own
layers only, the first one the embedding too, the last one the norm and the head. Like the models themselves
it computes nothing until its results are evaluated.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from fleetd.engine.architectures import Architecture, architecture_of
from fleetd.errors import InvalidValue, ModelUnsupported


@dataclass(frozen=True, slots=True)
class Stage:
    """In the shapes below B is the batch, T a chunk's tokens, D the model's width and V its vocabulary."""

    first: int
    last: int
    # Layers of the whole model.
    total: int
    architecture: Architecture
    # The text model's own, for the constants that it multiplies and divides by.
    args: Any
    # ``layers``, and where this stage needs them ``embed_tokens``, ``norm`` and ``lm_head``.
    weights: nn.Module
    # One cache per layer in which nothing is yet: what make_caches copies.
    empty: tuple[Any, ...]

    @classmethod
    def of(cls, model: Any) -> Stage:
        """All layers of an mlx-lm model, whose weights it shares.

        Raises:
            ModelUnsupported: it cannot be cut.
        """
        architecture = architecture_of(model.args.model_type)
        empty = tuple(make_prompt_cache(model))
        text = getattr(model, architecture.text) if architecture.text else model
        body = text.model
        odd = {type(cache).__name__ for cache in empty} - {KVCache.__name__, RotatingKVCache.__name__}
        if odd or len(empty) != len(body.layers):
            raise ModelUnsupported(
                f"This {model.args.model_type} keeps {len(empty)} caches for {len(body.layers)} layers "
                f"({', '.join(sorted(odd)) or 'of the usual kinds'}): it cannot be shared by layers.",
                hint="It runs whole, on one machine.",
            )
        weights = nn.Module()
        weights.layers = list(body.layers)
        weights.embed_tokens = body.embed_tokens
        weights.norm = body.norm
        if "lm_head" in text:
            weights.lm_head = text.lm_head
        return cls(0, len(empty), len(empty), architecture, text.args, weights, empty)

    def part(self, first: int, last: int) -> Stage:
        """Layers [first, last) of the whole model, which must be among this stage's; it shares their weights.

        Raises:
            InvalidValue: they are not.
        """
        if not self.first <= first < last <= self.last:
            raise InvalidValue(
                f"Layers {first} to {last} were asked for; here are {self.first} to {self.last} "
                f"of {self.total}."
            )
        inner = slice(first - self.first, last - self.first)
        weights = nn.Module()
        weights.layers = self.weights.layers[inner]
        ends = last == self.total
        wanted = {
            "embed_tokens": first == 0 or (ends and "lm_head" not in self.weights),
            "norm": ends,
            "lm_head": ends and "lm_head" in self.weights,
        }
        for name, needed in wanted.items():
            if needed:
                weights[name] = self.weights[name]
        return Stage(first, last, self.total, self.architecture, self.args, weights, self.empty[inner])

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights once they are read; nothing is read to know it."""
        return sum(int(array.nbytes) for _, array in tree_flatten(self.weights.parameters()))

    @property
    def outside_bytes(self) -> int:
        """The part of ``weights_bytes`` that belongs to no layer: embedding, norm and head."""
        in_layers = sum(
            int(array.nbytes)
            for _, array in tree_flatten([layer.parameters() for layer in self.weights.layers])
        )
        return self.weights_bytes - in_layers

    @property
    def layer_bytes(self) -> int:
        """The part of ``weights_bytes`` that belongs to the layer with the most."""
        return max(
            sum(int(array.nbytes) for _, array in tree_flatten(layer.parameters()))
            for layer in self.weights.layers
        )

    def make_caches(self) -> list[Any]:
        """Empty caches for this stage's layers, of the kinds that ``make_prompt_cache`` gives the model."""
        return [copy.copy(cache) for cache in self.empty]

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens (B, T) to hidden states (B, T, D), in the first stage."""
        if self.first != 0:
            raise ValueError(f"the embedding belongs to layer 0; this stage begins with {self.first}")
        hidden: mx.array = self.weights.embed_tokens(tokens)
        match self.architecture.scale:
            case "sqrt_width":
                hidden = hidden * (self.args.hidden_size**0.5)
            case "sqrt_width_bf16":
                hidden = hidden * mx.array(self.args.hidden_size**0.5, mx.bfloat16).astype(hidden.dtype)
            case "embedding_multiplier":
                hidden = hidden * self.args.embedding_multiplier
            case "":
                pass
        return hidden

    def run(self, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Hidden states (B, T, D) of the tokens that follow those in ``caches``, to the same after ``last``.

        ``caches`` is one per layer of this stage; they then hold the tokens' keys and values.
        """
        masks: dict[int | None, Any] = {}
        for layer, empty, cache in zip(self.weights.layers, self.empty, caches, strict=True):
            # A cache that rotates also masks what has left the window.
            window = empty.max_size if isinstance(empty, RotatingKVCache) else None
            if window not in masks:
                as_array = self.architecture.mask_array and window is None
                masks[window] = create_attention_mask(hidden, cache, return_array=as_array)
            hidden = layer(hidden, masks[window], cache)
        return hidden

    def finish(self, hidden: mx.array) -> mx.array:
        """Hidden states (B, T, D) after the last layer to logits (B, T, V), in the last stage."""
        if self.last != self.total:
            raise ValueError(f"logits come after layer {self.total - 1}; this stage ends before {self.last}")
        hidden = self.weights.norm(hidden)
        head = self.weights.lm_head if "lm_head" in self.weights else self.weights.embed_tokens.as_linear
        logits: mx.array = head(hidden)
        match self.architecture.logits:
            case "softcap":
                cap = self.args.final_logit_softcapping
                logits = mx.tanh(logits / cap) * cap
            case "times_logit_scale":
                logits = logits * self.args.logit_scale
            case "over_logits_scaling":
                logits = logits / self.args.logits_scaling
            case "":
                pass
        return logits
