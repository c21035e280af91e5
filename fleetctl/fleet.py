"""What the daemon tells about its fleet, as far as fleetctl shows it.

Every field has a default and unknown ones are ignored, so that a fleetctl and a daemon of neighbouring
versions understand each other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fleetctl.client import Client
from fleetctl.exits import DaemonFailed
from fleetctl.fleet_words import label, summary

DEFAULT_PEER_PORT = 8115


class Path(msgspec.Struct, frozen=True):
    host: str = ""
    kind: str = ""
    in_use: bool = False
    reason: str = ""


class Model(msgspec.Struct, frozen=True):
    name: str = ""
    state: str = ""
    part_first: int = 0
    part_last: int = 0


class Peer(msgspec.Struct, frozen=True):
    node_id: str = ""
    short_id: str = ""
    name: str = ""
    state: str = ""
    reason: str = ""
    hint: str = ""
    sees_prompts: bool = False
    tier: str = ""
    memory_bytes: int = 0
    available_bytes: int = 0
    running: int = 0
    waiting: int = 0
    models: list[Model] = []
    rtt_ms: float | None = None
    bytes_per_s: float | None = None
    paths: list[Path] = []

    @property
    def usable(self) -> bool:
        return self.state == "usable"

    @property
    def label(self) -> str:
        return label(self.name, self.short_id)


class Neighbour(msgspec.Struct, frozen=True):
    node_id: str = ""
    short_id: str = ""
    name: str = ""
    addresses: list[str] = []
    pairing: bool = False

    @property
    def label(self) -> str:
        return label(self.name, self.short_id)


class Configured(msgspec.Struct, frozen=True):
    address: str = ""
    reason: str = ""
    hint: str = ""


class Fleet(msgspec.Struct, frozen=True):
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
    peers: list[Peer] = []
    neighbours: list[Neighbour] = []
    unanswered: list[Configured] = []

    @property
    def label(self) -> str:
        return label(self.name, self.short_id)

    @property
    def summary(self) -> str:
        return summary(
            self.label,
            port=self.port,
            usable=sum(peer.usable for peer in self.peers),
            peers=len(self.peers),
            mdns=self.mdns,
            local_only=self.local_only,
            pairing=self.pairing,
        )


T = TypeVar("T")


def read(value: Any, kind: type[T]) -> T:
    """A decoded answer as ``kind``.

    Raises:
        DaemonFailed: it is something else, so the daemon is of another version.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DaemonFailed(
            f"The daemon's answer is not what this fleetctl knows: {error}.",
            hint="`fleetctl doctor` compares their versions.",
        ) from error


def fetch(client: Client) -> Fleet:
    return read(client.get("/fleet/v1/peers"), Fleet)
