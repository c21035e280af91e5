"""Workers and daemons whose speeds are set instead of measured, for tests of what real daemons decide.

The tests share their processors with each other: what is measured there says how busy they were, and the same
prompt would be planned in one way now and in another one then. Speeds follow from a model's size, every path
between machines is as fast, and nothing that a request takes corrects any of it. All are slow, so that
deadlines, which come from them, are long.

Calibration, corrections and probes have tests of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

# Bytes of weights that are computed with in a second of prefill, by the token, and of decoding.
PREFILL_BYTES_PER_S, DECODE_BYTES_PER_S = 60e9, 6e9
MOST_PREFILL_TOK_S, MOST_DECODE_TOK_S = 5_000.0, 100.0
VECTORS_TOK_S = 2_000.0
RTT_S, BYTES_PER_S = 0.0005, 200e6
# A daemon with this variable believes that its links carry so many bytes per second.
LINKS = "FLEETD_TEST_LINKS"
# A plain step in one layer of a machine of a group, and on the way there and back. A folder named by STEPS
# may have a file for each machine with the seconds of one of its layers, "this" for the one that answers.
LAYER_S, WAY_S = 0.001, 0.0005
STEPS = "FLEETD_TEST_STEPS"
# Helpers have to agree within this, whatever a shared prompt gains: a busy machine needs longer than that.
AGREE_S = 20.0
# How long is waited for scores and helpers, for a disk, and for another machine's look at its own: other
# tests use the same processors and the same disk.
LIMITS = {
    "SMART_GRACE_S": 300.0,
    "SHARE_SETUP_S": AGREE_S,
    "SHARE_GRACE_S": 20.0,
    # A stream's headers name its plan, however late a busy machine comes to it.
    "HEADERS_PLAN_S": 20.0,
    "CACHE_LOOKUP_S": 30.0,
    "CACHE_BLOCK_S": 60.0,
    "FETCH_LOOK_S": 30.0,
    "FETCH_LOOK_SHARE": 1e9,
    "FETCH_FIND_S": 30.0,
    "FETCH_DECIDE_S": 60.0,
    "FETCH_BLOCK_S": 60.0,
    # A thread that beats may wait for its turn on a busy machine.
    "GROUP_SILENT_S": 10.0,
    "GROUP_LOOKUP_S": 60.0,
    # Idle for so long, a model over machines may be cut anew.
    "GROUP_RECUT_IDLE_S": 1.0,
    "RANK_STALL_S": 8.0,
    "RANK_SILENT_S": 15.0,
    # Behind all other tests a worker for vectors would have no turn.
    "VECTOR_NICE": 0,
    "VECTOR_GRACE_S": 300.0,
    # A first pairing imports a good deal on both sides.
    "PAIRING_STEP_S": 60.0,
    "PEER_HANDSHAKE_S": 60.0,
}


def install() -> None:
    """Called in the process that all programs are forked from."""
    from fleetd.engine.groups.step_times import StepTimes
    from fleetd.engine.load import loading
    from fleetd.engine.vectors import vector_loading
    from fleetd.fleet.service import Fleet
    from fleetd.plan.model_speeds import ModelSpeeds
    from fleetd.plan.speed_corrections import SpeedCorrections
    from fleetd.requests.members.members import Member
    from fleetd.requests.prefill_sharing import client as sharing
    from fleetd.requests.vectors.machines import VectorMachines

    loading.calibrate = _speeds
    found = Fleet.machines

    def machines(self: Fleet) -> Iterator[Member]:
        for member in found(self):
            known = member.bytes_per_s > 0
            carries = float(os.environ.get(LINKS, BYTES_PER_S))
            yield replace(member, rtt_s=RTT_S, bytes_per_s=carries) if known else member

    Fleet.machines = machines
    sharing._SETUP_LEAST_S = AGREE_S
    ModelSpeeds.ran = _nothing
    SpeedCorrections.ran = _nothing
    StepTimes.add = _set_step(StepTimes.add)
    vector_loading._pace = lambda *_: VECTORS_TOK_S
    VectorMachines.learn = _nothing


def _speeds(model: Any, *_: Any) -> Any:
    """In the place of ``calibrate``."""
    from mlx.utils import tree_flatten

    from fleetd.control.model_facts import MeasuredSpeed
    from fleetd.engine.measure.calibrate import CHUNKS, Measurement

    n_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    prefill_tok_s = min(MOST_PREFILL_TOK_S, PREFILL_BYTES_PER_S / n_bytes)
    speed = MeasuredSpeed(prefill_tok_s, min(MOST_DECODE_TOK_S, DECODE_BYTES_PER_S / n_bytes))
    return Measurement(speed, chunk_s={size: size / prefill_tok_s for size in CHUNKS})


def _set_step(add: Callable[..., None]) -> Callable[..., None]:
    """``StepTimes.add`` with seconds that are set."""

    def added(self: Any, tokens: int, *_: Any) -> None:
        layer_s, folder = LAYER_S, os.environ.get(STEPS)
        if folder and (chosen := Path(folder) / (self.name or "this")).exists():
            layer_s = float(chosen.read_text())
        add(self, tokens, layer_s * (self.last - self.first), WAY_S if self.name else 0.0)

    return added


def _nothing(*_: Any, **__: Any) -> None: ...
