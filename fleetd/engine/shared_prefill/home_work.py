"""The home's own part of a shared prefill, by the kind of split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd.engine.layers.stage import Stage
from fleetd.engine.shared_prefill.home_part import HomePart
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.layers_at_home import LayersAtHome
from fleetd.engine.shared_prefill.tokens_at_home import TokensAtHome
from fleetd.plan.prefill.split import Split, SplitKind

_WORK: dict[SplitKind, type[HomePart]] = {"layers": LayersAtHome, "tokens": TokensAtHome}


def home_work(
    stage: Stage, layout: KvLayout, split: Split, prompt: mx.array, prefix: Sequence[Any] | None
) -> HomePart:
    """The work of ``split``'s last machine.

    Args:
        prompt: (1, T), all of the split's tokens.
        prefix: private caches of the cached ones.
    """
    return _WORK[split.kind](stage, layout, split, prompt, prefix)
