"""MLX arrays of which the numbers are known in NumPy, too.

MLX computes on a thread of its own, and whoever looks at a number waits for it: two changes of threads, which
take longer than an operation on one row, and much longer on a machine that is busy. What is computed in NumPy
between two products is handed on in both forms, so that the few operations that only arrange or add rows wait
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# Elements up to which an operation takes less time than a change of threads.
_FEW = 1 << 15


class Computed(mx.array):
    """A small array that is evaluated; ``values`` is a copy of its numbers, None once they were replaced."""

    __slots__ = ("values",)
    values: F32 | None

    def reshape(self, *shape: Any, **rest: Any) -> mx.array:
        if self.values is None or rest:
            return mx.array.reshape(self, *shape, **rest)
        return array(self.values.reshape(*shape))

    def transpose(self, *axes: Any, **rest: Any) -> mx.array:
        if self.values is None or rest:
            return mx.array.transpose(self, *axes, **rest)
        return array(self.values.transpose(*axes))


def array(values: F32) -> mx.array:
    """An MLX array of these numbers, which nothing changes any more."""
    if values.size > _FEW:
        return mx.array(values)
    found = Computed(values)
    found.values = values
    return found


def view(found: mx.array) -> npt.NDArray[Any]:
    """The numbers of an array without a copy, evaluated."""
    if type(found) is Computed and found.values is not None:
        return found.values
    return np.array(found, copy=False)


def _known(other: Any) -> F32 | float | None:
    """What a computed array can be combined with in NumPy; an array that is not yet evaluated is."""
    if isinstance(other, mx.array):
        return view(other) if other.dtype == mx.float32 and other.size <= _FEW else None
    return other if isinstance(other, float | int) else None


def _combining(name: str, function: Callable[[Any, Any], F32]) -> Any:
    stock = getattr(mx.array, name)

    def combine(self: Computed, other: Any) -> mx.array:
        values = None if self.values is None else _known(other)
        return stock(self, other) if values is None else array(function(self.values, values))

    return combine


def _replacing(name: str) -> Any:
    stock = getattr(mx.array, name)

    def replace(self: Computed, *arguments: Any) -> Any:
        self.values = None
        return stock(self, *arguments)

    return replace


# Sums and products do not depend on the order of the two.
for _name, _function in (("add", np.add), ("mul", np.multiply)):
    for _side in ("", "r"):
        setattr(Computed, f"__{_side}{_name}__", _combining(f"__{_side}{_name}__", _function))
# What changes an array in place.
for _name in dir(mx.array):
    if _name == "__setitem__" or (_name.startswith("__i") and hasattr(mx.array, "__" + _name[3:])):
        setattr(Computed, _name, _replacing(_name))
