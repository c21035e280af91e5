"""A model is described once: whatever speaks of a model passes the description on."""

from __future__ import annotations

import ast

import msgspec
import pytest

from bench import structure
from fleetd.control.daemon_status import EngineStatus
from fleetd.control.fleet_view import PeerModel
from fleetd.control.hardware_proof import ModelProof
from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.engine.measure.calibrate import Measurement
from fleetd.engine.protocol import Heartbeat, MeasuredAgain, Ready
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.route import Candidate

FACTS = {name for kind in (ModelShape, MeasuredSpeed, StateSizes) for name in kind.__struct_fields__}
# What a figure passes on its way from the worker that measures it to the planner and to people.
ON_THE_WAY = (
    Measurement,
    MeasuredAgain,
    Ready,
    Heartbeat,
    EngineStatus,
    ModelCard,
    PeerModel,
    ModelProof,
    Candidate,
    PrefillSize,
    HelperSpec,
)


@pytest.mark.parametrize("kind", ON_THE_WAY, ids=lambda kind: kind.__name__)
def test_a_new_figure_is_declared_nowhere_else(kind: type[msgspec.Struct]) -> None:
    assert not FACTS & set(kind.__struct_fields__)


def test_only_the_shape_and_the_speed_describe_a_model() -> None:
    sources = structure.of_working_tree()
    trees = {path: ast.parse(text) for path, text in sources.items() if structure.is_daemon(path)}
    home = "fleetd/control/model_facts.py"
    assert structure.descriptions(trees) == [f"{home}:ModelShape", f"{home}:MeasuredSpeed"]


def test_the_facts_that_are_counted_are_those_of_today() -> None:
    """Older revisions called some of them otherwise, so names are added and never taken away."""
    figures = {*MeasuredSpeed.__struct_fields__} - {"doubt"}
    assert figures | {"layers", "hidden_bytes", "weights_bytes", "token_bytes"} <= structure.FACTS
