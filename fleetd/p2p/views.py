"""The bodies of ``/fleet/v1/peers``, pair and join: the fleet as people and programs see it. Data only."""

from __future__ import annotations

from typing import Literal

import msgspec

PeerState = Literal["usable", "connecting", "quiet", "draining", "unreachable", "refused", "incompatible"]


class PathView(msgspec.Struct, frozen=True):
    """One path to a peer. ``kind``: thunderbolt, wired, wifi, tailscale, loopback or "" where unknown."""

    host: str
    port: int
    kind: str = ""
    source: str = ""
    rtt_ms: float | None = None
    bytes_per_s: float | None = None
    in_use: bool = False
    reason: str = ""


class PeerModel(msgspec.Struct, frozen=True):
    """A model there, of which layers [``part_first``, ``part_last``) may be loaded to help others."""

    name: str
    state: Literal["installed", "loading", "loaded"]
    roles: list[str] = []
    digest: str = ""
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    part_first: int = 0
    part_last: int = 0


class PeerView(msgspec.Struct, frozen=True):
    """A paired machine. ``reason`` and ``hint`` say why it cannot be used; both are "" for a usable one."""

    node_id: str
    short_id: str
    name: str
    state: PeerState
    reason: str = ""
    hint: str = ""
    sees_prompts: bool = False
    added_by: str = ""
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
    heard_s: float | None = None
    paths: list[PathView] = []


class Neighbour(msgspec.Struct, frozen=True):
    """A fleetd seen on this network that is not paired with this one."""

    node_id: str
    short_id: str
    name: str
    addresses: list[str] = []
    pairing: bool = False


class Configured(msgspec.Struct, frozen=True):
    """An address that the settings name and where no usable peer answers, with the reason."""

    address: str
    reason: str
    hint: str = ""


class FleetView(msgspec.Struct, frozen=True):
    """``mdns``: "running", "off", or why it does not run. ``removed_by``: what unpaired this machine."""

    enabled: bool
    node_id: str = ""
    short_id: str = ""
    name: str = ""
    host: str = ""
    port: int = 0
    mdns: str = "off"
    local_only: bool = False
    pairing: bool = False
    removed_by: str = ""
    peers: list[PeerView] = []
    neighbours: list[Neighbour] = []
    unanswered: list[Configured] = []


# ---- Pairing, as it happens ------------------------------------------------------------------------------


class CodeShown(msgspec.Struct, frozen=True, tag="code"):
    """The window is open: type this code on the other machine. ``tries`` wrong ones close it."""

    code: str
    expires_s: float
    tries: int
    name: str
    port: int
    addresses: list[str]


class WrongCode(msgspec.Struct, frozen=True, tag="wrong_code"):
    """Another machine tried a wrong code."""

    tries_left: int


class Meeting(msgspec.Struct, frozen=True, tag="meeting"):
    """Both sides had the code. The phrase must be the same on both screens."""

    node_id: str
    short_id: str
    name: str
    phrase: str


class Paired(msgspec.Struct, frozen=True, tag="paired"):
    """Both machines have the pairing on disk. ``members``: names of all machines in the fleet."""

    node_id: str
    short_id: str
    name: str
    sees_prompts: bool
    members: list[str]


class Searching(msgspec.Struct, frozen=True, tag="searching"):
    """``join`` searches for the machine that shows this code."""

    nameplate: str


PairingEvent = CodeShown | WrongCode | Meeting | Paired | Searching


class Unpaired(msgspec.Struct, frozen=True):
    """``told``: names of the machines that know already; ``pending`` ones learn it when they connect."""

    node_id: str
    name: str
    told: list[str]
    pending: list[str]
