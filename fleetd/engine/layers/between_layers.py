"""What a token has on its way from one layer to the next, as one row of numbers.

Mostly that is one hidden state. Some models have several of them per token, or later layers read what
earlier ones made besides. Each such way has a class, which says how many numbers that is, and packs them side
by side: a stage takes and gives (B, T, numbers), and frames, checks and prices know their number only.

In shapes B is the batch, T a chunk's tokens, D the width of a hidden state.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import kimi_k3

# How mlx-lm's models call the width of hidden states.
_WIDTHS = ("hidden_size", "hidden_dim", "n_embd")


def width_of(args: Any) -> int:
    """The width of one hidden state."""
    return int(next(getattr(args, name) for name in _WIDTHS if hasattr(args, name)))


class OneState:
    """One hidden state per token. ``args`` are the text model's constants, ``layers`` how many it has."""

    # Modules of the body that only the first stage needs, and only the last.
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def widths(self, args: Any, layers: int) -> tuple[int, ...]:
        """How many numbers each of the things has that are side by side."""
        return (width_of(args),)

    def begun(self, args: Any, layers: int, weights: Any, embedded: mx.array) -> mx.array:
        """What embedded tokens (B, T, D) have before the first layer. ``weights``: what ``first`` names."""
        return embedded

    def unpacked(self, args: Any, index: int, packed: mx.array) -> Any:
        """The same as layer ``index`` takes it."""
        return packed

    def packed(self, args: Any, layers: int, state: Any) -> mx.array:
        """What a layer gave, as (B, T, numbers)."""
        packed: mx.array = state
        return packed

    def ended(self, args: Any, layers: int, weights: Any, packed: mx.array) -> mx.array:
        """After the last layer, the hidden state (B, T, D) that the last norm takes. In ``weights`` is what
        ``last`` names."""
        return packed


class AltupStates(OneState):
    """Gemma 3n: several hidden states, of which each layer computes one and corrects the others by it."""

    first = ("altup_projections",)
    last = ("altup_unembed_projections",)

    def widths(self, args: Any, layers: int) -> tuple[int, ...]:
        return (width_of(args),) * int(args.altup_num_inputs)

    def begun(self, args: Any, layers: int, weights: Any, embedded: mx.array) -> mx.array:
        others = [project(embedded) for project in weights.altup_projections]
        return self.packed(args, layers, _as_large(mx.stack([embedded, *others])))

    def unpacked(self, args: Any, index: int, packed: mx.array) -> mx.array:
        return _stacked(packed, int(args.altup_num_inputs))

    def packed(self, args: Any, layers: int, state: Any) -> mx.array:
        return mx.concatenate(list(state), axis=-1)

    def ended(self, args: Any, layers: int, weights: Any, packed: mx.array) -> mx.array:
        first, *others = self.unpacked(args, layers, packed)
        projects = zip(weights.altup_unembed_projections, others, strict=True)
        states = mx.stack([first, *(project(state) for project, state in projects)])
        return mx.mean(_as_large(states), axis=0)


class BlockStates(OneState):
    """Kimi K3: before each layer, the hidden states at the ends of all blocks of layers so far are mixed in.

    Until a block ends zeros are in its place, so that it is the same number of numbers between any layers.
    """

    last = ("output_attn_res_proj", "output_attn_res_norm")

    def widths(self, args: Any, layers: int) -> tuple[int, ...]:
        return (width_of(args),) * (1 + _blocks(args, layers))

    def begun(self, args: Any, layers: int, weights: Any, embedded: mx.array) -> mx.array:
        return self._joined(args, layers, embedded, [])

    def unpacked(self, args: Any, index: int, packed: mx.array) -> Any:
        """(the hidden state, mlx-lm's list of blocks)."""
        size = args.attn_res_block_size
        if size is None:
            return packed, None
        count, width = _blocks(args, index), width_of(args)
        blocks = kimi_k3.ResidualBlocks(args.rms_norm_eps)
        if count:
            blocks.raw = _stacked(packed[..., width : (1 + count) * width], count)
            # As the blocks' own ``append`` has it.
            wide = blocks.raw.astype(mx.float32)
            blocks.inv_rms = mx.rsqrt((wide * wide).mean(axis=-1) + args.rms_norm_eps)
        return mx.contiguous(packed[..., :width]), blocks

    def packed(self, args: Any, layers: int, state: Any) -> mx.array:
        hidden, blocks = state
        return self._joined(args, layers, hidden, [] if blocks is None or blocks.raw is None else blocks.raw)

    def _joined(self, args: Any, layers: int, hidden: mx.array, blocks: Any) -> mx.array:
        missing = sum(self.widths(args, layers)) - (1 + len(blocks)) * width_of(args)
        zeros = mx.zeros((*hidden.shape[:2], missing), hidden.dtype)
        return mx.concatenate([hidden, *blocks, zeros], axis=-1)

    def ended(self, args: Any, layers: int, weights: Any, packed: mx.array) -> mx.array:
        hidden, blocks = self.unpacked(args, layers, packed)
        if blocks is None:
            mixed: mx.array = hidden
        else:
            norm, project = weights.output_attn_res_norm, weights.output_attn_res_proj
            weight = norm.weight.astype(mx.float32) * project.weight.reshape(-1)
            mixed = kimi_k3._attn_res_mix(blocks, hidden, weight, args.rms_norm_eps)
        return mixed


