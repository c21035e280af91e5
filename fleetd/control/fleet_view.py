"""The body of GET /fleet/v1/peers: the machines of the fleet, and those nearby that are not in it."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.control.model_facts import MeasuredSpeed, ModelShape

PeerState = Literal["usable", "connecting", "quiet", "draining", "unreachable", "refused", "incompatible"]


class PathView(msgspec.Struct, frozen=True):
    """One way to a peer. ``kind``: thunderbolt, wired, wifi, tailscale, loopback or "" where unknown.
    ``private``: ``fleet.plain_links`` of this machine names it."""

    host: str = ""
    port: int = 0
    kind: str = ""
    source: str = ""
    rtt_ms: float | None = None
    bytes_per_s: float | None = None
    in_use: bool = False
    reason: str = ""
    private: bool = False


class PeerModel(msgspec.Struct, frozen=True):
    """A model of a peer."""

    name: str = ""
    # "installed", "loading" or "loaded".
    state: str = ""
    roles: list[str] = []
    digest: str = ""
    # As that machine measured it, and as far as it is believed.
    speed: MeasuredSpeed = MeasuredSpeed()
    # The layers [first, last) that are loaded to help other machines, of a model that is not loaded whole.
    part_first: int = 0
    part_last: int = 0
    # How many layers the model has, and the machines for which that one has these.
    part_total: int = 0
    part_asked_by: str = ""
    # Whether its card claims more than its hardware can do.
    capped: bool = False
    # What it is, as far as that machine knows.
    shape: ModelShape = ModelShape()


class PeerView(msgspec.Struct, frozen=True):
    """A paired machine."""

    node_id: str = ""
    short_id: str = ""
    name: str = ""
    # A ``PeerState``.
    state: str = ""
    # Why the machine cannot be used, and what to do about it; both "" for a usable one.
    reason: str = ""
    hint: str = ""
    # It may see prompts typed on this machine: it is allowed here and by the fleet.
    sees_prompts: bool = False
    # By the rule of this machine.
    allowed_here: bool = False
    # By the rule of the whole fleet.
    allowed_by_fleet: bool = False
    # The machine that added it.
    added_by: str = ""
    # Another machine added it, and no person here has said whether it may see prompts.
    new: bool = False
    # The confirmed machine on whose word it is here; "" if a person here confirmed it.
    through: str = ""
    # Node ids of the machines that are here on its word alone.
    brings: list[str] = []
    software: str = ""
    tier: str = ""
    chip: str = ""
    accelerator: str = ""
    memory_bytes: int = 0
    available_bytes: int = 0
    # Of the available bytes, those that its settings let models take.
    usable_bytes: int = 0
    running: int = 0
    waiting: int = 0
    # Requests for vectors or scores that it computes, or parts of, for itself or others.
    vectors: int = 0
    models: list[PeerModel] = []
    address: str = ""
    rtt_ms: float | None = None
    # Measured over the link; None if not yet.
    bytes_per_s: float | None = None
    # ``bytes_per_s`` was measured beside other work, or long ago.
    link_doubtful: bool = False
    # Seconds since its last message.
    heard_s: float | None = None
    paths: list[PathView] = []

    @property
    def usable(self) -> bool:
        return self.state == "usable"


class Neighbour(msgspec.Struct, frozen=True):
    """A fleetd on this network that is not paired with this one. ``pairing``: it shows a code now."""

    node_id: str = ""
    short_id: str = ""
    name: str = ""
    addresses: list[str] = []
    pairing: bool = False


class UnansweredAddress(msgspec.Struct, frozen=True):
    """An address of the settings at which no usable peer answers, with the reason."""

    address: str = ""
    reason: str = ""
    hint: str = ""


class FleetView(msgspec.Struct, frozen=True):
    """This machine and its fleet."""

    enabled: bool = False
    node_id: str = ""
    short_id: str = ""
    name: str = ""
    host: str = ""
    port: int = 0
    # "running", "starting", "stopped", "off", or why it does not run.
    mdns: str = "off"
    local_only: bool = False
    # Other machines may manage the models here, as far as the settings go.
    manage: bool = False
    # A pairing window is open here.
    pairing: bool = False
    # The machine that unpaired this one; "" if none did.
    removed_by: str = ""
    # Interfaces and networks whose owner has declared them private, and interfaces of these that are not
    # there.
    plain_links: list[str] = []
    missing_links: list[str] = []
    # Names of machines that wait, because a member adds more than it may in a day.
    late: list[str] = []
    peers: list[PeerView] = []
    neighbours: list[Neighbour] = []
    unanswered: list[UnansweredAddress] = []
