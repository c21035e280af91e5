"""`fleetctl unpair`: remove a machine from the fleet."""

from __future__ import annotations

import sys

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.replies import fetch_fleet, read
from fleetctl.exits import ClientError, Exit
from fleetctl.render.fleet_words import label_of
from fleetctl.render.text import one_line
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.pairing_events import Unpaired
from fleetd.errors import InvalidValue


@click.command("unpair")
@click.argument("name", shell_complete=completion.machines)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--keep", multiple=True, metavar="NAME", help="A machine that stays; may be given several times."
)
@json_option
@pass_session
def command(session: CliSession, name: str, yes: bool, keep: tuple[str, ...]) -> int:
    """Remove a machine (its name or id) from the fleet; every other member hears of it.

    Machines that are here on its word alone go with it, unless they are kept.
    """
    client = session.client()
    fleet = fetch_fleet(client)
    peer = _find(fleet, name)
    shown = label_of(peer) if peer is not None else one_line(name)
    brings = [each for each in fleet.peers if peer is not None and each.node_id in peer.brings]
    kept = list(keep)
    if not yes:
        if session.json or not sys.stdin.isatty():
            also = f", and with it (unless --keep) {_names([each.name for each in brings])}" if brings else ""
            raise click.UsageError(
                f"This removes {one_line(name)}{also}; say --yes where no person can be asked."
            )
        if not click.confirm(f"Remove {shown} from the fleet?", err=True):
            raise ClientError(f"{shown} stays.")
        kept += _kept([each for each in brings if not _named(each, keep)], shown)
    done = client.post("/fleet/v1/unpair", {"peer": name, **({"keep": kept} if kept else {})})
    session.emit(done, lambda: _said(read(done, Unpaired)))
    return Exit.OK


def _kept(brings: list[PeerView], by: str) -> list[str]:
    """The ids of those that the person here keeps."""
    why = f"is here on the word of {by} alone, and goes with it. Keep it?"
    return [each.node_id for each in brings if click.confirm(f"{label_of(each)} {why}", False, err=True)]


def _named(peer: PeerView, names: tuple[str, ...]) -> bool:
    return any(name.lower() in (peer.name.lower(), peer.short_id, peer.node_id) for name in names)


def _find(fleet: FleetView, name: str) -> PeerView | None:
    """The machine called ``name``, if there is one. Raises InvalidValue if it is this machine."""
    key = name.lower()
    for peer in fleet.peers:
        if _named(peer, (name,)):
            return peer
    if fleet.enabled and key in (fleet.name.lower(), fleet.short_id, fleet.node_id):
        raise InvalidValue(
            f"{label_of(fleet)} is this machine.",
            hint=f"On another machine of the fleet: `fleetctl unpair {one_line(fleet.short_id)}`. "
            "To keep to itself alone, set fleet.enabled = false in fleetd.toml.",
        )
    return None


def _said(done: Unpaired) -> str:
    lines = [f"{one_line(done.name)} is not in the fleet any more."]
    if done.gone:
        lines.append(f"Gone with it, as they were here on its word alone: {_names(done.gone)}.")
    if done.kept:
        lines.append(
            f"Kept, without prompts typed here: {_names(done.kept)}. A machine where no person has allowed "
            "this one has to be paired with it again: `fleetctl pair`."
        )
    if done.told:
        lines.append(f"Told: {_names(done.told)}.")
    if done.pending:
        lines.append(f"Away, and told when next seen: {_names(done.pending)}.")
    return "\n".join(lines)


def _names(names: list[str]) -> str:
    return ", ".join(one_line(name) for name in names)
