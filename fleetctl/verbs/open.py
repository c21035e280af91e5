"""`fleetctl open`: the fleet on one page, in the browser of this machine."""

from __future__ import annotations

import os
import sys
import webbrowser
from html import escape
from pathlib import Path

import click

from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.replies import read
from fleetd import limits
from fleetd.control.page_login import PageTicket

_FILE = "open.html"
_PRIVATE = 0o600


@click.command("open")
@click.option("--no-browser", is_flag=True, help="Print the link and open nothing.")
@json_option
@pass_session
def command(session: CliSession, no_browser: bool) -> None:
    """Open the page of this machine's daemon, which shows the whole fleet.

    The link logs in one browser, once, within 30 seconds. Whoever opens it may do what the page can do.
    """
    reply = session.client().post("/fleet/v1/page/ticket", {})
    ticket = read(reply, PageTicket)
    session.emit(reply, ticket.url)
    note(f"This link works once, within {limits.PAGE_TICKET_S:.0f} seconds.")
    if session.json or no_browser or not _has_screen():
        return
    if not _open(session.address.socket.parent / _FILE, ticket.url):
        note("No browser was opened: open the link yourself.")


def _has_screen() -> bool:
    # Elsewhere `webbrowser` would start a text browser in this terminal.
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open(file: Path, url: str) -> bool:
    """Open a link without naming it on a command line, which every user of the machine can read.

    The file that names it stays behind: by the time that anybody looks for it the link is dead.
    """
    link = escape(url, quote=True)
    text = f'<!doctype html><meta http-equiv="refresh" content="0;url={link}"><a href="{link}">The fleet</a>'
    try:
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w") as out:
            out.write(text)
        return webbrowser.open(file.as_uri())
    except (OSError, webbrowser.Error):
        return False
