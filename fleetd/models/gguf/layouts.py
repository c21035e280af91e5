"""The differences between GGUF's and mlx-lm's layout of the same weights, and the way from one to the other.

- The llama family's writer interleaves the rows of q and k, because llama.cpp rotates neighbours and mlx-lm
  rotates halves.
- The writer of Qwen 3.5 puts the heads of values in the order that broadcasts over the heads of keys:
  first one head of each key head, then the next. mlx-lm has all heads of a key head together.
- Gemma's norms are stored with the 1 that mlx-lm adds itself; a decay is stored as -exp(A_log).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fleetd.models.gguf.blocks import GROUP, Floats
from fleetd.models.gguf.families import Family
from fleetd.models.gguf.packing import Order


class Layout(msgspec.Struct, frozen=True):
    """How a tensor of the file becomes a parameter."""

    # The shape of the parameter.
    shape: tuple[int, ...]
    # The file's rows in mlx-lm's order; None if the order is the same.
    rows: Order = None
    # The columns likewise. A tensor of one dimension has only columns.
    columns: Order = None
    # Maps the numbers of a tensor that is not quantised; None if they stay.
    values: Callable[[Floats], Floats] | None = None
    # True if the parameter stays f32.
    exact: bool = False

    def groups(self) -> Order:
        """The groups of 32 columns in mlx-lm's order. Raises ValueError if columns move in smaller pieces."""
        if self.columns is None:
            return None
        groups = self.columns.reshape(-1, GROUP)
        if (groups[:, 0] % GROUP).any() or (np.diff(groups, axis=1) != 1).any():
            raise ValueError("heads are smaller than a group of quantised weights")
        return groups[:, 0] // GROUP


def layout_of(family: Family, parameter: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Layout:
    """The layout of a parameter. Raises ValueError for a shape that it cannot have in the family."""
    text = config.get("text_config", config)
    name = parameter.rpartition(".layers.")[2].partition(".")[2]
    if family.interleaved and name.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
        heads = text["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        order = _halves_of_pairs(shape[0], heads)
        return Layout(shape, rows=order) if len(shape) > 1 else Layout(shape, columns=order)
    if family.offset_norms and parameter.endswith("norm.weight"):
        return Layout(shape, values=lambda stored: stored - np.float32(1))
    if name == "mlp.shared_expert_gate.weight":
        return Layout((1, shape[-1]))
    if name.startswith("linear_attn."):
        return _delta_net(name.removeprefix("linear_attn."), shape, text)
    return Layout(shape)


def _halves_of_pairs(rows: int, heads: int) -> npt.NDArray[np.intp]:
    if rows % (2 * heads):
        raise ValueError(f"{rows} rows are impossible for {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _delta_net(name: str, shape: tuple[int, ...], text: Mapping[str, Any]) -> Layout:
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_rows = 2 * keys * text["linear_key_head_dim"]
    head = text["linear_value_head_dim"]

    def heads(first: int, size: int, count: int) -> npt.NDArray[np.intp]:
        if count != first + values * size:
            raise ValueError(f"{count} channels are impossible for {values} heads of {size}")
        moved = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).ravel()
        return np.concatenate([np.arange(first), first + moved])

    if name == "in_proj_qkv.weight":
        return Layout(shape, rows=heads(key_rows, head, shape[0]))
    if name == "conv1d.weight":
        return Layout((*shape, 1), rows=heads(key_rows, head, shape[0]))
    if name == "in_proj_z.weight":
        return Layout(shape, rows=heads(0, head, shape[0]))
    if name in ("in_proj_a.weight", "in_proj_b.weight"):
        return Layout(shape, rows=heads(0, 1, shape[0]))
    if name == "out_proj.weight":
        return Layout(shape, columns=heads(0, head, shape[1]))
    if name == "dt_bias":
        return Layout(shape, columns=heads(0, 1, shape[0]))
    if name == "A_log":
        return Layout(shape, columns=heads(0, 1, shape[0]), values=_log_of_decay, exact=True)
    return Layout(shape)


def _log_of_decay(stored: Floats) -> Floats:
    if not (stored < 0).all():
        raise ValueError("a decay is not negative")
    return np.log(-stored)
