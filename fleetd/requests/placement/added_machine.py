"""A machine that is not there, as if it were paired and idle and had loaded the model."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from fleetd import limits
from fleetd.config import EngineSettings
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.hardware.memory import metal_limit
from fleetd.p2p.links import usual_speed
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan.known_machines import KnownMachine
from fleetd.requests.members.members import Member

AddedLink = Literal["wired", "wifi", "thunderbolt"]


def added_member(machine: KnownMachine, link: AddedLink, model: ModelCard) -> Member:
    """The machine as a member of the fleet.

    Args:
        model: as this machine has it. Layers that do not fit the other machine are not loaded there.
    """
    limit = metal_limit(machine.memory_bytes, 0) if machine.accelerator == "metal" else machine.memory_bytes
    most = int(limit * EngineSettings().memory_fraction)
    there = _loaded(model, most)
    free = most - held_bytes(there)
    rtt_s, bytes_per_s = usual_speed(link)
    card = Card(
        "added",
        0,
        0,
        name=machine.name,
        machine=MachineFacts(
            product=machine.name,
            chip=machine.chip,
            memory_bytes=machine.memory_bytes,
            accelerator=machine.accelerator,
        ),
        models=[replace(there, kv_budget_bytes=max(0, free))],
        available_bytes=max(0, free),
        usable_bytes=max(0, free),
        max_streams=limits.SHARE_MACHINES,
    )
    return Member(card, machine.name, rtt_s=rtt_s, bytes_per_s=bytes_per_s)


def held_bytes(model: ModelCard) -> int:
    """Bytes of the weights that are loaded."""
    if model.state == "loaded":
        return model.shape.weights_bytes
    return model.shape.outside_bytes + model.part_last * model.shape.layer_bytes


def _loaded(model: ModelCard, most_bytes: int) -> ModelCard:
    """The model as loaded in so much memory: whole if that is enough, or else its first layers."""
    shape = model.shape
    # Its own engine would measure another speed.
    bare = replace(model, speed=MeasuredSpeed(), load_s=0.0, part_first=0, part_last=0)
    # Keys and values of some prompts have to fit beside the weights.
    room = int(most_bytes * (1 - limits.PREFIX_SHARE / 2))
    if shape.weights_bytes <= room:
        return replace(bare, state="loaded")
    layers = (room - shape.outside_bytes) // max(1, shape.layer_bytes)
    return replace(bare, state="installed", part_last=max(0, min(layers, shape.layers - 1)))
