"""From a verified folder to one rank's part of every layer.

mlx-lm builds the model with every tensor still on disk, and its own ``shard`` says which part of each is this
rank's. Tensors are then read one after the other: no more than one is whole in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

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
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.protocol import Loading, Ready
from fleetd.engine.ranks import dividing, ring
from fleetd.engine.settings import RingPlace, WorkerSettings
from fleetd.models.memory_need import WORKING_BYTES


class LoadedRank(msgspec.Struct, frozen=True):
    """What a rank that answers nothing has, and what it tells of itself. ``ring``: the group of all ranks.
    ``sizes``: of a sequence."""

    stage: Stage
    ring: Any
    sizes: StateSizes
    facts: Ready


def load_rank(
    settings: WorkerSettings,
    place: RingPlace,
    progress: PassProgress,
    device: Device,
    report: Callable[[Loading], None],
) -> LoadedRank:
    """Verify, join the ring, read, and see that the ring's sums are right.

    Raises as ``stage_loading.load_stage``, and MemberLost if the other ranks do not come.
    """
    begun = time.monotonic()
    config, path = verified_config(settings, report), Path(settings.path)
    files = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    room = memory_budget(device, settings)
    weights = HeldWeights.of(settings, config, device, room, files)
    report(Loading("joining"))
    group = ring.joined(place, progress)
    with readable(path) as folder, little_besides(path, weights.expected, device):
        model = lazy_model(folder, config)
        stage = dividing.divided(model, group).without_head()
        del model
        need = weights.bytes_of(stage.weights, tied=False)
        admit_weights(f"{settings.name}, rank {place.rank} of {place.size},", need, room)
        report(Loading("reading", 0, need))
        dividing.read_singly(stage.weights)
        weights.hold(stage.weights)
        report(Loading("reading", need, need))
    report(Loading("waiting for the other ranks"))
    begun_rank = dividing.begin_together(stage, group, progress)
    keep_weights(device, settings)
    held = stage.weights_bytes
    shape = ModelShape(
        architecture=str(config.get("model_type", "unknown")),
        weights_bytes=held,
        context_tokens=context_tokens(config),
        cpu_arithmetic=weights.arithmetic,
        layers=stage.total,
        sizes=begun_rank.sizes,
        unshareable="This process is one rank of a group.",
    )
    facts = Ready(
        device=device,
        shape=shape,
        vocab_size=int(stage.args.vocab_size),
        kv_budget_bytes=max(0, room.usable_bytes - held - WORKING_BYTES),
        has_chat_template=False,
        tool_calls=False,
        reasoning=False,
        load_s=time.monotonic() - begun,
        versions=versions(weights.arithmetic),
        last_layer=stage.total,
        sum_s=begun_rank.sum_s,
    )
    return LoadedRank(stage, group, begun_rank.sizes, facts)
