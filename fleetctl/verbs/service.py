"""`fleetctl service`: fleetd as a background service, by systemd or launchd."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import click

import fleetd
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.home import SYSTEM_HOME, model_folders
from fleetctl.exits import ClientError, Exit
from fleetctl.service import units
from fleetctl.service.installation import interpreter, stable, troubles
from fleetctl.service.managers import Manager, RequestRunner, Scope, manager_for, run_command

SYSTEM_USER = "fleetd"
# Groups that own the GPU's device files.
_GPU_GROUPS = ("video", "render")
# What ProtectHome= hides from the system service.
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))


def _scope_options(function: click.decorators.FC) -> click.decorators.FC:
    for name, text in (("user", "For this user only."), ("system", "For the whole machine (needs root).")):
        function = click.option(f"--{name}", "scope", flag_value=name, help=text)(function)
    return function


@click.group("service")
@json_option
def command() -> None:
    """Run fleetd in the background, from boot or login on.

    Without --system or --user it is the system's service for root, and your own otherwise.
    """


@command.command("install", short_help="Install, enable and start the service")
@_scope_options
@click.option("--print", "only_print", is_flag=True, help="Only show the service file.")
@click.option(
    "--fleetd", "program", type=click.Path(path_type=Path), metavar="PATH", help="Which fleetd to run."
)
@click.option("--run-as", metavar="USER", help="The user of a --system service.")
@click.option("--anyway", is_flag=True, help="Also where the system may keep the service from its files.")
@json_option
@pass_session
def install(
    session: CliSession,
    scope: Scope | None,
    only_print: bool,
    program: Path | None,
    run_as: str | None,
    anyway: bool,
) -> None:
    """Install, enable and start the service; installing again updates it."""
    scope = scope or _default_scope()
    if run_as and scope == "user":
        raise click.UsageError("--run-as goes with --system.")
    manager = manager_for(scope)
    values = service_values(session, scope, program, run_as)
    text = units.render(_template(scope), values)
    if only_print:
        session.emit({"file": str(manager.file), "text": text}, text.rstrip("\n"))
        return
    _need_root(scope, "install")
    if scope == "system" and sys.platform != "darwin":
        check_reachable(values.fleetd)
    check_lasting(values, anyway=anyway)
    did = prepare(scope, values)
    did += manager.install(text)
    _report(session, manager, did)


@command.command("uninstall", short_help="Stop and remove the service; its home stays")
@_scope_options
@json_option
@pass_session
def uninstall(session: CliSession, scope: Scope | None) -> None:
    """Stop and remove the service; its home with models and settings stays."""
    scope = scope or _default_scope()
    manager = manager_for(scope)
    if manager.file.exists():
        _need_root(scope, "uninstall")
    did = manager.uninstall()
    if not did:
        raise ClientError(f"There is no {scope} service to remove.")
    _report(session, manager, [*did, "the home with models and settings is kept"])


@command.command("status", short_help="Tell whether it is installed and runs")
@_scope_options
@json_option
@pass_session
def status(session: CliSession, scope: Scope | None) -> int:
    """Tell whether the service is installed and running; exits 1 when it is not running."""
    scopes: tuple[Scope, ...] = (scope,) if scope else ("system", "user")
    states = [manager_for(each).state() for each in scopes]
    lines = [
        f"{s.manager} {s.scope} service: {s.detail}" + (f", pid {s.pid}" if s.pid else "") for s in states
    ]
    session.emit({"services": [asdict(state) for state in states]}, "\n".join(lines))
    return Exit.OK if any(state.active for state in states) else Exit.ERROR


def service_values(
    session: CliSession, scope: Scope, program: Path | None, run_as: str | None
) -> units.Values:
    """The paths, user and groups that the service file names."""
    fleetd_program = find_fleetd(program)
    if scope == "user":
        return units.Values(fleetd=fleetd_program, home=session.address.home)
    chosen = not session.address.default
    if sys.platform == "darwin":
        # An ordinary user's daemon, so that this user's fleetctl can reach it without sudo.
        user = run_as or os.environ.get("SUDO_USER") or ""
        if not user or user == "root":
            raise ClientError("Say which user the daemon runs as.", hint="Add --run-as USER.")
        user_home = Path(f"~{user}").expanduser()
        home = session.address.home if chosen else user_home / "Library/Application Support/fleetd"
        return units.Values(fleetd=fleetd_program, home=home, user=user, user_home=user_home)
    if chosen and session.address.home != SYSTEM_HOME:
        # A person may have typed no --home at all.
        cause = session.address.chosen_by
        fix = "add --user" if cause.startswith("--") else f"unset {cause}, or add --user"
        raise click.UsageError(
            f"The system service keeps its home in {SYSTEM_HOME}, but {cause} says {session.address.home}: "
            f"{fix}."
        )
    return units.Values(
        fleetd=fleetd_program,
        home=SYSTEM_HOME,
        user=run_as or SYSTEM_USER,
        groups=existing_groups(_GPU_GROUPS),
    )


def find_fleetd(program: Path | None) -> Path:
    """The path of fleetd: ``program`` if given, else that of this installation, else that on the PATH."""
    beside = Path(sys.executable).parent / "fleetd"
    if program is not None:
        path = program
    elif beside.is_file():
        path = beside
    else:
        found = shutil.which("fleetd")
        if found is None:
            raise ClientError(
                "There is no fleetd program beside fleetctl or on the PATH.", hint="Name it: --fleetd."
            )
        path = Path(found)
    # Homebrew deletes the folder of a version with the next one.
    path = stable(Path(os.path.abspath(path.expanduser())))
    if not os.access(path, os.X_OK) or not path.is_file():
        raise ClientError(f"{path} is not a program.", hint="Name the right one with --fleetd.")
    return path


def existing_groups(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``names`` that exist: a unit that names a missing group does not start."""
    import grp

    known = {group.gr_name for group in grp.getgrall()}
    return tuple(name for name in names if name in known)


