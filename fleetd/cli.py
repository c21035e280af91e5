"""The ``fleetd`` command. ``fleetctl`` is the client; this starts the daemon and shows its settings.

Exit codes: 0 stopped as asked · 1 any other failure · 2 a setting or option is wrong · 3 already running on
this home · 4 an address is taken · 5 the socket path is too long.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetd import __version__, config
from fleetd.errors import AlreadyRunning, ConfigError, FleetError, PortInUse, SocketPathTooLong
from fleetd.process import supported
from fleetd.startup import collector, lean_imports
from fleetd.storage import paths
from fleetd.text.terminal_text import json_text, printable

EXIT_CODES: tuple[tuple[type[FleetError], int], ...] = (
    (ConfigError, 2),
    (AlreadyRunning, 3),
    (PortInUse, 4),
    (SocketPathTooLong, 5),
)

_HOME = click.option(
    "--home",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the daemon keeps its socket, token, settings and models [env: FLEETD_HOME].",
)
_CONFIG = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Settings file; HOME/fleetd.toml if not given.",
)
_HTTP = click.option("--http", metavar="HOST:PORT", help="Address of the API; port 0 picks a free one.")
_MODELS = click.option("--models-dir", metavar="DIR", help="Where pulled models are kept.")


def _peer_address(_context: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """A bare port is one at every interface."""
    return f"*:{value}" if value is not None and value.isdecimal() else value


_LISTEN = click.option(
    "--listen",
    "--peer-port",
    "listen",
    metavar="HOST:PORT",
    callback=_peer_address,
    help="Address for other machines; * is every interface, and so is a port alone.",
)
_PEERS = click.option(
    "--peer",
    "peers",
    metavar="HOST:PORT",
    multiple=True,
    help="A machine that mDNS does not reach; may be given several times.",
)
_NO_MDNS = click.option("--no-mdns", is_flag=True, help="Neither find nor be found on the local network.")
_LEVEL = click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    """The options that set something, in the order of the help."""
    for option in (_LEVEL, _MODELS, _CONFIG, _NO_MDNS, _PEERS, _LISTEN, _HTTP, _HOME):
        command = option(command)
    return command


# Option → the setting it stands for.
_KEYS = {
    "http": ("--http", "http.listen"),
    "listen": ("--listen", "fleet.listen"),
    "peers": ("--peer", "fleet.peers"),
    "no_mdns": ("--no-mdns", "fleet.mdns"),
    "models_dir": ("--models-dir", "models.dir"),
    "log_level": ("--log-level", "log.level"),
}


class _OwnCommands(click.Group):
    """The commands of ``fleetd``, which leads to those of ``fleetctl``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            rest = "`fleetctl` asks the daemon: `fleetctl --help` lists its commands."
            raise click.UsageError(f"{error.format_message()} {rest}", ctx) from None


@click.group(cls=_OwnCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fleetd")
def cli() -> None:
    """The daemon of this machine: it serves models to programs here and to paired machines.

    \b
    Exit codes: 0 stopped as asked, 1 other failure, 2 wrong setting, 3 already running,
    4 address in use, 5 socket path too long.
    """


def _greet(home: Path, api: str) -> None:
    """What a person at a terminal sees of a daemon that is ready."""
    click.echo(
        f"fleetd {__version__} serves {api}\n"
        f"home {printable(str(home))} (Ctrl-C stops it)\n"
        "next, in another terminal: fleetctl chat, fleetctl open or fleetctl pair",
        err=True,
    )


@cli.command()
@_settings
def run(home: Path | None, config_file: Path | None, **flags: Any) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C."""
    what, fix = supported.here()
    if what:
        raise FleetError(what, hint=fix)
    place, settings = _load(home, config_file, **flags)
    # Whatever is created from here on is this user's alone.
    os.umask(0o077)
    paths.prepare(place)
    from fleetd.p2p.membership import new_identity

    # Beside the imports, which take as long.
    identity = new_identity.begin(place.identity) if settings.fleet.enabled else None
    # Imported late: `fleetd version`, `config show` and refusals need none of the server.
    with collector.paused_for_imports():
        lean_imports.load()
        from fleetd import app
        from fleetd.process import observe

    observe.configure(settings.log.level, settings.log.format, file=place.log)
    greet = partial(_greet, place.root) if observe.on_terminal(settings.log.format) else None
    app.run(settings, place, identity, config_file, greet=greet)


@cli.group(name="config")
def config_group() -> None:
    """Look at the settings."""


@config_group.command()
@_settings
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(home: Path | None, config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Every setting: its value, where that came from, and the default."""
    place, settings = _load(home, config_file, **flags)
    rows = config.setting_views(settings)
    if as_json:
        plain = [msgspec.to_builtins(row) for row in rows]
        click.echo(json_text({"home": str(place.root), "settings": plain}, indent=2))
        return
    click.echo(f"home {place.root}")
    width = max(len(row.key) for row in rows)
    for row in rows:
        click.echo(f"{row.key:<{width}}  {json_text(row.value)}")
        click.echo(f"{'':<{width}}  from {row.origin}; default {json_text(row.default)}; {row.type}")
        click.echo(f"{'':<{width}}  {row.why}")


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def _load(
    home: Path | None, config_file: Path | None, **flags: Any
) -> tuple[paths.HomeFolder, config.Config]:
    place = paths.resolve(home)
    given: dict[str, tuple[str, Any]] = {}
    for name, value in flags.items():
        flag, key = _KEYS[name]
        if name == "no_mdns":
            value = False if value else None
        elif name == "peers":
            value = list(value) or None
        if value is not None:
            given[key] = (flag, value)
    settings = config.load(config_file or place.config, flags=given, required=config_file is not None)
    return place, settings


def main() -> None:
    """Entry point: a FleetError becomes one sentence, a hint and an exit code."""
    try:
        cli(standalone_mode=True)
    except FleetError as error:
        click.echo(f"fleetd: {printable(error.message)}", err=True)
        if error.hint:
            click.echo(textwrap.indent(printable(error.hint), "  "), err=True)
        sys.exit(next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1))
