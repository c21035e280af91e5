"""How fast some of a model's layers are here, told as what the whole model would take at their pace.

A planner prices shares of a model, so it needs no other figures for a machine that has only a share of it.
Measured as a whole model is, on hidden states where that has tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.calibrate import Calibration, Measurement
from fleetd.engine.shared_prefill.fingerprint import probe
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.plan.chip_speeds import compiles_late


class PartCalibration(Calibration):
    """Measures these layers as a model is measured, and tells what the whole one would take."""

    def __init__(
        self, stage: Stage, layout: KvLayout, context_tokens: int, budget_s: float, *, device: str = "cpu"
    ) -> None:
        stage = stage.prefilling
        late = compiles_late(device)
        super().__init__(_PartModel(stage, layout), 1, context_tokens, budget_s, compiles=late)
        self._whole = stage.prefilled / (stage.last - stage.first)

    def found(self) -> Measurement:
        """Decoding is left out: it is not done in parts."""
        held = super().found()
        return replace(held, speed=replace(held.speed.slower_prefill(self._whole), decode_tok_s=0.0))


class _PartModel:
    """The layers as calibration calls a model: of the tokens, only their number counts."""

    def __init__(self, stage: Stage, layout: KvLayout) -> None:
        self._stage = stage
        # Different hidden states: a mixture of experts would send equal ones all the same way.
        self._hidden = probe(layout)

    def make_cache(self) -> list[Any]:
        return [cache for cache in self._stage.make_caches() if cache is not None]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        count = tokens.shape[1]
        times = -(-count // self._hidden.shape[1])
        hidden = mx.tile(self._hidden, (1, times, 1))[:, :count]
        # All tokens alike, and where they are does not change what they cost.
        inputs = self._stage.inputs(mx.zeros((1, count), mx.int32), 0)
        out = self._stage.run(hidden, self._stage.spread(cache), inputs)
        # What the last layer makes is sent on: here it is no less work than what the others make.
        mx.eval(out)
        return out
