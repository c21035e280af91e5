"""Names of models and machines for Tab: asked of the daemon, with a short limit; none without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fleetctl.cli import CliSession
from fleetctl.connection.client import Client
from fleetd.errors import FleetError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# A shell waits for this after each Tab, in seconds.
_LIMIT_S = 0.5


def models(context: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """The models of this machine and of others that begin so."""
    return _items(model_names(_session(context).client(), _LIMIT_S), begun)


def machines(context: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """The other machines of the fleet whose names begin so."""
    try:
        found = _session(context).client().call("GET", "/fleet/v1/peers", timeout_s=_LIMIT_S)
        names = [str(peer["name"]) for peer in found.get("peers") or ()]
    except (FleetError, OSError, KeyError, TypeError, AttributeError):
        names = []
    return _items(names, begun)


def model_names(client: Client, limit_s: float) -> list[str]:
    """The models that can be asked now, of all machines; none if the daemon does not say so in time."""
    try:
        found = client.call("GET", "/v1/models", timeout_s=limit_s)
        return [str(model["id"]) for model in found["data"]]
    except (FleetError, OSError, KeyError, TypeError):
        return []


def _session(context: click.Context) -> CliSession:
    """The global options as they were typed before the Tab."""
    session = CliSession()
    given = context.find_root().params
    session.home, session.socket = given.get("home"), given.get("socket")
    return session


def _items(names: list[str], begun: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    # A name with a control character could paint on the terminal.
    return [CompletionItem(name) for name in names if name.startswith(begun) and name.isprintable()]
