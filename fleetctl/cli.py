"""The command line: global options, the verbs (each imported when used), and how errors become exit codes."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetctl.connection.client import Client
from fleetctl.connection.home import Address, locate
from fleetctl.exits import Exit, exit_for
from fleetctl.verb_table import GROUPS, INSTEAD, VERBS
from fleetd import __version__
from fleetd.errors import FleetError
from fleetd.text.terminal_text import json_text, printable

F = TypeVar("F", bound=Callable[..., Any])


class CliSession:
    """The global options, and the client and output that they choose."""

    def __init__(self) -> None:
        self.home: Path | None = None
        self.socket: Path | None = None
        self.json = False

    @property
    def address(self) -> Address:
        return locate(self.home, self.socket)

    def client(self) -> Client:
        return Client(self.address)

    def emit(self, value: Any, text: str | Callable[[], str]) -> None:
        """Print the answer on stdout: ``value`` with --json, else ``text``."""
        if self.json:
            click.echo(json_text(value, indent=2))
        else:
            click.echo(text if isinstance(text, str) else text())


pass_session = click.make_pass_decorator(CliSession)


def json_option(function: F) -> F:
    """--json after the verb means the same as before it."""

    def note(context: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            context.ensure_object(CliSession).json = True

    return click.option("--json", is_flag=True, expose_value=False, callback=note, help="Print JSON.")(
        function
    )


def note(text: str) -> None:
    """Print a remark on stderr; stdout is for answers."""
    click.echo(_broken(text), err=True)


def _broken(text: str) -> str:
    """Its lines, broken between words if they are longer than those of the terminal at stderr.

    Indented ones stay: they are to be copied, or are laid out already.
    """
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    if width is None or all(len(line) <= width for line in text.split("\n")):
        return text
    from fleetctl.render.text import wrapped

    return "\n".join(
        line if line.startswith(" ") or len(line) <= width else wrapped(line, width)
        for line in text.split("\n")
    )


class LazyGroup(click.Group):
    """Finds a verb by importing its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs by groups, as the table has them: no verb is imported, and no line is cut."""
        width = max(map(len, VERBS))
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(verb.ljust(width), what) for verb, what in verbs.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(f"{code.value:>3}", code.meaning) for code in Exit])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"fleetctl.verbs.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"fleetctl.verbs.{cmd_name}.command is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            instead = INSTEAD.get(args[0]) or (f"Did you mean '{near[0]}'?" if near else "")
            raise click.UsageError(f"No such command '{printable(args[0])}'. {instead}".rstrip(), ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--home",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The daemon's home (else $FLEETD_HOME, else this user's).",
)
@click.option("--socket", type=click.Path(path_type=Path), metavar="PATH", help="The daemon's socket.")
@click.version_option(__version__, prog_name="fleetctl", message="%(prog)s %(version)s")
@json_option
@pass_session
@click.pass_context
def fleetctl(context: click.Context, session: CliSession, home: Path | None, socket: Path | None) -> None:
    """Talk to the fleetd daemon on this machine.

    Alone it shows the state and what to do next. Answers go to stdout, progress and remarks to stderr; --json
    works with every command, before or after it.
    """
    if home is not None and socket is not None:
        raise click.UsageError("Give --home or --socket, not both.")
    session.home, session.socket = home, socket
    if context.invoked_subcommand is None:
        from fleetctl.front_page import front_page

        session.emit(*front_page(session.client()))


def show_error(error: FleetError, *, as_json: bool = False) -> None:
    """Print the error's sentence and its hint on stderr; with ``as_json`` as one JSON object."""
    if as_json:
        fields = {
            "message": error.message,
            "hint": error.hint,
            "code": error.code,
            "exit": int(exit_for(error)),
        }
        click.echo(json_text({"error": fields}), err=True)
        return
    said = _broken(f"error: {printable(error.message)}")
    click.echo(click.style("error: ", fg="red") + said.removeprefix("error: "), err=True)
    if error.hint:
        note(printable(error.hint))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # An emoji must not end the program in a terminal that has no UTF-8.
            stream.reconfigure(errors="backslashreplace")
    session = CliSession()
    try:
        result = fleetctl.main(arguments, prog_name="fleetctl", standalone_mode=False, obj=session)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        note(shown.getvalue().rstrip("\n"))
        return Exit.USAGE if isinstance(error, click.UsageError) else Exit.ERROR
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except FleetError as error:
        show_error(error, as_json=session.json)
        return exit_for(error)
    except OSError as error:
        where = f"{os.fspath(error.filename)!s}: " if error.filename else ""
        note(click.style("error: ", fg="red") + printable(f"{where}{error.strerror or error}"))
        return Exit.ERROR
    return result if isinstance(result, int) else Exit.OK
