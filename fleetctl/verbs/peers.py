"""`fleetctl peers`: the machines of the fleet, once or live, and which of them may see prompts."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.client import Client
from fleetctl.connection.replies import fetch_fleet, read
from fleetctl.exits import Exit
from fleetctl.render.columns import terminal_width
from fleetctl.render.fleet_words import label_of
from fleetctl.render.peers_table import render
from fleetctl.render.progress_line import live_terminal
from fleetctl.render.text import one_line, wrapped
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.errors import FleetError
from fleetd.text.terminal_text import json_text

_EVERY_S = 0.5
# Figures that differ in every answer.
_FIGURES = {"rtt_ms", "bytes_per_s", "heard_s", "available_bytes", *MeasuredSpeed.__struct_fields__} - {
    "doubt"
}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@click.group("peers", invoke_without_command=True)
@click.option("-w", "--watch", is_flag=True, help="Keep showing it; a pipe gets each change once.")
@json_option
@click.pass_context
def command(context: click.Context, watch: bool) -> int:
    """Show the machines of the fleet: what they have, what they do, and why one cannot be used."""
    session = context.ensure_object(CliSession)
    if context.invoked_subcommand is not None:
        return Exit.OK
    client = session.client()
    if not watch:
        found = client.get("/fleet/v1/peers")
        session.emit(found, lambda: render(read(found, FleetView), terminal_width()))
        return Exit.OK
    if session.json or not (live_terminal(sys.stdout) and sys.stdin.isatty()):
        return _follow(session, client)
    fetch_fleet(client)  # A daemon that cannot be reached at all is an error, not a page.
    from fleetctl.render.live_page import watch as show

    return show(lambda columns: _page(client, columns))


@command.command("prompts", short_help="Say whether a machine may see prompts")
@click.argument("name", shell_complete=completion.machines)
@click.argument("allowed", type=click.Choice(["yes", "no"]))
@click.option("--fleet", is_flag=True, help="Prompts of every machine of the fleet, not only of this one.")
@json_option
@pass_session
def prompts(session: CliSession, name: str, allowed: str, fleet: bool) -> None:
    """Say whether a machine may see prompts typed on this one: only then can it help with them.

    It sees them if this machine and the fleet both allow it.
    """
    body = {"peer": name, "allowed": allowed == "yes", "fleet": fleet}
    answered = session.client().post("/fleet/v1/peers/prompts", body)
    session.emit(answered, lambda: _prompts_line(read(answered, PeerView)))


def _prompts_line(peer: PeerView) -> str:
    here = "may see" if peer.sees_prompts else "sees no"
    line = f"{label_of(peer)} {here} prompts typed here."
    if not peer.allowed_by_fleet:
        line += " The fleet does not allow it; `--fleet` changes that."
    elif not peer.allowed_here:
        line += " This machine alone does not allow it."
    return line


def _page(client: Client, columns: int) -> str:
    """The page or, while the daemon restarts, the error."""
    try:
        return render(fetch_fleet(client), columns)
    except FleetError as error:
        said = [wrapped(one_line(text), columns) for text in (error.message, error.hint)]
        return "\n".join([click.style("error", fg="red"), *said, "", "Trying again."])


def _follow(session: CliSession, client: Client) -> int:
    """Print the whole page after each change, for files and pipes; never returns."""
    last: Any = None
    while True:
        found = client.get("/fleet/v1/peers")
        fleet = read(found, FleetView)
        if (now := _essence(found)) != last:
            last = now
            if session.json:
                click.echo(json_text(found))
            else:
                click.echo(f"{time.strftime('%H:%M:%S')} {render(fleet, None)}\n")
        time.sleep(_EVERY_S)


def _essence(value: Any) -> Any:
    """The value without the figures that change even if nothing happens, for comparison."""
    if isinstance(value, dict):
        return {
            key: _NUMBER.sub("#", part) if key == "reason" and isinstance(part, str) else _essence(part)
            for key, part in value.items()
            if key not in _FIGURES
        }
    return [_essence(part) for part in value] if isinstance(value, list) else value
