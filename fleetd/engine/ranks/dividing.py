"""The part of each layer that one rank has, as mlx-lm divides them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.nn.layers import distributed
from mlx.utils import tree_flatten

from fleetd.control.model_facts import StateSizes
from fleetd.engine.failures import over_files
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import ring, sum_time
from fleetd.engine.ranks.rank_pass import run_pass
from fleetd.engine.sequence_state.parts import sizes as sizes_of
from fleetd.errors import ModelUnsupported

WARM_UP_TOKENS = 8
_DIVIDED = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)


@over_files("The model's layers cannot be divided", RuntimeError)
def divided(model: Any, group: Any) -> Stage:
    """All layers of one of mlx-lm's models, of each of which only this rank's part stays. Reads no weights.

    Raises ModelUnsupported if mlx-lm cannot divide such a model, or by so many ranks.
    """
    if not hasattr(model, "shard"):
        raise ModelUnsupported(
            "Layers of models of this kind cannot be divided between machines.",
            hint="Deal its layers out: fleetctl models load NAME --on this,OTHER --split layers",
        )
    model.shard(group)
    stage = Stage.of(model)
    if any(isinstance(stage.weights.get("lm_head"), kind) for kind in _DIVIDED):
        raise ModelUnsupported(
            "The head of this model would be divided too; here it is whole on the machine that answers."
        )
    return stage


def read_singly(weights: nn.Module) -> None:
    """Read what stays of each tensor, one after the other: all of it is in memory only meanwhile."""
    for _, array in tree_flatten(weights.parameters()):
        mx.eval(array)


class BegunRank(msgspec.Struct, frozen=True):
    """``sizes``: what a sequence takes on this rank. ``sum_s``: seconds of one sum over all ranks."""

    sizes: StateSizes
    sum_s: float


def begin_together(stage: Stage, group: Any, progress: PassProgress) -> BegunRank:
    """Every rank comes here once its weights are read, waits for the others, sees that sums of the ring are
    right, makes a first pass with them, and measures how long a sum takes. Raises MemberLost."""
    ring.check(group, progress)
    caches = [cache for cache in stage.make_caches() if cache is not None]
    hidden = run_pass(stage, mx.array([[1] * WARM_UP_TOKENS]), caches, 0, group, progress)
    return BegunRank(sizes_of(caches), sum_time.measured(group, hidden[:, -1:], progress))