def check_reachable(program: Path) -> None:
    """Raise ClientError for a program in a home folder, which the system service cannot see."""
    parts = {program.resolve()}
    if (python := interpreter(program)) is not None:
        parts.add(python.resolve())
    if program.parent == Path(sys.executable).parent:
        parts.add(Path(fleetd.__file__).resolve())
    for part in sorted(parts):
        for folder in _HIDDEN:
            if part.is_relative_to(folder):
                raise ClientError(
                    f"{part} is in {folder}, which the hardened system service cannot see.",
                    hint="Install fleetd outside home folders (python3 -m venv /opt/fleetd && "
                    "/opt/fleetd/bin/pip install fleetd) and run /opt/fleetd/bin/fleetctl service install "
                    "--system; or install it with --user.",
                )


def check_lasting(values: units.Values, *, anyway: bool) -> None:
    """Tell what may fail in the background; raise ClientError for what keeps the service from starting."""
    user_home = values.user_home if values.user else Path.home()
    models = model_folders(values.home, os.environ)
    for found in troubles(values.fleetd, models, sys.platform, user_home):
        if found.stops and not anyway:
            raise ClientError(found.what, hint=f"{found.fix} Or add --anyway.")
        note(f"{found.what} {found.fix}")


def prepare(scope: Scope, values: units.Values, run: RequestRunner = run_command) -> list[str]:
    """Create what the service needs to start: the system user, or the home that launchd logs into."""
    if sys.platform == "darwin":
        return _make_home(values)
    if scope == "user" or _user_exists(values.user):
        return []
    if values.user != SYSTEM_USER:
        raise ClientError(f"There is no user {values.user}.", hint="Create it, or leave out --run-as.")
    flags = ["--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin"]
    done = run(["useradd", *flags, "--home-dir", str(values.home), values.user])
    if done.code != 0:
        raise ClientError(f"Creating the user {values.user} failed: {done.output.strip()}")
    return [f"created the system user {values.user}"]


def _make_home(values: units.Values) -> list[str]:
    if values.home.is_dir():
        return []
    values.home.mkdir(parents=True, mode=0o700)
    if values.user:
        shutil.chown(values.home, values.user)
    return [f"created {values.home}"]


def _user_exists(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _default_scope() -> Scope:
    return "system" if os.geteuid() == 0 else "user"


def _template(scope: Scope) -> str:
    if sys.platform == "darwin":
        return units.DAEMON_PLIST if scope == "system" else units.AGENT_PLIST
    return units.SYSTEM_UNIT if scope == "system" else units.USER_UNIT


def _need_root(scope: Scope, verb: str) -> None:
    """Raises ClientError, with the line to type instead, if ``scope`` needs root and this is not root."""
    if scope == "system" and os.geteuid() != 0:
        raise ClientError(
            "The system service needs root.",
            hint=f"`sudo {os.path.abspath(sys.argv[0])} service {verb} --system`, or use --user.",
        )


def _report(session: CliSession, manager: Manager, did: list[str]) -> None:
    for line in did:
        note(line)
    state = manager.state()
    session.emit(
        {"did": did, "service": asdict(state)}, f"{state.manager} {state.scope} service: {state.detail}"
    )