class StateAndKeys(OneState):
    """Hunyuan: with the hidden state go the keys and values of the last layer that made some, unrotated; the
    next ones take the same."""

    def widths(self, args: Any, layers: int) -> tuple[int, ...]:
        keys = _key_width(args)
        return (width_of(args), keys, keys) if keys else (width_of(args),)

    def begun(self, args: Any, layers: int, weights: Any, embedded: mx.array) -> mx.array:
        return self.packed(args, layers, (embedded, None))

    def unpacked(self, args: Any, index: int, packed: mx.array) -> Any:
        """(the hidden state, (keys, values) or None if the layer makes its own)."""
        width, keys = width_of(args), _key_width(args)
        if not keys or index % args.cla_share_factor == 0:
            return mx.contiguous(packed[..., :width]), None
        ends = [width, width + keys]
        hidden, *made = (mx.contiguous(part) for part in mx.split(packed, ends, axis=-1))
        return hidden, tuple(made)

    def packed(self, args: Any, layers: int, state: Any) -> mx.array:
        hidden, made = state
        if made is None:
            made = (mx.zeros((*hidden.shape[:2], 2 * _key_width(args)), hidden.dtype),)
        return mx.concatenate([hidden, *made], axis=-1) if _key_width(args) else hidden

    def ended(self, args: Any, layers: int, weights: Any, packed: mx.array) -> mx.array:
        hidden: mx.array = self.unpacked(args, layers, packed)[0]
        return hidden


class StateAndFirstValues(OneState):
    """RWKV 7: with the hidden state go the values of the first layer, which all others mix into theirs."""

    def widths(self, args: Any, layers: int) -> tuple[int, ...]:
        return (width_of(args),) * 2

    def begun(self, args: Any, layers: int, weights: Any, embedded: mx.array) -> mx.array:
        return mx.concatenate([embedded, mx.zeros_like(embedded)], axis=-1)

    def unpacked(self, args: Any, index: int, packed: mx.array) -> Any:
        """(the hidden state, the values (B, T, heads, D of a head) or None if the layer makes them)."""
        hidden, values = (mx.contiguous(half) for half in mx.split(packed, 2, axis=-1))
        return hidden, values.reshape(*values.shape[:2], -1, args.head_dim) if index else None

    def packed(self, args: Any, layers: int, state: Any) -> mx.array:
        hidden, values = state
        return mx.concatenate([hidden, values.reshape(hidden.shape)], axis=-1)

    def ended(self, args: Any, layers: int, weights: Any, packed: mx.array) -> mx.array:
        hidden: mx.array = self.unpacked(args, layers, packed)[0]
        return hidden


def _as_large(states: mx.array) -> mx.array:
    """(n, B, T, D), all but the first scaled to its mean square."""
    size = mx.mean(states[0] ** 2, axis=-1, keepdims=True) ** 0.5
    sizes = mx.mean(states[1:] ** 2, axis=-1, keepdims=True) ** 0.5
    scaled = states[1:] * (size / mx.maximum(sizes, mx.finfo(states.dtype).min))
    return mx.concatenate([states[:1], scaled])


def _stacked(packed: mx.array, count: int) -> mx.array:
    """(B, T, count · D) as (count, B, T, D), laid out as mlx-lm has it: products round by the layout."""
    batch, tokens, _ = packed.shape
    return mx.contiguous(packed.reshape(batch, tokens, count, -1).transpose(2, 0, 1, 3))


def _blocks(args: Any, index: int) -> int:
    """Blocks that end before layer ``index``: one begins every so many layers, with the state before it."""
    size = args.attn_res_block_size
    return 0 if size is None else -(-index // size)


def _key_width(args: Any) -> int:
    """The width of a token's keys, if layers share them; else 0."""
    if not args.use_cla:
        return 0
    return int(args.num_key_value_heads) * (int(args.hidden_size) // int(args.num_attention_heads))


# By ``Architecture.between``.
BETWEEN: dict[str, OneState] = {
    "": OneState(),
    "several states": AltupStates(),
    "residual blocks": BlockStates(),
    "keys": StateAndKeys(),
    "first values": StateAndFirstValues(),
}
