"""A pass over some of a model's layers that reads their queries and keys, chunk by chunk.

The layers are mlx-lm's own, run by ``stage.Stage``; the wrapper around each rope (``rope.PosRoPE``) shows
what is rotated, after the model's own norms and before the rotation. Nothing is known here of an
architecture but what a look shows: layers whose keys are not seen, or seen in part only, cannot be used. What
lies between those that can, windows and running states, is computed as in any prefill.

    tokens ─► embed ─► layer 0 … layer exit - 1 ─┐  the last layer ends once its keys are seen
                         └── look: q, k ─────────┴─► keys of the scored tokens, queries of those that ask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from fleetd.compression.token_scores import F32
from fleetd.engine.layers.stage import Stage, code_of
from fleetd.engine.scoring.scoring_layout import LayoutPass
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import arrays
from fleetd.engine.sparse_prefill.rope import PosRoPE, install, watched
from fleetd.errors import ModelUnsupported

# Tokens between each query and each key when they are compared. Attention prefers what is near, so a fact at
# the front of a text would matter less than one beside the question, and cuts would change what matters.
# Heads that find facts do so at any distance they were trained at; this one is within every model's context.
DISTANCE = 512
# How mlx-lm's attentions call what they multiply dot products by.
_SCALES = ("scale", "sm_scale")


class AttentionTap(msgspec.Struct, frozen=True):
    """A model whose attention can be read.

    ``scales``: what the dot products of a layer's queries and keys are multiplied by, for every layer that
    attends to the whole text and shows all of its queries and keys; ``heads``: how many of both these have;
    ``keys_first``: the layers that rotate keys before queries.
    """

    stage: Stage
    scales: dict[int, float]
    heads: dict[int, tuple[int, int]]
    keys_first: frozenset[int]
    ropes: dict[int, PosRoPE]

    @classmethod
    def of(cls, model: Any) -> AttentionTap:
        """Wraps the model's ropes that are not wrapped yet.

        Raises:
            ModelUnsupported: none of its layers can be looked into, or it cannot be run layer by layer.
        """
        stage = Stage.of(model)
        ropes = install(model)
        lone = {rope.layer: rope for rope in ropes if sum(rope.layer == other.layer for other in ropes) == 1}
        heads, keys_first = _shown(stage, lone)
        if not heads:
            raise ModelUnsupported(
                f"Attention in a {code_of(model)} cannot be looked into: scores need layers that see "
                "the whole text and rotate all of their queries and keys.",
                hint="Choose another model for scoring.",
            )
        scales = {number: _scale(stage.weights.layers[number]) for number in heads}
        shown = {number: lone[number] for number in heads}
        return cls(stage, scales, heads, keys_first, shown)

    def query_heads(self, layer: int) -> int:
        return self.heads[layer][0]

    def key_heads(self, layer: int) -> range:
        return range(self.heads[layer][1])

    def ordered(self, layer: int, pair: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Queries and keys, of what a layer rotated in this order or in the other."""
        first, second = pair
        return (second, first) if layer in self.keys_first else (first, second)

    def placed(self, layer: int, queries: F32, keys: F32) -> tuple[F32, F32]:
        """Rotated queries (heads, T, D) and keys of a layer: each query ``DISTANCE`` behind each key."""
        return self._at(layer, queries, DISTANCE), self._at(layer, keys, 0)

    def _at(self, layer: int, rows: F32, position: int) -> F32:
        """Rows (heads, T, D) rotated as if all of their tokens stood at ``position``; at 0, too, as some
        ropes change lengths."""
        tokens = mx.array(rows).transpose(1, 0, 2)[:, :, None]  # (T, heads, 1, D)
        rotated = self.ropes[layer](tokens, offset=position)[:, :, 0].transpose(1, 0, 2)
        return np.array(rotated.astype(mx.float32))


class _Enough(Exception):
    pass


