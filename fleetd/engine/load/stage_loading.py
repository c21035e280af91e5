"""From a verified folder to the weights of some layers: only theirs are ever read.

mlx-lm builds the model with every tensor still on disk; the stage takes the parts that it needs, the rest is
dropped unread, and what stays is read and kept as ``model_reading`` keeps a whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx_lm.utils import load_config

from fleetd import limits
from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.load_findings import versions
from fleetd.engine.load.model_reading import (
    Device,
    HeldWeights,
    context_tokens,
    keep_weights,
    lazy_model,
    little_besides,
    memory_budget,
    verified_config,
)
from fleetd.engine.load.readable_folder import readable
from fleetd.engine.measure.memory import admit_weights
from fleetd.engine.protocol import Loading, Ready
from fleetd.engine.sequence_state.parts import sizes as sizes_of
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill.part_speeds import PartCalibration
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.errors import ModelCorrupt
from fleetd.models import layer_files
from fleetd.models.memory_need import WORKING_BYTES

WARM_UP_TOKENS = 8


class LoadedStage(msgspec.Struct, frozen=True):
    stage: Stage
    # The dtype of hidden states.
    dtype: str
    # "float32" or "int8"; "" on a GPU.
    arithmetic: str
    # Of a sequence, over the stage's layers.
    sizes: StateSizes


class LoadedPart(msgspec.Struct, frozen=True):
    """What a worker that only helps has, and what it tells of itself."""

    sharable: Sharable
    facts: Ready


def load_stage(
    settings: WorkerSettings,
    device: Device,
    report: Callable[[Loading], None],
    *,
    first: int,
    last: int,
    head: bool = True,
) -> LoadedStage:
    """Verify, read layers [first, last) and warm up. ``head``: with the last layer, what makes logits, too.

    Raises:
        ModelCorrupt, ModelRefused: from ``verify``; ModelCorrupt also for files of which more is built.
        ModelUnsupported: an architecture that mlx-lm does not have or that cannot be cut.
        InvalidValue: the model has no such layers.
        OutOfMemory: refused before reading.
    """
    config, path = verified_config(settings, report), Path(settings.path)
    files = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    room = memory_budget(device, settings)
    weights = HeldWeights.of(settings, config, device, room, files)
    with readable(path) as place, little_besides(path, weights.expected, device):
        whole = Stage.of(lazy_model(place, config))
        # The embedding decides it; to know it, none is computed.
        dtype = mx.float32 if device == "cpu" else whole.embed(mx.array([[0]])).dtype
        stage = whole.part(first, last) if head else whole.part(first, last).without_head()
        del whole
        on_disk = stage.weights_bytes
        if not layer_files.has_layers(path, first, last):
            raise ModelCorrupt(f"Layers {first} to {last} of this model are not in {path}.")
        admit_weights(
            f"{settings.name}, layers {first} to {last} of {stage.total},",
            weights.bytes_of(stage.weights, tied=stage.is_tied),
            room,
        )
        report(Loading("reading", 0, on_disk))
        weights.hold(stage.weights)
        report(Loading("reading", on_disk, on_disk))
    report(Loading("warming up"))
    caches = stage.make_caches()
    inputs = stage.inputs(mx.zeros((1, WARM_UP_TOKENS), mx.int32), 0)
    mx.eval(stage.run(mx.zeros((1, WARM_UP_TOKENS, stage.width), dtype), caches, inputs))
    return LoadedStage(stage, str(dtype).removeprefix("mlx.core."), weights.arithmetic, sizes_of(caches))


def load_part(settings: WorkerSettings, device: Device, report: Callable[[Loading], None]) -> LoadedPart:
    """The layers that ``settings`` name, for a worker that only helps; raises as ``load_stage``."""
    begun = time.monotonic()
    usable = memory_budget(device, settings).usable_bytes
    # It runs layers for others, who make the logits.
    loaded = load_stage(
        settings, device, report, first=settings.first_layer, last=settings.last_layer, head=False
    )
    stage = loaded.stage
    sharable = Sharable.of(stage, device, versions(loaded.arithmetic))
    with readable(Path(settings.path)) as place:
        config = load_config(place)
    report(Loading("measuring"))
    context, weights = context_tokens(config), stage.weights_bytes
    measured = PartCalibration(stage, sharable.layout, context, limits.CALIBRATE_S, device=device).measured()
    keep_weights(device, settings)
    shape = ModelShape(
        architecture=str(config.get("model_type", "unknown")),
        weights_bytes=weights,
        context_tokens=context,
        dtype=loaded.dtype,
        cpu_arithmetic=loaded.arithmetic,
        sizes=loaded.sizes,
    )
    return LoadedPart(
        sharable,
        Ready(
            device=device,
            shape=sharable.described(shape),
            vocab_size=int(stage.args.vocab_size),
            # Nothing is kept for a next prompt.
            kv_budget_bytes=max(0, usable - weights - WORKING_BYTES),
            has_chat_template=False,
            tool_calls=False,
            reasoning=False,
            load_s=time.monotonic() - begun,
            versions=versions(loaded.arithmetic),
            speed=measured.speed,
            first_layer=stage.first,
            last_layer=stage.last,
            arithmetic=sharable.arithmetic,
        ),
    )
