"""From a verified folder to the weights of some layers: only theirs are ever read.

mlx-lm builds the model with every tensor still on disk; the stage takes the parts that it needs, the rest is
dropped unread, and what stays is read and kept as ``loading`` keeps a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from fleetd.engine import cpu
from fleetd.engine.loading import (
    Device,
    expanded_bytes,
    kv_bytes_per_token,
    lazy_model,
    usable_bytes,
    verified_config,
)
from fleetd.engine.memory import admit_weights
from fleetd.engine.protocol import Loading
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.stage import Stage

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LoadedStage:
    stage: Stage
    # Of hidden states.
    dtype: str
    # Over the stage's layers.
    kv_bytes_per_token: int


def load_stage(
    settings: WorkerSettings, device: Device, report: Callable[[Loading], None], *, first: int, last: int
) -> LoadedStage:
    """Verify, read layers [first, last) and warm up.

    Raises:
        ModelCorrupt, ModelRefused: from ``verify``.
        ModelUnsupported: an architecture that mlx-lm does not have or that cannot be cut.
        InvalidValue: the model has no such layers.
        OutOfMemory: refused before reading.
    """
    config = verified_config(settings, report)
    whole = Stage.of(lazy_model(Path(settings.path), config))
    # The embedding decides it; to know it, none is computed.
    dtype = mx.float32 if device == "cpu" else whole.embed(mx.array([[0]])).dtype
    stage = whole.part(first, last)
    del whole
    on_disk = stage.weights_bytes
    admit_weights(
        f"{settings.name}, layers {first} to {last} of {stage.total},",
        expanded_bytes(on_disk, config, device),
        usable_bytes(device, settings),
    )
    report(Loading("reading", 0, on_disk))
    if device == "cpu":
        cpu.to_float32(stage.weights)
    mx.eval(stage.weights.parameters())
    report(Loading("reading", on_disk, on_disk))
    report(Loading("warming up"))
    caches = stage.make_caches()
    mx.eval(stage.run(mx.zeros((1, WARM_UP_TOKENS, stage.args.hidden_size), dtype), caches))
    return LoadedStage(stage, str(dtype).removeprefix("mlx.core."), kv_bytes_per_token(caches))