@dataclass(slots=True)
class AttentionPass:
    """One pass, begun. ``layers``: what of each is kept: which of its key heads.

    Afterwards ``keys[layer]`` (kept heads, scored tokens, D) and ``queries[layer]`` (all query heads, asking
    tokens, D), f32, as they are before they are rotated.
    """

    tap: AttentionTap
    work: LayoutPass
    layers: Mapping[int, Sequence[int]]
    done: int = 0
    keys: dict[int, F32] = field(default_factory=dict)
    queries: dict[int, F32] = field(default_factory=dict)
    _stage: Stage | None = None
    _caches: list[Any] = field(default_factory=list)
    _queries: dict[int, list[F32]] = field(default_factory=dict)
    _keys: dict[int, list[F32]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.done >= len(self.work.tokens)

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more; returns how many."""
        if self._stage is None:
            self._stage = self.tap.stage.part(0, max(self.layers) + 1)
            self._caches = self._stage.make_caches()
        tokens = self.work.tokens[self.done : self.done + chunk_tokens]
        self._compute(self._stage, tokens)
        self.done += len(tokens)
        if self.finished:
            self._finish()
        return len(tokens)

    def _compute(self, stage: Stage, tokens: list[int]) -> None:
        seen: dict[int, list[mx.array]] = {}

        def look(layer: int, before: mx.array, _: mx.array) -> None:
            seen.setdefault(layer, []).append(before)
            if layer == stage.last - 1 and len(seen[layer]) == 2:
                raise _Enough

        chunk_tokens = mx.array(tokens)[None]
        inputs = stage.inputs(chunk_tokens, self.done)
        try:
            with watched(self.tap.ropes.values(), look):
                stage.run(stage.embed(chunk_tokens), self._caches, inputs)
        except _Enough:
            # Nothing was put into the last layer's cache; masks and rotations follow its count.
            kind_of(self._caches[-1]).set_held(self._caches[-1], self.done + len(tokens))
        queries, keys = {}, {}
        for layer in self.layers:
            q, k = self.tap.ordered(layer, seen[layer])
            queries[layer], keys[layer] = self._asking(q), self._scored(layer, k, len(tokens))
        mx.eval(queries, keys, arrays(self._caches))
        for kept, chunk in ((self._queries, queries), (self._keys, keys)):
            for layer, rows in chunk.items():
                if rows.shape[1]:
                    kept.setdefault(layer, []).append(np.array(rows))
        mx.clear_cache()

    def _asking(self, q: mx.array) -> mx.array:
        """The queries of the tokens that ask, from a chunk's (1, H, T, D)."""
        first = max(0, len(self.work.tokens) - self.work.asking - self.done)
        return q[0, :, first:].astype(mx.float32)

    def _scored(self, layer: int, k: mx.array, n: int) -> mx.array:
        """The kept heads' keys of the tokens that are scored, from a chunk's n keys (1, K, n, D)."""
        first = max(0, self.work.own - self.done)
        end = min(n, self.work.own + self.work.count - self.done)
        return k[0, mx.array(list(self.layers[layer])), first : max(first, end)].astype(mx.float32)

    def _finish(self) -> None:
        # First, as the copies below, and the logits after them, are to take the room of these.
        self._caches.clear()
        mx.clear_cache()
        self.queries = {layer: np.concatenate(rows, axis=1) for layer, rows in self._queries.items()}
        self.keys = {layer: np.concatenate(rows, axis=1) for layer, rows in self._keys.items()}
        self._queries.clear()
        self._keys.clear()


def logits_of(queries: F32, keys: F32, scale: float) -> F32:
    """(Q, D) and (N, D) to (Q, N), in f32."""
    logits: F32 = np.matmul(queries * np.float32(scale), keys.T, dtype=np.float32)
    return logits


def _shown(stage: Stage, ropes: Mapping[int, PosRoPE]) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
    """The layers, of those with ``ropes``, that keep all keys and show them whole, found by a pass over two
    tokens; with their numbers of query heads and key heads. And which of them rotate keys first."""
    seen: dict[int, list[mx.array]] = {}

    def look(layer: int, _: mx.array, after: mx.array) -> None:
        seen.setdefault(layer, []).append(after)

    # Of quantised keys it could not be seen which numbers they were.
    caches, tokens = stage.as_computed.make_caches(), mx.array([[1, 1]])
    with watched(ropes.values(), look):
        stage.run(stage.embed(tokens), caches, stage.inputs(tokens, 0))
    found, keys_first = {}, set()
    for layer in sorted(ropes):
        cache, pair = caches[layer], seen.get(layer, [])
        # A window hides what is far. A rope that sees a part only, or what is compressed, shows no scores.
        if not kind_of(cache).plain or len(pair) != 2:
            continue
        held = cache.keys[:, :, :2]
        keys = [each.shape == held.shape and bool(mx.array_equal(each, held)) for each in pair]
        if any(keys):
            if not keys[1]:
                keys_first.add(layer)
            found[layer] = pair[0 if keys[1] else 1].shape[1], held.shape[1]
    return found, frozenset(keys_first)


def _scale(layer: nn.Module) -> float:
    for _, module in layer.named_modules():
        if isinstance(module.get("rope"), PosRoPE):
            for name in _SCALES:
                if isinstance(scale := getattr(module, name, None), int | float):
                    return float(scale)
    raise ModelUnsupported("This model's attention has a scale that is not a number.")
