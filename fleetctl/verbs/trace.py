"""`fleetctl trace`: past requests, and one of them step by step, on whichever machines it ran."""

from __future__ import annotations

from typing import Any

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.render.columns import terminal_width
from fleetctl.render.text import one_line
from fleetctl.render.trace_page import SHORT_ID_CHARS, listing, page
from fleetd import limits
from fleetd.control.prefill_trace import TracesView
from fleetd.errors import InvalidValue, NotFound


@click.command("trace")
@click.argument("request", required=False)
@click.option(
    "--last",
    type=click.IntRange(1, limits.TRACES),
    metavar="N",
    default=20,
    show_default=True,
    help="How many requests to list.",
)
@json_option
@pass_session
def command(session: CliSession, request: str | None, last: int) -> None:
    """Show how past requests went, against what was planned; with a REQUEST each step of it.

    Listed are the newest requests that came to this machine, from its users or from other machines. One that
    another machine answered has that machine's steps, too, and its id there. REQUEST is an id as
    X-Fleet-Request gives it, or a part of it, as the list shows it. Prompts and answers are never recorded.
    """
    client = session.client()
    if request is None:
        found = _fetch(client, last=last)
        session.emit(found, lambda: listing(read(found, TracesView).traces, terminal_width()))
        return
    found = _find(client, request)
    pages = read({"traces": found}, TracesView).traces
    session.emit(
        found[0] if len(found) == 1 else {"traces": found},
        lambda: "\n\n".join(page(trace, terminal_width()) for trace in pages),
    )


def _find(client: Client, request: str) -> list[Any]:
    """The traces of the only answer whose id contains ``request``. Raises NotFound, InvalidValue.

    Each answer to a request has an id of its own, and one that came from another machine is longer there. One
    whose prompt was shortened first and then read together with others has two traces.
    """
    known = _fetch(client, last=limits.TRACES).get("traces", [])
    found = [trace for trace in known if request in str(trace.get("id"))]
    if not found or len(request) < SHORT_ID_CHARS // 2:
        raise NotFound(
            f"There is no trace of a request {one_line(request)}.",
            hint=f"The newest {limits.TRACES} are kept: `fleetctl trace` lists them.",
        )
    ids = list(dict.fromkeys(one_line(str(trace.get("id"))) for trace in found))
    if len(ids) > 1:
        several = ", ".join(ids[:5])
        raise InvalidValue(f"Several requests are called like that: {several}.", hint="Give more of it.")
    return found


def _fetch(client: Client, *, last: int) -> Any:
    """The daemon's answer as it came. Raises DaemonFailed if fleetctl cannot read it."""
    found = client.get(f"/fleet/v1/traces?last={last}")
    read(found, TracesView)
    return found
