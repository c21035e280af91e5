"""`fleetctl pair`: open a window, show the code, and let in who has it."""

from __future__ import annotations

import time
from contextlib import closing

import click

from fleetctl.cli import Session, json_option, note, pass_session
from fleetctl.exits import ClientError, Exit
from fleetctl.fleet import DEFAULT_PEER_PORT
from fleetctl.pairing import (
    Code,
    Meeting,
    Paired,
    WrongCode,
    events,
    members_line,
    need_a_person,
    show_phrase,
)
from fleetctl.progress import Progress
from fleetctl.text import duration, one_line
from fleetd.host_port import host_port

# The daemon names the most useful first; a list of all would bury the code.
_ADDRESSES = 3
_WAITING = "waiting for the other machine"


@click.command("pair")
@click.option("-y", "--yes", is_flag=True, help="Let in whoever has the code, without asking.")
@click.option("--no-prompts", is_flag=True, help="The new machine may not see prompts.")
@json_option
@pass_session
def command(session: Session, yes: bool, no_prompts: bool) -> int:
    """Let another machine into this fleet: shows a code to type there with `fleetctl join`.

    The code works once. Ctrl-C closes the window.
    """
    if not yes:
        need_a_person(session, "--yes to let in whoever has the code")
    ends = 0.0
    try:
        with Progress() as progress, closing(events(session, "/fleet/v1/pair", {})) as happening:
            for event in happening:
                progress.clear()
                match event:
                    case Code():
                        _show_code(session, event)
                        ends = time.monotonic() + event.expires_s
                        progress.update(_WAITING, left_s=event.expires_s)
                    case WrongCode(tries_left=left):
                        note(f"Somebody tried a wrong code; {left} {'try' if left == 1 else 'tries'} left.")
                        progress.update(_WAITING, left_s=ends - time.monotonic())
                    case Meeting():
                        _answer(session, event, yes=yes, prompts=not no_prompts)
                        progress.update(f"waiting for {event.label}")
                    case Paired():
                        _show_paired(session, event)
    except (KeyboardInterrupt, click.Abort):
        note("\nThe window is closed. `fleetctl peers` tells who is in.")
        return Exit.INTERRUPTED
    return Exit.OK


def _show_code(session: Session, shown: Code) -> None:
    if session.json:
        return
    code = click.style(one_line(shown.code), bold=True)
    click.echo(f"\n    {code}\n")
    within = duration(shown.expires_s).removesuffix(" 0 s")
    click.echo(f"On the machine that joins {one_line(shown.name)}, type within {within}:\n")
    click.echo(f"    fleetctl join {code}\n")
    if shown.addresses:
        click.echo("If it does not find this machine by itself (another network, no multicast):\n")
        for address in shown.addresses[:_ADDRESSES]:
            click.echo(f"    fleetctl join {code} --host {_host(address, shown.port)}")
        click.echo()


def _host(address: str, port: int) -> str:
    address = one_line(address)
    if port == DEFAULT_PEER_PORT:
        return address
    return host_port(address, port)


def _answer(session: Session, met: Meeting, *, yes: bool, prompts: bool) -> None:
    """Ask the two questions, and tell the daemon; raises ClientError when this machine is not let in."""
    if not session.json:
        note(f"{met.label} has the code. This phrase has to be on both screens:")
        show_phrase(met.phrase)
    same = yes or click.confirm("Is it on the other screen?", default=None, err=True)
    if same and prompts and not yes:
        name = one_line(met.name)
        prompts = click.confirm(f"May {name} see prompts? Only then can it help with them.", True, err=True)
    body = {"node_id": met.node_id, "admit": same, "sees_prompts": same and prompts}
    session.client().post("/fleet/v1/pair/answer", body)
    if not same:
        raise ClientError(
            f"{met.label} was not let in.",
            hint="Another phrase means that somebody is in between: find out who before you pair again.",
        )


def _show_paired(session: Session, paired: Paired) -> None:
    if not session.json:
        may = "may see prompts" if paired.sees_prompts else "sees no prompts"
        click.echo(f"{paired.label} is paired and {may}. {members_line(paired.members)}")
