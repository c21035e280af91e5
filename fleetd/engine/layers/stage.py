"""Layers [first, last) of a model, run on hidden states.

The layers, their caches, masks and kernels are mlx-lm's own, called as the whole model calls them: a model's
stages one after the other give the bits of the whole, chunk by chunk. A stage holds the weights of its own
layers only, the first one the embedding too, the last one the norm and the head. Like the models themselves
it computes nothing until its results are evaluated.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace

from fleetd.engine.cpu.packed_layers import table_rows, weights_bytes
from fleetd.engine.layers.architectures import ANY_TEXT, Architecture, architecture_of
from fleetd.engine.layers.between_layers import BETWEEN, OneState, width_of
from fleetd.engine.layers.layer_calls import (
    PER_LAYER_MODULES,
    LayerPass,
    PassInputs,
    kept_by,
    per_layer_inputs,
)
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.packed_caches import with_packings
from fleetd.engine.sequence_state.parts import all_parts, parts
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.errors import InvalidValue, ModelUnsupported, ProtocolError

# How mlx-lm's models call the list of the layers whose keys and values each layer reads.
_SOURCES = ("previous_kvs", "layer_idx_to_cache_idx")


class Stage(msgspec.Struct, frozen=True):
    """Some layers of a model. In shapes B is the batch, T a chunk's tokens, V the vocabulary, D the numbers
    that a token has between layers: its hidden state, or what ``between_layers`` packs.
    """

    first: int
    last: int
    # Layers of the whole model.
    total: int
    architecture: Architecture
    # The text model's own, for the constants that it multiplies and divides by.
    args: Any
    # ``layers``, and where this stage needs them ``embed_tokens``, ``positions``, ``norm`` and ``lm_head``.
    weights: nn.Module
    # What make_caches copies: a cache per layer in which nothing is yet; None for a layer that keeps nothing.
    empty: tuple[Any, ...]
    # For each layer of the whole model the one whose keys and values it reads: most often itself.
    sources: tuple[int, ...]
    # Leading layers of the whole model that a prefill computes: those after the last that keeps anything are
    # needed for the last token only.
    prefilled: int

    @classmethod
    def of(cls, model: Any) -> Stage:
        """All layers of an mlx-lm model, whose weights it shares.

        Raises:
            ModelUnsupported: it cannot be cut.
        """
        text_of = _text_of(model)
        architecture = architecture_for(model)
        text = text_of or (attrgetter(architecture.text)(model) if architecture.text else model)
        body = text
        for name in filter(None, architecture.body.split(".")):
            body = getattr(body, name)
        layers = body
        for name in architecture.layers.split("."):
            layers = getattr(layers, name)
        if architecture.tail:
            layers = [*layers, *getattr(body, architecture.tail)]
        caches = make_prompt_cache(model)
        empty = tuple(kept_by(layers, caches, architecture.keeps))
        odd = {type(part).__name__ for part in all_parts(caches) if not kind_of(part).shared}
        found = sum(cache is not None for cache in empty)
        if odd or found != len(caches) or (architecture.keeps == "all" and found != len(layers)):
            raise ModelUnsupported(
                f"This {_args(model).model_type} keeps {len(caches)} caches for {len(layers)} layers "
                f"({', '.join(sorted(odd)) or 'of the usual kinds'}): it cannot be shared by layers.",
                hint="It runs whole, on one machine.",
            )
        weights = nn.Module()
        weights.layers = list(layers)
        weights.embed_tokens = body[architecture.embed]
        weights.norm = body[architecture.norm]
        if architecture.positions:
            weights.positions = body[architecture.positions]
        if "lm_head" in text:
            weights.lm_head = text.lm_head
        between = BETWEEN[architecture.between]
        for name in (*PER_LAYER_MODULES, *between.first, *between.last):
            if name in body:
                weights[name] = body[name]
        last_kept = len(caches) - 1 if architecture.tail else len(layers)
        shared = (getattr(body, name) for name in _SOURCES if hasattr(body, name))
        sources = tuple(next(shared, [min(i, last_kept) for i in range(len(layers))]))
        prefilled = max(index + 1 for index, cache in enumerate(empty) if cache is not None)
        total = len(layers)
        return cls(0, total, total, architecture, _args(text), weights, empty, sources, prefilled)

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
            "embed_tokens": first == 0 or self.takes_tokens or (ends and self.is_tied),
            "positions": first == 0 and "positions" in self.weights,
            "norm": ends and "norm" in self.weights,
            "lm_head": ends and "lm_head" in self.weights,
            **dict.fromkeys(PER_LAYER_MODULES, self.takes_tokens),
            **{name: first == 0 and name in self.weights for name in self._between.first},
            **{name: ends and name in self.weights for name in self._between.last},
        }
        for name, needed in wanted.items():
            if needed:
                weights[name] = self.weights[name]
        return replace(self, first=first, last=last, weights=weights, empty=self.empty[inner])

    def with_ends(self, last: int) -> Stage:
        """Layers [0, last) of a whole model, the embedding, and what follows its last layer."""
        front, back = self.part(0, last), self.part(self.total - 1, self.total)
        for name, module in back.weights.items():
            if name != "layers" and name not in front.weights:
                front.weights[name] = module
        return front

    def without_head(self) -> Stage:
        """The same layers without what only logits need: norm, head, and a table that is both ends."""
        begins = self.first == 0 or self.takes_tokens
        dropped = {"norm", "lm_head", *self._between.last} | ({"embed_tokens"} if not begins else set())
        weights = nn.Module()
        for name, module in self.weights.items():
            if name not in dropped:
                weights[name] = module
        return replace(self, weights=weights)

    @property
    def width(self) -> int:
        """How many numbers a token has between layers."""
        return sum(self._between.widths(self.args, self.total))

    @property
    def hidden_width(self) -> int:
        """The width of one hidden state."""
        return width_of(self.args)

    def apart(self, hidden: mx.array) -> list[mx.array]:
        """What lies between two layers, (B, T, D), as the single hidden states, keys and so on of it."""
        *ends, _ = itertools.accumulate(self._between.widths(self.args, self.total))
        return list(mx.split(hidden, ends, axis=-1))

    @property
    def _between(self) -> OneState:
        return BETWEEN[self.architecture.between]

    @property
    def takes_tokens(self) -> bool:
        """True if each layer has an input of its own, which every stage makes of the tokens."""
        return PER_LAYER_MODULES[0] in self.weights

    @property
    def prefilling(self) -> Stage:
        """This stage without the layers that a prefill does not compute."""
        return self if self.last <= self.prefilled else self.part(self.first, self.prefilled)

    def spread(self, caches: Sequence[Any]) -> list[Any]:
        """One entry per layer of this stage, None if it keeps nothing, of caches as mlx-lm lists them."""
        left = iter(caches)
        return [None if empty is None else next(left) for empty in self.empty]

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights once they are read; nothing is read to know it."""
        return weights_bytes(self.weights)

    @property
    def is_tied(self) -> bool:
        """True if the table of the embedding is the head, and this stage has it."""
        return "norm" in self.weights and "lm_head" not in self.weights

    @property
    def outside_bytes(self) -> int:
        """The part of ``weights_bytes`` that belongs to no layer: embedding, norm and head."""
        return self.weights_bytes - sum(weights_bytes(layer) for layer in self.weights.layers)

    @property
    def layer_bytes(self) -> int:
        """The part of ``weights_bytes`` that belongs to the layer with the most."""
        return max(weights_bytes(layer) for layer in self.weights.layers)

    def make_caches(self) -> list[Any]:
        """Empty caches for this stage's layers, of the kinds that ``make_prompt_cache`` gives the model.

        None for a layer that keeps nothing.
        """
        return copy.deepcopy(list(self.empty))

    def with_packings(self, packings: Sequence[Sequence[RowPacking | None]]) -> Stage:
        """The same layers, whose caches hold rows as is said for the parts of each that has some; None is as
        they are computed."""
        left = iter(packings)
        empty = (None if cache is None else with_packings(cache, next(left)) for cache in self.empty)
        return replace(self, empty=tuple(empty))

    @property
    def as_computed(self) -> Stage:
        """The same layers, whose caches hold all rows as they are computed."""
        return self.with_packings([[None] * len(parts(cache)) for cache in self.empty if cache is not None])

    def check_tokens(self, tokens: Sequence[int], end: int) -> None:
        """Raises ProtocolError for tokens of another machine, all before position ``end``, of which a table
        of this stage has no row. A table does not check its indices."""
        if self.first != 0 and not self.takes_tokens:
            return
        vocabulary = table_rows(self.weights.embed_tokens)
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ProtocolError(f"Tokens came that a vocabulary of {vocabulary} does not have.")
        if self.first == 0 and self.architecture.positions:
            positions = table_rows(self.weights.positions)
            if end > positions:
                raise ProtocolError(f"Tokens came behind the {positions} positions of this model.")

    def inputs(self, tokens: mx.array, start: int) -> PassInputs:
        """What of ``tokens`` (B, T), the first at position ``start``, enters layers besides hidden states."""
        if not self.takes_tokens:
            return PassInputs(start)
        return PassInputs(start, per_layer_inputs(self.architecture, self.weights, self.args, tokens))

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
        return self._between.begun(self.args, self.total, self.weights, hidden)

    def run(self, hidden: mx.array, caches: list[Any], inputs: PassInputs | None = None) -> mx.array:
        """Hidden states (B, T, D) of the tokens that follow those in ``caches``, to the same after ``last``.

        In the first stage they are as ``embed`` gives them, without positions.

        ``caches`` is one per layer of this stage; they then hold what the layers keep of the tokens.
        ``inputs`` is what ``inputs()`` makes of these tokens. Without it their position is that of a cache
        that counts tokens.
        """
        if inputs is None:
            counted = (part.offset for cache in caches for part in parts(cache) if hasattr(part, "offset"))
            inputs = PassInputs(int(next(counted, 0)))
        if self.first == 0 and self.architecture.positions:
            hidden = hidden + self.weights.positions(mx.arange(hidden.shape[1]) + inputs.start)
        way = LayerPass(self.architecture, self.args, hidden, inputs, self.sources)
        each = zip(self.weights.layers, self.empty, caches, strict=True)
        state = self._between.unpacked(self.args, self.first, hidden)
        for index, (layer, empty, cache) in enumerate(each, self.first):
            state = way.call(way, index, layer, state, empty, cache)
        return self._between.packed(self.args, self.total, state)

    def finish(self, hidden: mx.array) -> mx.array:
        """Hidden states (B, T, D) after the last layer to logits (B, T, V), in a stage that has the head."""
        if "norm" not in self.weights:
            raise ValueError(f"logits come after layer {self.total - 1}; this stage ends before {self.last}")
        hidden = self.weights.norm(self._between.ended(self.args, self.total, self.weights, hidden))
        head = self.weights.lm_head if "lm_head" in self.weights else self.weights.embed_tokens.as_linear
        logits: mx.array = head(hidden)
        match self.architecture.logits:
            case "softcap" if self.args.final_logit_softcapping is not None:
                cap = self.args.final_logit_softcapping
                logits = mx.tanh(logits / cap) * cap
            case "times_logit_scale":
                logits = logits * self.args.logit_scale
            case "over_logits_scaling":
                logits = logits / self.args.logits_scaling
            case "times_tied_multipliers" if "lm_head" not in self.weights:
                logits = logits * (self.args.lm_head_multiplier / self.args.embedding_multiplier)
            case _:
                pass
        return logits


def _args(model: Any) -> Any:
    """The constants of a model, or of its text model."""
    return model.args if hasattr(model, "args") else model.config


def architecture_for(model: Any) -> Architecture:
    """How to run an mlx-lm model in pieces. Raises ModelUnsupported if it cannot be cut."""
    return architecture_of(code_of(_text_of(model) or model))


def code_of(model: Any) -> str:
    """The module of mlx-lm that has a model's code. A config's ``model_type`` may be another name for it."""
    return str(type(model).__module__.removeprefix("mlx_lm.models."))


def _text_of(model: Any) -> Any | None:
    """The text model of one that reads pictures around a text model of any type; None if it is no such."""
    return model.language_model if code_of(model) in ANY_TEXT else None
