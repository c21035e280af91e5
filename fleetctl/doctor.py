"""`fleetctl doctor`: what is wrong, in the user's words, and what to do about it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from fleetctl import checks_daemon, checks_fleet, checks_local, checks_machine
from fleetctl.cli import Session, json_option, pass_session
from fleetctl.client import Client
from fleetctl.exits import Exit
from fleetctl.findings import Finding, Level, fail
from fleetctl.home import Address
from fleetctl.progress import Progress
from fleetctl.text import printable
from fleetd.errors import FleetError

Check = Callable[[], Finding | list[Finding]]
_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@json_option
@pass_session
def command(session: Session) -> int:
    """Check the daemon, its files, the machine and the models; exits 1 when something fails."""
    address = session.address
    client = session.client()
    findings: list[Finding] = []
    with Progress() as progress:
        status, found = _status(client)
        if status is not None and session.socket is not None and status.get("home"):
            address = Address(home=Path(status["home"]), socket=address.socket)
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


def _status(client: Client) -> tuple[dict[str, Any] | None, Finding | None]:
    """The daemon's status, or the finding that there is none."""
    try:
        return client.get("/fleet/v1/status"), None
    except FleetError as error:
        return None, fail("daemon", error.message, error.hint)


def _checks(address: Address, client: Client, status: dict[str, Any] | None) -> Iterator[tuple[str, Check]]:
    """All checks in the order in which a person would look; those of the daemon only while it runs."""
    running = status is not None
    home, machine = address.home, (status or {}).get("machine") or {}
    if status is not None:
        known = status
        yield "daemon", lambda: checks_daemon.daemon(known)
        yield (
            "socket",
            lambda: checks_local.private_file("socket", address.socket, kind="socket", expected=True),
        )
    yield "home", lambda: checks_local.home(home, os.geteuid())
    yield "token", lambda: checks_local.token(address, running=running)
    http = (status or {}).get("http")
    if not running:
        yield "port", lambda: checks_local.port_free(checks_local.listen_address(home, os.environ))
    elif http:
        yield "port", lambda: checks_local.port_answers((str(http["host"]), int(http["port"])))
    yield "service", lambda: checks_machine.services(running=running)
    yield "disk", lambda: checks_local.disk(home)
    yield "memory", lambda: checks_local.memory(machine.get("available_bytes"), machine.get("memory_bytes"))
    yield "clock", lambda: checks_local.clock(home, time.time())
    yield "python", lambda: checks_local.python((sys.version_info.major, sys.version_info.minor))
    yield "MLX", checks_machine.mlx
    if status is not None:
        known = status
        yield "engines", lambda: checks_daemon.engines(known)
        yield "the fleet", lambda: checks_fleet.check(client)
        yield "the default model", lambda: checks_daemon.default_model(client, known)


def _guarded(name: str, check: Check) -> list[Finding]:
    """A check that cannot be made is a finding, not the end of the others."""
    try:
        found = check()
    except OSError as error:
        return [fail(name, f"This could not be checked: {error}", "Try it as the user that runs the daemon.")]
    return found if isinstance(found, list) else [found]


def _show(session: Session, progress: Progress, findings: list[Finding]) -> None:
    if session.json:
        return
    progress.clear()
    for finding in findings:
        mark = click.style(f"{finding.level:<5}", fg=_COLOURS[finding.level])
        click.echo(f"{mark} {printable(finding.name)}: {printable(finding.what)}")
        if finding.fix:
            click.echo(f"      → {printable(finding.fix)}")


def _summary(findings: list[Finding]) -> str:
    failed, warned = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
    if failed:
        return f"\n{failed} of {len(findings)} checks failed."
    return f"\nAll well{f', with {warned} remarks' if warned > 1 else ', with one remark' if warned else ''}."
