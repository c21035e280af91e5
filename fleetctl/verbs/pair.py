"""`fleetctl pair`: open a pairing window, show the code, and admit the machine that has it."""

from __future__ import annotations

import time
from contextlib import closing

import click

from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.exits import ClientError, Exit
from fleetctl.pairing import events, members_line, need_a_person, show_phrase
from fleetctl.render.fleet_words import label_of
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import duration, one_line
from fleetd.control.pairing_events import CodeShown, Crowded, Meeting, Paired, WrongCode
from fleetd.text.host_port import host_port

DEFAULT_PEER_PORT = 8115
# The daemon names the most useful addresses first; a list of all would hide the code.
_ADDRESSES = 3
_WAITING = "waiting for the other machine"


@click.command("pair")
@click.option("-y", "--yes", is_flag=True, help="Admit the machine that has the code, without asking.")
@click.option("--no-prompts", is_flag=True, help="The new machine may not see prompts typed on any machine.")
@json_option
@pass_session
def command(session: CliSession, yes: bool, no_prompts: bool) -> int:
    """Let another machine into this fleet: shows a code to type there with `fleetctl join`.

    The code works once. Ctrl-C closes the window.
    """
    if not yes:
        need_a_person(session, "--yes to admit the machine that has the code")
    ends = 0.0
    try:
        with Progress() as progress, closing(events(session, "/fleet/v1/pair", {})) as happening:
            for event in happening:
                progress.clear()
                match event:
                    case CodeShown():
                        _show_code(session, event)
                        ends = time.monotonic() + event.expires_s
                        progress.update(_WAITING, left_s=event.expires_s)
                    case WrongCode(tries_left=left):
                        tries = "try" if left == 1 else "tries"
                        note(f"Another machine tried a wrong code; {left} {tries} left.")
                        progress.update(_WAITING, left_s=ends - time.monotonic())
                    case Crowded(addresses=addresses):
                        note(_crowd(addresses))
                        progress.update(_WAITING, left_s=ends - time.monotonic())
                    case Meeting():
                        _answer(session, event, yes=yes, prompts=not no_prompts)
                        progress.update(f"waiting for {label_of(event)}")
                    case Paired():
                        _show_paired(session, event)
    except (KeyboardInterrupt, click.Abort):
        note("\nThe window is closed. `fleetctl peers` tells who is in.")
        return Exit.INTERRUPTED
    return Exit.OK


def _show_code(session: CliSession, shown: CodeShown) -> None:
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


def _crowd(addresses: list[str]) -> str:
    return (
        f"Many connections come from {', '.join(map(one_line, addresses))} and do not try the code. "
        "The oldest are closed for new ones. If the other machine does not get through, look for what "
        "runs there."
    )


def _host(address: str, port: int) -> str:
    address = one_line(address)
    if port == DEFAULT_PEER_PORT:
        return address
    return host_port(address, port)


def _answer(session: CliSession, met: Meeting, *, yes: bool, prompts: bool) -> None:
    """Ask the two questions and send the answer. Raises ClientError if the machine is refused."""
    if not session.json:
        note(f"{label_of(met)} has the code. This phrase has to be on both screens:")
        show_phrase(met.phrase)
    same = yes or click.confirm("Is it on the other screen?", default=None, err=True)
    if same and prompts and not yes:
        name = one_line(met.name)
        question = f"May {name} see prompts of this fleet? Only then can it help with them."
        prompts = click.confirm(question, True, err=True)
    body = {"node_id": met.node_id, "admit": same, "sees_prompts": same and prompts}
    session.client().post("/fleet/v1/pair/answer", body)
    if not same:
        raise ClientError(
            f"{label_of(met)} was not let in.",
            hint="Different phrases mean that another machine is in between: find it before you pair again.",
        )


def _show_paired(session: CliSession, paired: Paired) -> None:
    if not session.json:
        may = "may see prompts" if paired.sees_prompts else "sees no prompts of the fleet"
        click.echo(f"{label_of(paired)} is paired and {may}. {members_line(paired)}")
