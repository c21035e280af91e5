"""Products with packed weights through onnxruntime, in which each row has the same bits in any company.

A matrix is prepared once: onnxruntime packs it again, in the order in which its kernel reads it, and the
original can go. A prepared product belongs to no thread; several may compute with it at once.

Threads are this module's: onnxruntime's own would spin between two products, and each session has its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fleetd.engine.cpu import onnx_graph
from fleetd.engine.cpu.arithmetic import BLOCKS, Kernel
from fleetd.hardware.probe import cores
from fleetd.models.cpu_arithmetic import prepared_bytes

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
T = TypeVar("T")

# Weights of a matrix from which a product of one row is shared by threads, and weights times rows from which
# many rows are: less takes no longer than handing it over.
_MANY_WEIGHTS, _MUCH_WORK = 1 << 22, 1 << 26
# Rows that one thread computes at least.
_LEAST_ROWS = 16
# What is multiplied to find out which kernels are exact: outputs, inputs and the numbers of rows.
_TRIED_OUTPUTS, _TRIED_INPUTS, _TRIED_ROWS = 48, 512, (1, 2, 3, 4, 7, 16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix (N, K) of w = scale · (q - zero) in blocks along K, as ``MatMulNBits`` takes it, and what is
    added to all w of a group."""

    kernel: Kernel
    # (N, K / block, block · bits / 8): integers of 4 bits, the first lowest, or of 8.
    weights: U8
    # (N, K / block)
    scales: F32
    # (N, bytes): an integer of ``bits`` for each block, the first lowest.
    zeros: U8
    # (groups, N); None adds nothing.
    rest: F32 | None = None

    @classmethod
    def stacked(cls, matrices: Sequence[Packed]) -> Packed:
        """One matrix of the outputs of several, for one kernel, of as many groups."""
        first, *others = matrices
        if not others:
            return first
        parts = [(each.weights, each.scales, each.zeros) for each in matrices]
        weights, scales, zeros = (np.concatenate(each) for each in zip(*parts, strict=True))
        groups = max(each.groups for each in matrices)
        rests = [np.zeros((groups, m.outputs), np.float32) if m.rest is None else m.rest for m in matrices]
        rest = np.concatenate(rests, axis=1) if groups else None
        return cls(first.kernel, weights, scales, zeros, rest)

    @property
    def outputs(self) -> int:
        return int(self.scales.shape[0])

    @property
    def inner(self) -> int:
        return int(self.scales.shape[1]) * self.kernel.block

    @property
    def groups(self) -> int:
        return 0 if self.rest is None else len(self.rest)


class PackedProduct:
    """Rows (rows, K) → (rows, N) for a prepared matrix, each with the same bits in any company."""

    def __init__(self, packed: Packed) -> None:
        self.outputs, self._inner = packed.outputs, packed.inner
        weights, kernel = packed.outputs * packed.inner, packed.kernel
        self.nbytes = prepared_bytes(weights, kernel.bits, kernel.block, packed.groups * packed.outputs)
        self._groups, self._least_rows = packed.groups, packed.kernel.least_rows
        count = threads() if self.outputs * self._inner >= _MANY_WEIGHTS else 1
        # Of each part, its outputs. Kernels take columns by the dozen.
        step = -(-self.outputs // (16 * count)) * 16
        bounds = [(at, min(at + step, self.outputs)) for at in range(0, self.outputs, step)]
        self._parts = [_session(packed, *each) for each in bounds]

    def __call__(self, x: F32) -> F32:
        rows = len(x)
        if rows < self._least_rows:
            x, given = np.zeros((self._least_rows, self._inner), np.float32), x
            x[:rows] = given
        if len(self._parts) > 1:
            tasks = [partial(_run, part, x, self._groups) for part in self._parts]
            return np.concatenate(each_of(tasks), axis=1)[:rows]
        part, count = self._parts[0], 1
        if rows * self.outputs * self._inner >= _MUCH_WORK:
            count = max(1, min(threads(), rows // _LEAST_ROWS))
        if count > 1:
            step = -(-rows // count)
            tasks = [partial(_run, part, x[at : at + step], self._groups) for at in range(0, rows, step)]
            return np.concatenate(each_of(tasks))
        return _run(part, x, self._groups)[:rows]


def threads() -> int:
    """How many threads compute products in this process."""
    return int(os.environ.get("MKL_NUM_THREADS") or cores())


@cache
def kernels() -> tuple[Kernel, ...]:
    """Kernels of this processor in which a row has the same bits in any company; () without onnxruntime."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return ()
    tried = (_tried(bits, block) for bits in (4, 8) for block in BLOCKS)
    return tuple(kernel for kernel in tried if kernel is not None)


def _tried(bits: int, block: int) -> Kernel | None:
    """The kernel for blocks of this kind if it is exact, with the fewest rows from which it is.

    Numbers come from integer arithmetic and are uneven, so that sums in another order differ.
    """
    shape = (_TRIED_OUTPUTS, _TRIED_INPUTS // block)
    index = np.arange(_TRIED_OUTPUTS * _TRIED_INPUTS, dtype=np.uint32) * np.uint32(2654435761)
    uneven = index.astype(np.float32) / np.float32(2**31)
    scales = uneven[: shape[0] * shape[1]].reshape(shape)
    weights = (index >> np.uint32(24)).astype(np.uint8)[: index.size * bits // 8]
    zeros = (index >> np.uint32(16)).astype(np.uint8)[: shape[0] * -(-shape[1] * bits // 8)]
    any_rows = Kernel(bits, block, 1)
    product = PackedProduct(
        Packed(any_rows, weights.reshape(*shape, -1), scales, zeros.reshape(shape[0], -1))
    )
    rows = max(_TRIED_ROWS) + 1
    x = (uneven[: rows * _TRIED_INPUTS] - np.float32(1)).reshape(rows, -1)
    whole = product(x)
    differing = [
        n for n in _TRIED_ROWS if any((product(x[at : at + n]) != whole[at : at + n]).any() for at in (0, 1))
    ]
    least = max(differing, default=0) + 1
    return Kernel(bits, block, least) if least <= 2 else None


def _session(packed: Packed, first: int, last: int) -> Any:
    """What multiplies by outputs [first, last) of a matrix."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # An arena keeps what it had once, for every matrix.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = {
        onnx_graph.WEIGHTS: packed.weights[first:last],
        onnx_graph.SCALES: packed.scales[first:last],
        onnx_graph.ZEROS: packed.zeros[first:last],
    }
    if packed.rest is not None:
        given[onnx_graph.REST] = packed.rest[:, first:last]
    # The integers are read where they lie; the session copies the rest, and needs none of this later.
    values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each)) for each in given.values()]
    options.add_external_initializers(list(given), values)
    model = onnx_graph.product(packed.kernel, packed.inner, last - first, packed.groups)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _run(session: Any, x: F32, groups: int) -> F32:
    given = {onnx_graph.X: x}
    if groups:
        given[onnx_graph.SUMS] = np.add.reduce(x.reshape(len(x), groups, -1), axis=2)
    result: F32
    (result,) = session.run([onnx_graph.Y], given)
    return result


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "product")


def each_of(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Results of independent tasks, one at most of each thread; this thread does the first."""
    first, *rest = tasks
    others = [_pool().submit(task) for task in rest]
    return [first(), *(done.result() for done in others)]


def free_unused() -> None:
    """Give memory that was freed back to the system: glibc keeps what lies between other things."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
