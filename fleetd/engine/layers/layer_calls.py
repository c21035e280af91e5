"""One chunk of tokens on its way through layers, each called as its own model calls it.

Most layers take hidden states, a mask and a cache. What some take besides is made here once per chunk: masks,
scales of queries by position, keys that earlier layers made. What depends on the tokens themselves comes as
``PassInputs``, which every stage can make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models import gemma3n, gemma4_text, ministral3
from mlx_lm.models.base import create_attention_mask

from fleetd.engine.layers.architectures import Architecture
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import parts


class PassInputs(msgspec.Struct, frozen=True):
    """What of a chunk enters layers besides hidden states: the position of its first token and, where the
    model has such, each layer's own input (B, T, layers of the whole model, width).

    ``both_ways``: its tokens also see those of them that come later, as far as a window reaches.
    """

    start: int = 0
    per_layer: mx.array | None = None
    both_ways: bool = False


class LayerPass:
    """One chunk through some layers, in order.

    Args:
        hidden: (B, T, numbers), on the way into the first of them.
        sources: for each layer of the whole model the one whose keys and values it reads.
    """

    def __init__(
        self,
        architecture: Architecture,
        args: Any,
        hidden: mx.array,
        inputs: PassInputs,
        sources: tuple[int, ...],
    ) -> None:
        self.args, self.inputs, self.sources = args, inputs, sources
        self._like, self._as_array = hidden, architecture.mask_array
        self._masks: dict[int | None, Any] = {}
        self._scale: mx.array | None = None
        # Keys and values with the position of their first token, by the layer that made them.
        self.made: dict[int, Any] = {}
        self.call: Callable[[LayerPass, int, Any, mx.array, Any, Any], mx.array] = _CALLS[architecture.call]

    def mask(self, empty: Any, cache: Any) -> Any:
        """The mask of a layer's attention; None if it only keeps a running state. ``empty``: of its kind."""
        for kind, part in zip(parts(empty), parts(cache), strict=True):
            if kind_of(kind).attention:
                # A cache that rotates also masks what has left the window.
                window = kind_of(kind).window(kind)
                if window not in self._masks:
                    self._masks[window] = self._made(part, window)
                return self._masks[window]
        return None

    def _made(self, cache: Any, window: int | None) -> Any:
        opened = self.inputs.both_ways and self._like.shape[1] > 1
        if opened and window is None:
            # All that came before, and all of the chunk.
            return None
        as_array = opened or (self._as_array and window is None)
        mask = create_attention_mask(self._like, cache, return_array=as_array)
        if not opened:
            return mask
        # The chunk's own keys are the last ones, in their order. A window ends behind a token, not before it.
        tokens, keys = mask.shape
        return mask | ~mx.tri(tokens, keys, keys - tokens, dtype=mx.bool_)

    def mask_as_of(self, window: int | None) -> Any:
        """The mask that an earlier layer of this pass had."""
        return self._masks[window]

    def made_by(self, source: int, index: int) -> Any:
        """What layer ``source`` made, for layer ``index``. Raises ValueError if that is another stage's."""
        if source not in self.made:
            raise ValueError(f"layer {index} reads keys of layer {source}, which is not in this stage")
        return self.made[source]

    def query_scale(self) -> mx.array:
        """(T, 1): by which queries are multiplied, which grows with their position."""
        if self._scale is None:
            rope = self.args.rope_parameters
            self._scale = ministral3._get_llama_4_attn_scale(
                self._like.shape[1],
                self.inputs.start,
                rope["llama_4_scaling_beta"],
                rope["original_max_position_embeddings"],
            ).astype(self._like.dtype)
        return self._scale


