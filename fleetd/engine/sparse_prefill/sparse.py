"""Sparse prefill: only the kept tokens of a prompt are computed, each at its original position.

    prompt    M tokens ── kept: N of them, ascending, the last one always
    prefill   N - 1 tokens in chunks, rotated by their true positions
    decode    in the same batch as dense answers: position M + i, slot N + i

What a kept token attends to is the kept tokens before it: the result is that of a dense pass in which the
keys of all others are masked. It is lossy and never becomes a part of a dense prompt's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.layers.architectures import ANY_TEXT, CUT, Architecture
from fleetd.engine.layers.prefill import give_back, read
from fleetd.engine.layers.stage import architecture_for, code_of
from fleetd.engine.sequence_state import batches, growth
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sparse_prefill.rope import PosRoPE, RopeOffset, install, watched
from fleetd.engine.sparse_prefill.sparse_caches import as_sparse, dense_beginning, sparse_cache
from fleetd.errors import ModelUnsupported

# Always kept: the first token, on which attention rests where it finds nothing, and the prompt's end.
HEAD_TOKENS = 1
TAIL_TOKENS = 8
# For the checks at load: positions far enough apart that a wrong one cannot pass, one per token.
_CHECK_POSITIONS = (0, 1, 2, 7, 30, 63, 64, 257, 500, 1023)
# On a GPU another kernel may round otherwise; a wrong position is off by far more than this share.
_GPU_ROUNDING = 0.03


@dataclass(slots=True)
class SparsePrefiller:
    """A ``prefill.Prefiller`` of ``kept`` among ``tokens`` (indices, ascending, the last one included).

    ``done`` counts kept tokens that are in ``cache``. Once nothing remains, ``cache`` can join a batch.
    """

    model: Any
    tokens: list[int]
    kept: list[int]
    cache: list[Any]
    done: int = 0

    @classmethod
    def begin(
        cls,
        model: Any,
        tokens: list[int],
        kept: list[int],
        prefix: list[Any] | None = None,
        cached: int = 0,
        *,
        sparse: bool = False,
    ) -> SparsePrefiller:
        """``prefix`` holds the KV of the first ``cached`` kept tokens. If it is not ``sparse``, it is that of
        a dense prompt, so these must be the prompt's first tokens."""
        if cached >= len(kept) or not (sparse or kept[:cached] == list(range(cached))):
            raise ValueError("a cached prefix with dropped tokens")
        prefiller = cls(model, tokens, kept, as_sparse(prefix or make_prompt_cache(model)), cached)
        prefiller._land()
        return prefiller

    @property
    def remaining(self) -> int:
        return len(self.kept) - 1 - self.done

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more; returns how many."""
        n = min(chunk_tokens, self.remaining)
        if n <= 0:
            return 0
        where = self.kept[self.done : self.done + n]
        for layer in self.cache:
            layer.expect(where)
        with growth.at_once(self.cache, self.remaining):
            read(self.model, mx.array([[self.tokens[i] for i in where]]), self.cache, self.remaining)
        mx.eval([layer.state for layer in self.cache])
        self.done += n
        give_back(done=not self.remaining)
        self._land()
        return n

    def _land(self) -> None:
        if self.remaining == 0:
            self.cache = [layer.finished(self.kept[-1]) for layer in self.cache]


def leading(kept: Sequence[int]) -> int:
    """How many tokens at the beginning are kept without a gap."""
    return next((i for i, index in enumerate(kept) if i != index), len(kept))


def leading_cache(kept: Sequence[int], cache: Sequence[Any]) -> list[Any] | None:
    """A dense cache of the ``leading`` tokens, from that of all; None if windows moved on."""
    found = [dense_beginning(layer, leading(kept)) for layer in cache]
    return None if any(layer is None for layer in found) else found


class Sparse(msgspec.Struct, frozen=True):
    """A model whose prompts can be prefilled sparsely. ``tail`` tokens at a prompt's end are always kept."""

    model: Any
    tail: int

    @classmethod
    def of(cls, model: Any, *, checked: bool = False) -> Sparse:
        """Wraps the ropes and checks on this device that positions are what they should be.

        ``checked``: they are known to be, and nothing is computed.

        Raises:
            ModelUnsupported: why it cannot; it still runs densely.
        """
        kind, code = model.model_type, code_of(model)
        if code not in CUT and code not in ANY_TEXT:
            raise ModelUnsupported(f"No test shows that a {kind} model can skip tokens of a prompt.")
        tail = tail_tokens(kind, architecture_for(model), make_prompt_cache(model))
        if checked:
            install(model)
        else:
            check_positions(model)
        return cls(model, tail)

    def kept(self, wanted: Sequence[int], length: int) -> list[int]:
        """``wanted`` of a prompt of ``length`` tokens and what is always kept, ascending."""
        ends = {*range(min(HEAD_TOKENS, length)), *range(max(0, length - self.tail), length)}
        return sorted(ends.union(wanted))


