"""One pass of all ranks over the same tokens. Every rank computes it with this function: the sums of a ring
are matched by their order alone, which is that of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.failures import MemberLost, typed
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import ring
from fleetd.errors import GroupLost


def run_pass(
    stage: Stage, tokens: mx.array, caches: Sequence[Any], start: int, group: Any, progress: PassProgress
) -> mx.array:
    """Tokens (B, T) to hidden states (B, T, D) behind the last layer, evaluated. Raises MemberLost.

    ``caches``: of layers that keep something. ``start``: position of the first token of a sequence.
    ``group``: of all ranks. Every so many passes its sums are checked; all ranks count alike.
    """
    try:
        with progress.passing(tokens.size), ring.lost_ranks():
            inputs = stage.inputs(tokens, start)
            hidden = stage.run(stage.embed(tokens), stage.spread(caches), inputs)
            mx.eval(hidden)
    except Exception as error:
        # The others are in this pass and stay there: sums of the next one would be added to theirs.
        known = typed(error, "A pass could not be computed")
        raise MemberLost(GroupLost(f"A rank failed in the middle of a pass: {known.message}")) from error
    if not progress.done % limits.RANK_CANARY_PASSES:
        ring.check(group, progress, progress.done, within_s=progress.allowed_s(1))
    return hidden
