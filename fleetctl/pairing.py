"""The parts that `pair` and `join` share: the events of a pairing, and what is shown of them."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import click

from fleetctl.cli import CliSession, note
from fleetctl.connection.replies import read
from fleetctl.exits import ConnectionBroken
from fleetctl.render.text import one_line
from fleetd.control.pairing_events import Paired, PairingEvent
from fleetd.text.terminal_text import json_text


def events(session: CliSession, path: str, body: dict[str, Any]) -> Generator[PairingEvent, None, None]:
    """Yield the events of a pairing until it is complete; with --json, print each as a line on stdout.

    Closing the generator cancels the pairing: the daemon closes the window, or ends the search.
    """
    with session.client().stream(path, body) as stream:
        for report in stream.reports():
            if session.json:
                click.echo(json_text(report))
            # The tag tells the kind of event.
            event: PairingEvent = read(report, PairingEvent)  # type: ignore[arg-type]
            yield event
            if isinstance(event, Paired):
                return
    raise ConnectionBroken(
        "The daemon ended the pairing before it was complete.",
        hint="`fleetctl peers` tells whether the machines know each other.",
    )


def need_a_person(session: CliSession, instead: str) -> None:
    """Raise UsageError if no person can answer questions here; ``instead`` names the options to give."""
    if session.json or not sys.stdin.isatty():
        raise click.UsageError(f"No person can be asked here: say {instead}.")


def show_phrase(phrase: str) -> None:
    note("\n    " + click.style(one_line(phrase), bold=True) + "\n")


def members_line(paired: Paired) -> str:
    """The machines of the fleet, and which of them came with the other one."""
    line = f"The fleet: {names_line(paired.members)}."
    if paired.brought:
        brings = f"On its word: {names_line(paired.brought)}"
        line += f" {brings}. What came so sees no prompts typed here until `fleetctl peers prompts NAME yes`."
    return line


def names_line(names: list[str]) -> str:
    return ", ".join(one_line(name) for name in names)
