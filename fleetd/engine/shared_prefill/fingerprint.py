"""What a worker's arithmetic is: numbers that tell whether two machines compute the same bytes.

Each layer is given the same hidden states on every machine, and 8 bytes of a hash of what it makes of them
stand for it: of its keys, its values and its output, for a chunk and for a single token. Equal hashes on two
machines mean equal weights and equal kernels, at least for these numbers; different ones, that not even these
come out the same. The hidden states come from integer arithmetic, so that no machine's random numbers or
rounding enter them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd.engine.cpu import products
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import Arithmetic
from fleetd.engine.sequence_state.array_bytes import as_bytes
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts, parts
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.passes import evaluate

# More than a GPU's kernels treat as a few single tokens, and at most what one short chunk costs.
TOKENS = 64


def arithmetic(
    stage: Stage, layout: KvLayout, *, device: str, accelerator: str, versions: dict[str, str]
) -> Arithmetic:
    """The arithmetic of the layers of ``stage``. Costs about as much as prefilling ``TOKENS`` tokens.

    Args:
        device: "cpu", "metal" or "cuda".
        accelerator: its make, for people and for comparison ("Apple M4 Pro").
    """
    return Arithmetic(
        accelerator=accelerator,
        dtype=str(layout.dtype).removeprefix("mlx.core."),
        versions=versions,
        first_layer=stage.first,
        layers=layer_hashes(stage, layout, products.SUMS if device == "cpu" else b""),
        chunks="any" if any_chunks(stage, layout, device) else "same",
    )


def layer_hashes(stage: Stage, layout: KvLayout, sums: bytes = b"") -> list[bytes]:
    """A hash of 8 bytes for each layer. ``sums``: what the code does with more tokens than are tried here."""
    hidden, tokens = probe(layout), mx.zeros((1, TOKENS), mx.int32)
    inputs, after = stage.inputs(tokens, 0), stage.inputs(tokens[:, :1], TOKENS)
    stage = stage.prefilling
    found = []
    for layer in range(stage.first, stage.last):
        part = stage.part(layer, layer + 1)
        caches = part.make_caches()
        out = part.run(hidden, caches, inputs)
        evaluate(caches, out)
        # A single token is another kernel's work: what is decoded elsewhere depends on that one.
        step = part.run(hidden[:, :1], caches, after)
        evaluate(caches, step)
        state = hashlib.sha256(sums)
        for array in (*_kept(caches[0]), out, step):
            state.update(as_bytes(mx.contiguous(array)))
        found.append(state.digest()[:8])
    mx.clear_cache()
    return found


def _kept(cache: Any) -> list[mx.array]:
    """What a layer keeps, without room to grow."""
    return [array for part in parts(cache) for array in kind_of(part).kept(part)]


def probe(layout: KvLayout) -> mx.array:
    """(1, TOKENS, width): numbers in [-1, 1) that every dtype holds without rounding."""
    index = np.arange(TOKENS * layout.width, dtype=np.uint32)
    # A multiplicative hash (Knuth, TAOCP 6.4); its top bits are spread evenly. uint32 wraps round by design.
    numbers = (index * np.uint32(2654435761)) >> np.uint32(25)  # 7 bits
    values = numbers.astype(np.float32) / np.float32(64) - np.float32(1)
    return mx.array(values.reshape(1, TOKENS, layout.width)).astype(layout.dtype)


def any_chunks(stage: Stage, layout: KvLayout, device: str) -> bool:
    """True if a prompt's bytes are the same wherever it is cut into chunks: on a CPU with MKL, in f32."""
    if device != "cpu" or not products.exact() or layout.dtype != mx.float32:
        return False
    match stage.architecture.chunks:
        case "any":
            return True
        case "unless windows":
            return all(kind_of(part).window(part) is None for part in all_parts(stage.empty))
        case "same":
            return False
