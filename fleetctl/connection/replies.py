"""The daemon's JSON answers as structs of the control schema."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fleetctl.connection.client import Client
from fleetctl.exits import DaemonFailed
from fleetd.control.fleet_view import FleetView
from fleetd.text.decoding import from_plain

T = TypeVar("T")


def read(value: Any, kind: type[T]) -> T:
    """A decoded answer as ``kind``.

    Raises:
        DaemonFailed: it does not have that form, so the daemon is of another version.
    """
    try:
        return from_plain(value, kind)
    except msgspec.ValidationError as error:
        raise DaemonFailed(
            f"The daemon's answer is not what this fleetctl knows: {error}.",
            hint="`fleetctl doctor` compares their versions.",
        ) from error


def fetch_fleet(client: Client) -> FleetView:
    return read(client.get("/fleet/v1/peers"), FleetView)
