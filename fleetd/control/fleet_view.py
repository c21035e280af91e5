"""The body of GET /fleet/v1/peers: the machines of the fleet, and those nearby that are not in it."""

from __future__ import annotations

from typing import Literal

import msgspec

PeerState = Literal["usable", "connecting", "quiet", "draining", "unreachable", "refused", "incompatible"]


class PathView(msgspec.Struct, frozen=True):
    """One way to a peer. ``kind``: thunderbolt, wired, wifi, tailscale, loopback or "" where unknown."""

    host: str = ""
    port: int = 0
    kind: str = ""
    source: str = ""
    rtt_ms: float | None = None
    bytes_per_s: float | None = None
    in_use: bool = False
    reason: str = ""


class PeerModel(msgspec.Struct, frozen=True):
    """A model of a peer. ``state``: installed, loading or loaded.

    Of a model that is not loaded whole, the layers [``part_first``, ``part_last``) may be loaded to help
    other machines. ``doubtful``: its speeds, as measured, may be wrong. ``capped``: its card
    claims more than its hardware can do; the speeds here are those that are believed.
    """

    name: str = ""
    state: str = ""
    roles: list[str] = []
    digest: str = ""
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    part_first: int = 0
    part_last: int = 0
    doubtful: bool = False
    capped: bool = False


class PeerView(msgspec.Struct, frozen=True):
    """A paired machine; ``state`` is a ``PeerState``.

    ``reason`` and ``hint`` say why the machine cannot be used; both are "" for a usable one. ``heard_s``:
    seconds since its last message. ``link_doubtful``: ``bytes_per_s`` was measured beside other work, or long
    ago. ``sees_prompts``: prompts typed on this machine, because it is both ``allowed_here``, by this
    machine's own rule, and ``allowed_by_fleet``. ``new``: another machine added it, and no person here has
    said whether it may see prompts; ``through``: the name of the machine that a person here did confirm, on
    whose word it is here, "" for one that is confirmed itself. ``brings``: node ids of the machines that are
    here on its word alone.
    """

    node_id: str = ""
    short_id: str = ""
    name: str = ""
    state: str = ""
    reason: str = ""
    hint: str = ""
    sees_prompts: bool = False
    allowed_here: bool = False
    allowed_by_fleet: bool = False
    added_by: str = ""
    new: bool = False
    through: str = ""
    brings: list[str] = []
    software: str = ""
    tier: str = ""
    chip: str = ""
    accelerator: str = ""
    memory_bytes: int = 0
    available_bytes: int = 0
    running: int = 0
    waiting: int = 0
    models: list[PeerModel] = []
    address: str = ""
    rtt_ms: float | None = None
    bytes_per_s: float | None = None
    link_doubtful: bool = False
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
    """This machine and its fleet.

    ``mdns``: "running", "starting", "stopped", "off", or why it does not run. ``removed_by``: the machine
    that unpaired this one. ``pairing``: a pairing window is open here. ``late``: names of machines that wait,
    because a member adds more than it may in a day.
    """

    enabled: bool = False
    node_id: str = ""
    short_id: str = ""
    name: str = ""
    host: str = ""
    port: int = 0
    mdns: str = "off"
    local_only: bool = False
    pairing: bool = False
    removed_by: str = ""
    late: list[str] = []
    peers: list[PeerView] = []
    neighbours: list[Neighbour] = []
    unanswered: list[UnansweredAddress] = []