def tail_tokens(kind: str, architecture: Architecture, empty: Sequence[Any]) -> int:
    """Tokens at a prompt's end that are always kept, of a model with these empty caches.

    Raises ModelUnsupported if it cannot skip tokens.
    """
    if architecture.whole:
        raise ModelUnsupported(f"A {kind} model computes every token of a prompt: {architecture.whole}.")
    odd = {type(c).__name__ for c in empty if not (kind_of(c).plain or kind_of(c).window(c))}
    if odd or any(getattr(c, "keep", 0) for c in empty):
        kinds = ", ".join(sorted(odd)) or "window that pins tokens"
        raise ModelUnsupported(f"A {kind} model keeps its context in a {kinds}.")
    window = max((kind_of(c).window(c) or 0 for c in empty), default=0)
    return max(TAIL_TOKENS, window + 1 if window else 0)


def check_positions(model: Any) -> None:
    """Wrap the ropes. Check that each gives a token at any position what it natively has there, and that a
    prompt of which everything is kept gives what it gives without any of this, the next token too.

    Raises ModelUnsupported.
    """
    try:
        ropes = install(model)
        if not ropes:
            raise ModelUnsupported("Its layers have no rotary positions to set.")
        _check(model, ropes)
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(f"Setting positions failed ({type(error).__name__}: {error}).") from error


def _check(model: Any, ropes: Sequence[PosRoPE]) -> None:
    seen: dict[int, mx.array] = {}

    def look(number: int, before: mx.array, _: mx.array) -> None:
        seen.setdefault(number, before)

    n = len(_CHECK_POSITIONS)
    tokens = mx.array([[1 + i % 7 for i in range(n + 1)]])
    dense = make_prompt_cache(model)
    expected = model(tokens[:, :n], cache=dense)
    sparse = [sparse_cache(layer) for layer in make_prompt_cache(model)]
    for layer in sparse:
        layer.expect(list(range(n)))
        # As if there were gaps.
        layer.offset = RopeOffset(0, mx.arange(n))
    with watched(ropes, look):
        whole = model(tokens[:, :n], cache=sparse)
    _expect(whole, expected, "a prompt kept whole")
    positions = mx.array(_CHECK_POSITIONS)
    for rope in ropes:
        if (x := seen.get(rope.layer)) is not None:
            alone = [rope(x[:, :, i : i + 1], p) for i, p in enumerate(_CHECK_POSITIONS)]
            _expect(rope(x, RopeOffset(0, positions)), mx.concatenate(alone, axis=2), f"layer {rope.layer}")
    # As the batch decodes it.
    ended = dense, [each.finished(n) for each in sparse]
    after = [model(tokens[:, n:], cache=batches.merged([caches])) for caches in ended]
    _expect(after[1], after[0], "the token after it")


def _expect(mine: mx.array, native: mx.array, what: str) -> None:
    if mx.default_device() == mx.cpu:
        same = bool(mx.array_equal(mine, native))
    else:
        off = mx.abs(mine.astype(mx.float32) - native.astype(mx.float32)).max()
        same = bool(off <= _GPU_ROUNDING * mx.abs(native).max().astype(mx.float32))
    if not same:
        raise ModelUnsupported(f"Set positions do not give what native ones do ({what}).")
