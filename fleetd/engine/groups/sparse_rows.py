"""Prompts of which tokens are left out, over several machines: every layer has to know where each token is.

The positions travel with the hidden states. Each machine rotates queries and keys by them, as the whole model
does (``sparse_prefill``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.messages import Copy, GoOn, LeaveOut
from fleetd.engine.groups.remote_rows import RemoteKind, RemoteRows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import register
from fleetd.engine.sparse_prefill.rope import install
from fleetd.engine.sparse_prefill.sparse import Sparse, check_positions, tail_tokens
from fleetd.engine.sparse_prefill.sparse_caches import dense_beginning, sparse_cache


class SparseRemote(RemoteRows):
    """What a member keeps of such a prompt; ``tokens`` counts those that were not left out."""

    def __init__(self, dense: RemoteRows) -> None:
        super().__init__(dense.there, dense.tokens)
        self._positions: list[int] = []

    def expect(self, positions: Sequence[int]) -> None:
        """The next pass computes tokens at ``positions``, ascending."""
        self._positions = list(positions)

    def next_positions(self) -> list[int]:
        found, self._positions = self._positions, []
        return found

    def finished(self, position: int) -> SparseRemote:
        """Decoding goes on at ``position``."""
        self.there.tell(GoOn(self.number, position))
        return self


register(SparseRemote, RemoteKind())


@sparse_cache.register
def _sparse(dense: RemoteRows) -> SparseRemote:
    made = SparseRemote(dense)
    if dense.tokens:
        made.there.tell(Copy(dense.number, made.number))
    made.there.tell(LeaveOut(made.number))
    return made


@dense_beginning.register
def _dense(cache: RemoteRows, tokens: int) -> RemoteRows | None:
    return cache.copy(tokens) if not cache.there.kept.windows else None


class _FrontLayers:
    """This machine's layers, for the check of positions: tokens to hidden states."""

    def __init__(self, front: Stage) -> None:
        self._front, self.layers = front, front.weights.layers

    def make_cache(self) -> list[Any]:
        return [cache for cache in self._front.make_caches() if cache is not None]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        inputs = self._front.inputs(tokens, int(cache[0].offset) if tokens.shape[0] == 1 else 0)
        return self._front.run(self._front.embed(tokens), self._front.spread(cache), inputs)


def sparse_of(model: GroupModel, *, checked: bool = False) -> Sparse:
    """The group as ``Sparse.of`` gives a whole model. What this machine's layers make of positions is checked
    here; members' layers are run by the same code.

    Raises ModelUnsupported.
    """
    kind, front = str(model.front.args.model_type), _FrontLayers(model.front)
    tail = tail_tokens(kind, model.front.architecture, model.empty)
    if checked:
        install(front)
    else:
        check_positions(front)
    return Sparse(model, tail)
