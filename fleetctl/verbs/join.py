"""`fleetctl join`: enter the fleet of a machine that shows a code."""

from __future__ import annotations

from contextlib import closing

import click

from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.exits import Exit
from fleetctl.pairing import events, members_line, need_a_person, show_phrase
from fleetctl.render.fleet_words import label_of
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import one_line
from fleetd.control.pairing_code import code_parts
from fleetd.control.pairing_events import Meeting, Paired, Searching


@click.command("join")
@click.argument("code")
@click.option("--host", metavar="HOST[:PORT]", help="Where the machine is, if it is not found by itself.")
@click.option("-y", "--yes", is_flag=True, help="That machine may see prompts typed on this one; do not ask.")
@click.option("--no-prompts", is_flag=True, help="That machine may not see prompts typed on this one.")
@json_option
@pass_session
def command(session: CliSession, code: str, host: str | None, yes: bool, no_prompts: bool) -> int:
    """Join the fleet of the machine on which `fleetctl pair` shows CODE."""
    code_parts(code)  # before anything is asked
    sees_prompts = not no_prompts
    if not yes and not no_prompts:
        need_a_person(session, "--yes or --no-prompts")
        question = "May the machine that shows this code see prompts typed on this one?"
        sees_prompts = click.confirm(question, True, err=True)
    body = {"code": code, "sees_prompts": sees_prompts, **({"host": host} if host else {})}
    try:
        with Progress() as progress, closing(events(session, "/fleet/v1/join", body)) as happening:
            for event in happening:
                progress.clear()
                match event:
                    case Searching():
                        where = one_line(host) if host else "this network"
                        progress.update(f"looking on {where} for the machine that shows {one_line(code)}")
                    case Meeting():
                        _show_meeting(session, event)
                        progress.update(f"waiting for the answer on {one_line(event.name)}")
                    case Paired():
                        _show_paired(session, event)
                    case _:
                        pass  # Codes are the other side's.
    except KeyboardInterrupt:
        note("\nStopped. `fleetctl peers` tells whether this machine is in.")
        return Exit.INTERRUPTED
    return Exit.OK


def _show_meeting(session: CliSession, met: Meeting) -> None:
    if not session.json:
        note(f"Found {label_of(met)}. This phrase has to be on both screens; if it is not, press Ctrl-C:")
        show_phrase(met.phrase)


def _show_paired(session: CliSession, paired: Paired) -> None:
    if not session.json:
        kept = "" if paired.sees_prompts else "It sees no prompts typed here. "
        click.echo(f"This machine is paired with {label_of(paired)}. {kept}{members_line(paired)}")
