"""`fleetctl doctor`: what is wrong, in the user's words, and what to do about it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.client import Client
from fleetctl.connection.home import Address
from fleetctl.connection.replies import read
from fleetctl.doctor import checks_daemon, checks_fleet, checks_local, checks_machine, checks_rdma
from fleetctl.doctor.findings import Finding, Level, fail
from fleetctl.exits import Exit
from fleetctl.render.columns import terminal_width
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import labelled
from fleetd.control.daemon_status import DaemonStatus, HardwareReading
from fleetd.errors import FleetError
from fleetd.text.terminal_text import printable

Check = Callable[[], Finding | list[Finding]]
_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@click.option("--prove", is_flag=True, help="Measure this machine instead, for some ten minutes.")
@click.option(
    "-m",
    "--model",
    metavar="NAME",
    default="",
    help="With --prove: not the default model.",
    shell_complete=completion.models,
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("fleetd-proof.json"),
    show_default=True,
    help="With --prove: where the report is written.",
)
@json_option
@pass_session
def command(session: CliSession, prove: bool, model: str, report: Path) -> int:
    """Check the daemon, its files, the machine and the models; exits 1 when something fails.

    With --prove, measure exactness, speeds, memory and links on the machine as it is, best while it does
    nothing else. The report has no names, addresses or prompts in it: attach it to what you report.
    """
    if prove:
        return _prove(session, model, report)
    address = session.address
    client = session.client()
    findings: list[Finding] = []
    with Progress() as progress:
        status, found = _status(client)
        if status is not None and session.socket is not None and status.home:
            address = Address(home=Path(status.home), socket=address.socket)
        if found is not None:
            findings.append(found)
            _show(session, progress, [found])
        for name, check in _checks(address, client, status):
            progress.update(f"checking {name}")
            found_here = _guarded(name, check)
            findings += found_here
            _show(session, progress, found_here)
    failed = any(finding.level == "fail" for finding in findings)
    if session.json:
        session.emit({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, "")
    else:
        click.echo(_summary(findings))
    return Exit.ERROR if failed else Exit.OK


def _prove(session: CliSession, model: str, report: Path) -> int:
    from fleetctl.doctor import prove
    from fleetctl.render.proof_page import page

    client, home = session.client(), session.address.home
    status, missing = _status(client)
    if status is not None:
        home, model = Path(status.home or home), model or status.default_model
    with Progress() as progress:
        proof, errors = prove.prove(
            home, None if missing else client, model, lambda name: progress.update(f"measuring {name}")
        )
    for error in errors:
        note(error)
    if session.json:
        click.echo(msgspec.json.encode(proof))
    else:
        report.write_bytes(msgspec.json.format(msgspec.json.encode(proof)) + b"\n")
        click.echo(f"{page(proof)}\n\nwritten: {report}")
    return Exit.ERROR if any(step.error for step in proof.steps) else Exit.OK


def _status(client: Client) -> tuple[DaemonStatus | None, Finding | None]:
    """The daemon's status, or the finding that there is none, or that it has another form."""
    try:
        answer = client.get("/fleet/v1/status")
    except FleetError as error:
        return None, fail("daemon", error.message, error.hint)
    try:
        return read(answer, DaemonStatus), None
    except FleetError as error:
        # It runs all the same, and its version tells why.
        version = str(answer.get("version")) if isinstance(answer, dict) else ""
        fix = "Restart it: `fleetctl service install` (or stop and start `fleetd run`)."
        return DaemonStatus(version=version), fail("daemon", error.message, fix)


def _checks(address: Address, client: Client, status: DaemonStatus | None) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check and the check; those of the daemon only if it runs."""
    running = status is not None
    home = address.home
    if status is not None:
        known = status
        yield "daemon", lambda: checks_daemon.daemon(known)
        yield (
            "socket",
            lambda: checks_local.private_file("socket", address.socket, kind="socket", expected=True),
        )
    yield "home", lambda: checks_local.home(home, os.geteuid())
    yield "token", lambda: checks_local.token(address, running=running)
    if status is None:
        yield "port", lambda: checks_local.port_free(checks_local.listen_address(home, os.environ))
    elif http := status.http:
        yield "port", lambda: checks_local.port_answers((http.host, http.port))
    yield "service", lambda: checks_machine.services(home, running=running)
    yield "sleep", checks_machine.wakes
    yield "RDMA", checks_rdma.rdma
    yield "disk", lambda: checks_local.disk(home)
    machine = status.machine if status is not None else HardwareReading()
    yield (
        "memory",
        lambda: checks_local.memory(
            machine.model_available_bytes or None, machine.model_memory_bytes, machine.pressure
        ),
    )
    yield "GPU driver", checks_machine.gpu_files
    yield "clock", lambda: checks_local.clock(home, time.time())
    yield "python", lambda: checks_local.python((sys.version_info.major, sys.version_info.minor))
    yield "MLX", checks_machine.mlx
    if status is not None:
        known = status
        yield "power", lambda: checks_daemon.power(known)
        yield "ollama", lambda: checks_daemon.ollama(known)
        yield "models", lambda: checks_daemon.digests(known)
        yield "engines", lambda: checks_daemon.engines(known)
        yield "the fleet", lambda: checks_fleet.check(client)
        yield "models", lambda: checks_daemon.models(client)
        yield "the default model", lambda: checks_daemon.default_model(client, known)


def _guarded(name: str, check: Check) -> list[Finding]:
    """The findings of a check; an OSError becomes a finding, so that the other checks still run."""
    try:
        found = check()
    except OSError as error:
        return [fail(name, f"This could not be checked: {error}", "Try it as the user that runs the daemon.")]
    return found if isinstance(found, list) else [found]


def _show(session: CliSession, progress: Progress, findings: list[Finding]) -> None:
    if session.json:
        return
    progress.clear()
    width = terminal_width()
    for finding in findings:
        mark = click.style(f"{finding.level:<6}", fg=_COLOURS[finding.level])
        said = labelled("", f"{printable(finding.name)}: {printable(finding.what)}", width, 6)
        click.echo(mark + said[6:])
        if finding.fix:
            click.echo(labelled("      →", printable(finding.fix), width, 8))


def _summary(findings: list[Finding]) -> str:
    failed, warned = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
    if failed:
        return f"\n{failed} of {len(findings)} checks failed."
    return f"\nAll well{f', with {warned} remarks' if warned > 1 else ', with one remark' if warned else ''}."
