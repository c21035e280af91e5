"""`fleetctl cache`: what is kept of prompts on this machine's disk, and throwing it away."""

from __future__ import annotations

import sys

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.replies import read
from fleetctl.exits import ClientError
from fleetctl.render.text import clause, count, duration, one_line, size, table
from fleetd.control.cache_report import CacheReport, MachineFetches, ModelBlocks

_HEADER = ("MODEL", "TOKENS", "SIZE", "HITS", "RESTORED", "SAVED", "WRITTEN")
_MACHINES = ("MACHINE", "FETCHED", "SIZE", "HITS", "FAILED", "TOOK", "PLANNED", "SAVED", "SENT")


@click.group("cache", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context) -> None:
    """Show what is kept of prompts on this machine's disk, or throw it away."""
    if context.invoked_subcommand is None:
        context.invoke(show)


@command.command("show")
@json_option
@pass_session
def show(session: CliSession) -> None:
    """Show sizes and what they were good for, by model (the default).

    TOKENS and SIZE are on the disk now. HITS counts prompts whose beginning was read from it, of RESTORED
    tokens in all; SAVED is how much longer computing those would have taken, as predicted. WRITTEN is what
    the disk has had to take since the beginning.

    Below, since the daemon's start, what other machines sent (FETCHED are tokens) and got (SENT are bytes);
    TOOK is how long that was, PLANNED how long it should have been.
    """
    report = session.client().get("/fleet/v1/cache")
    session.emit(report, lambda: render(read(report, CacheReport)))


@command.command("clear", short_help="Throw away what is kept of prompts")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@pass_session
def clear(session: CliSession, yes: bool) -> None:
    """Throw away the key of the kept prompts, then the files; prompts kept in memory go, too.

    What is left of the files on the disk cannot be read by anybody.
    """
    client = session.client()
    if not yes:
        if session.json or not sys.stdin.isatty():
            raise click.UsageError("This throws kept prompts away; say --yes where no person can be asked.")
        if not click.confirm("Throw away all kept prompts of this machine?", err=True):
            raise ClientError("They stay.")
    gone = client.post("/fleet/v1/cache/clear", {})
    session.emit(gone, lambda: f"{size(read(gone, CacheReport).n_bytes)} of kept prompts are gone.")


def render(report: CacheReport) -> str:
    """The whole page."""
    if not report.on:
        return "Nothing is kept on the disk (cache.disk is off)."
    speeds = [
        f"{what} at {size(bytes_per_s)}/s"
        for what, bytes_per_s in (
            ("read", report.read_bytes_per_s),
            ("from the system's memory", report.cached_bytes_per_s),
        )
        if bytes_per_s
    ]
    where = f"{size(report.n_bytes)} of {size(report.quota_bytes)} in {one_line(report.folder)}"
    lines = [", ".join([where, *speeds])]
    if report.note:
        lines.append(f"Nothing is written at the moment: {clause(report.note)}.")
    if report.models:
        lines += [
            "",
            table(_HEADER, [_cells(model) for model in report.models], right=range(1, len(_HEADER))),
        ]
    if report.machines:
        rows = [_machine_cells(each) for each in report.machines]
        lines += ["", table(_MACHINES, rows, right=range(1, len(_MACHINES)))]
    return "\n".join(lines)


def _machine_cells(each: MachineFetches) -> tuple[str, ...]:
    return (
        one_line(each.machine),
        count(each.tokens),
        size(each.n_bytes),
        count(each.prompts),
        count(each.failed),
        duration(each.took_s),
        duration(each.predicted_s),
        duration(each.saved_s),
        size(each.sent_bytes),
    )


def _cells(model: ModelBlocks) -> tuple[str, ...]:
    return (
        one_line(model.model),
        count(model.block_tokens),
        size(model.n_bytes),
        count(model.hits),
        count(model.restored_tokens),
        duration(model.saved_s),
        size(model.written_bytes),
    )