def _plain(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    return layer(hidden, way.mask(empty, cache), cache)


def _scaled(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    return layer(hidden, way.query_scale(), way.mask(empty, cache), cache)


def _at_offset(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    return layer(hidden, way.mask(empty, cache), cache, offset=way.inputs.start)


def _two_masks(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    return layer(hidden, cache=cache, attn_mask=way.mask(empty, cache), mamba_mask=None)


def _per_layer_inputs(
    way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any
) -> Any:
    source = way.sources[index]
    if source == index:
        keys_values, offset, mask = None, None, way.mask(empty, cache)
    else:
        keys_values, offset = way.made_by(source, index)
        mask = way.mask_as_of(way.args.sliding_window if layer.self_attn.is_sliding else None)
    own = None if way.inputs.per_layer is None else way.inputs.per_layer[:, :, index, :]
    hidden, *made = layer(hidden, mask, cache, per_layer_input=own, shared_kv=keys_values, offset=offset)
    way.made[index] = made
    return hidden


def _reused_keys(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    source = way.sources[index]
    if source == index:
        hidden = layer(hidden, way.mask(empty, cache), cache)
        way.made[index] = cache.keys_and_values()
        return hidden
    return layer(hidden, *way.made_by(source, index), way.mask_as_of(None))


def _reused_caches(way: LayerPass, index: int, layer: Any, hidden: mx.array, empty: Any, cache: Any) -> Any:
    source = way.sources[index]
    if source == index:
        mask = way.mask(empty, cache)
    else:
        cache = way.made_by(source, index)
        mask = way.mask_as_of(way.args.sliding_window if layer.is_sliding else None)
    own = None if way.inputs.per_layer is None else way.inputs.per_layer[:, :, index, :]
    hidden = layer(hidden, mask, cache, own, offset=way.inputs.start)
    way.made[index] = cache
    return hidden


def _residual_blocks(way: LayerPass, index: int, layer: Any, state: Any, empty: Any, cache: Any) -> Any:
    hidden, blocks = state
    return layer(hidden, way.mask(empty, cache), cache, blocks)


def _first_values(way: LayerPass, index: int, layer: Any, state: Any, empty: Any, cache: Any) -> Any:
    hidden, values = state
    return layer(hidden, values, cache)


def _given_keys(way: LayerPass, index: int, layer: Any, state: Any, empty: Any, cache: Any) -> Any:
    hidden, given = state
    hidden, made = layer(hidden, way.mask(empty, cache), cache, given)
    # The layer that begins the next group makes its own.
    ends = not way.args.use_cla or (index + 1) % way.args.cla_share_factor == 0
    return hidden, None if ends else made


_CALLS: dict[str, Callable[[LayerPass, int, Any, mx.array, Any, Any], Any]] = {
    "": _plain,
    "scaled queries": _scaled,
    "at offset": _at_offset,
    "two masks": _two_masks,
    "per-layer inputs": _per_layer_inputs,
    "reused keys": _reused_keys,
    "reused caches": _reused_caches,
    "residual blocks": _residual_blocks,
    "given keys": _given_keys,
    "first values": _first_values,
}

# Modules of the body with which per-layer inputs are made: every stage needs them.
PER_LAYER_MODULES = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)


def per_layer_inputs(
    architecture: Architecture, weights: Any, args: Any, tokens: mx.array
) -> mx.array | None:
    """Each layer's own input, (B, T, layers, width), of ``tokens`` (B, T); None if the model has none.

    ``weights`` has the embedding and ``PER_LAYER_MODULES``.
    """
    if not args.hidden_size_per_layer_input:
        return None
    return _PER_LAYER[architecture.call](weights, args, tokens)


def _gemma4_inputs(weights: Any, args: Any, tokens: mx.array) -> mx.array:
    width = args.hidden_size_per_layer_input
    # mlx-lm's own methods, on the modules that a stage has of the body.
    body = SimpleNamespace(
        config=args,
        hidden_size_per_layer_input=width,
        embed_tokens_per_layer_scale=width**0.5,
        per_layer_input_scale=2.0**-0.5,
        per_layer_projection_scale=args.hidden_size**-0.5,
        **{name: weights[name] for name in PER_LAYER_MODULES},
    )
    embedded = weights.embed_tokens(tokens)
    own = gemma4_text.Gemma4TextModel._get_per_layer_inputs(body, tokens, embedded)
    found: mx.array = gemma4_text.Gemma4TextModel._project_per_layer_inputs(
        body, embedded * args.hidden_size**0.5, own
    )
    return found


def _gemma3n_inputs(weights: Any, args: Any, tokens: mx.array) -> mx.array:
    body = SimpleNamespace(
        config=args,
        hidden_size=args.hidden_size,
        hidden_size_per_layer_input=args.hidden_size_per_layer_input,
        num_hidden_layers=args.num_hidden_layers,
        vocab_size_per_layer_input=args.vocab_size_per_layer_input,
        **{name: weights[name] for name in PER_LAYER_MODULES},
    )
    own = gemma3n.LanguageModel.get_per_layer_inputs(body, tokens)
    embedded = weights.embed_tokens(tokens) * args.hidden_size**0.5
    found: mx.array = gemma3n.LanguageModel.project_per_layer_inputs(body, embedded, own)
    return found


# By ``Architecture.call``.
_PER_LAYER: dict[str, Callable[[Any, Any, mx.array], mx.array]] = {
    "per-layer inputs": _gemma4_inputs,
    "reused caches": _gemma3n_inputs,
}


def kept_by(layers: list[Any], caches: list[Any], keeps: str) -> Iterator[Any]:
    """What each layer keeps of ``caches``, which are mlx-lm's for the whole model; None if nothing."""
    left = iter(caches)
    for index, layer in enumerate(layers):
        match keeps:
            case "first":
                own = index < len(caches)
            case "mixers":
                own = layer.block_type in "M*"
            case _:
                own = True
        yield next(left, None) if own else None
