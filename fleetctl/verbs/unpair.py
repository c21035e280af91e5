"""`fleetctl unpair`: remove a machine from the fleet."""

from __future__ import annotations

import sys

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.exits import ClientError, Exit
from fleetctl.render.fleet_words import label_of
from fleetctl.render.text import one_line
from fleetctl.replies import fetch_fleet, read
from fleetd.control.fleet_view import FleetView
from fleetd.control.pairing_events import Unpaired
from fleetd.errors import InvalidValue


@click.command("unpair")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@pass_session
def command(session: CliSession, name: str, yes: bool) -> int:
    """Remove a machine (its name or id) from the fleet; every other member hears of it."""
    client = session.client()
    shown = _refuse_self(fetch_fleet(client), name)
    if not yes:
        if session.json or not sys.stdin.isatty():
            raise click.UsageError(f"This removes {one_line(name)}; say --yes where no person can be asked.")
        if not click.confirm(f"Remove {shown} from the fleet?", err=True):
            raise ClientError(f"{shown} stays.")
    done = client.post("/fleet/v1/unpair", {"peer": name})
    session.emit(done, lambda: _said(read(done, Unpaired)))
    return Exit.OK


def _refuse_self(fleet: FleetView, name: str) -> str:
    """The label of the machine called ``name``. Raises InvalidValue if it is this machine."""
    key = name.lower()
    for peer in fleet.peers:
        if key in (peer.name.lower(), peer.short_id, peer.node_id):
            return label_of(peer)
    if fleet.enabled and key in (fleet.name.lower(), fleet.short_id, fleet.node_id):
        raise InvalidValue(
            f"{label_of(fleet)} is this machine.",
            hint=f"On another machine of the fleet: `fleetctl unpair {one_line(fleet.short_id)}`. "
            "To keep to itself alone, set fleet.enabled = false in fleetd.toml.",
        )
    return one_line(name)


def _said(done: Unpaired) -> str:
    lines = [f"{one_line(done.name)} is not in the fleet any more."]
    if done.told:
        lines.append(f"Told: {_names(done.told)}.")
    if done.pending:
        lines.append(f"Away, and told when next seen: {_names(done.pending)}.")
    return "\n".join(lines)


def _names(names: list[str]) -> str:
    return ", ".join(one_line(name) for name in names)
