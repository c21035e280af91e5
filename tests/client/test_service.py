"""Installing, removing and asking about the service, against scripted systemctl and launchctl."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from darwin import Launchctl
from fake_daemon import Run

from fleetctl.cli import CliSession, fleetctl
from fleetctl.exits import ClientError, Exit
from fleetctl.service.managers import (
    CommandResult,
    Launchd,
    Systemd,
    manager_for,
    run_command,
    write_atomically,
)
from fleetctl.service.units import Values
from fleetctl.verbs import service as service_module

SHOW = "LoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\nMainPID=77\n"


class Script:
    """A runner that remembers what it was asked and answers by the longest matching prefix."""

    def __init__(self, answers: dict[str, CommandResult | Callable[[], CommandResult]] | None = None) -> None:
        self.asked: list[str] = []
        self.answers = answers or {}

    def __call__(self, arguments: Sequence[str]) -> CommandResult:
        line = " ".join(arguments)
        self.asked.append(line)
        for prefix in sorted(self.answers, key=len, reverse=True):
            if line.startswith(prefix):
                found = self.answers[prefix]
                return found if isinstance(found, CommandResult) else found()
        return CommandResult(0, "")


# ---- systemd ---------------------------------------------------------------------------------------------


def test_systemd_install_steps(short_dir: Path) -> None:
    script = Script()
    manager = Systemd("system", root=short_dir, run=script)
    did = manager.install("the unit")
    assert manager.file == short_dir / "etc/systemd/system/fleetd.service"
    assert manager.file.read_text() == "the unit"
    assert stat.S_IMODE(manager.file.stat().st_mode) == 0o644
    assert script.asked == [
        "systemctl show --property=Version",
        "systemctl daemon-reload",
        "systemctl enable fleetd.service",
        "systemctl restart fleetd.service",
    ]
    assert did[0] == f"wrote {manager.file}"


def test_systemd_user_install(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(short_dir / "config"))
    script = Script()
    manager = Systemd("user", run=script)
    did = manager.install("the unit")
    assert manager.file == short_dir / "config/systemd/user/fleetd.service"
    asked = [line for line in script.asked if not line.startswith("loginctl ")]
    assert all(line.startswith("systemctl --user ") for line in asked)
    assert any("enable-linger" in line for line in did)
    script.answers["systemctl --user show fleetd.service"] = CommandResult(0, SHOW)
    assert "until you log out" in manager.state().detail
    # A user who lingers need not be told.
    script.answers["loginctl show-user"] = CommandResult(0, "Linger=yes\n")
    assert not any("linger" in line for line in manager.install("the unit"))
    assert manager.state().detail == "active (running), enabled"


def test_without_systemd_nothing_is_written(short_dir: Path) -> None:
    script = Script(
        {"systemctl": CommandResult(1, "System has not been booted with systemd as init system\n")}
    )
    manager = Systemd("system", root=short_dir, run=script)
    with pytest.raises(ClientError, match="not been booted") as caught:
        manager.install("the unit")
    assert "--print" in caught.value.hint
    assert not manager.file.exists()


def test_a_failing_start_names_the_journal(short_dir: Path) -> None:
    script = Script({"systemctl restart": CommandResult(1, "Job for fleetd.service failed\n")})
    with pytest.raises(ClientError, match="Job for fleetd") as caught:
        Systemd("system", root=short_dir, run=script).install("the unit")
    assert "journalctl -u fleetd.service" in caught.value.hint


def test_systemd_uninstall(short_dir: Path) -> None:
    script = Script()
    manager = Systemd("system", root=short_dir, run=script)
    assert manager.uninstall() == []
    manager.install("the unit")
    script.asked.clear()
    assert f"removed {manager.file}" in manager.uninstall()
    assert not manager.file.exists()
    assert script.asked[1:] == ["systemctl disable --now fleetd.service", "systemctl daemon-reload"]


def test_systemd_state(short_dir: Path) -> None:
    script = Script({"systemctl show fleetd.service": CommandResult(0, SHOW)})
    manager = Systemd("system", root=short_dir, run=script)
    assert manager.state().detail == "not installed"
    manager.install("the unit")
    state = manager.state()
    assert (state.installed, state.active, state.pid) == (True, True, 77)
    assert state.detail == "active (running), enabled"
    script.answers["systemctl show fleetd.service"] = CommandResult(127, "systemctl: not found")
    assert manager.state().detail == "unknown: systemctl: not found"


# ---- launchd ---------------------------------------------------------------------------------------------


def test_launchd_install_steps(short_dir: Path) -> None:
    script = Script({"launchctl print": CommandResult(113, "Could not find service")})
    manager = Launchd("system", root=short_dir, run=script)
    manager.install("<plist/>")
    assert manager.file == short_dir / "Library/LaunchDaemons/fleetd.daemon.plist"
    assert script.asked == [
        "launchctl print system/fleetd.daemon",
        "launchctl enable system/fleetd.daemon",
        f"launchctl bootstrap system {manager.file}",
    ]


def test_launchd_update_waits_until_the_old_job_is_gone(short_dir: Path) -> None:
    loaded = iter([True, True, True, False])
    naps: list[float] = []
    script = Script({"launchctl print": lambda: CommandResult(0 if next(loaded) else 113, "")})
    Launchd("system", root=short_dir, run=script, sleep=naps.append).install("<plist/>")
    assert naps == [0.5, 0.5]
    assert "launchctl bootout system/fleetd.daemon" in script.asked
    assert script.asked[-1].startswith("launchctl bootstrap")


def test_launchd_agent_belongs_to_the_user(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(short_dir))
    script = Script({"launchctl print": CommandResult(113, "")})
    manager = Launchd("user", run=script)
    manager.install("<plist/>")
    assert manager.file == short_dir / "Library/LaunchAgents/fleetd.agent.plist"
    assert script.asked[-1] == f"launchctl bootstrap gui/{os.getuid()} {manager.file}"
    assert manager.uninstall() == [f"removed {manager.file}"]


def test_launchd_state(short_dir: Path) -> None:
    shown = "fleetd.daemon = {\n\tstate = running\n\tpid = 88\n\tspawn type = daemon (3)\n}\n"
    script = Script({"launchctl print": CommandResult(0, shown)})
    state = Launchd("system", root=short_dir, run=script).state()
    assert (state.active, state.detail, state.pid) == (True, "running", 88)
    script.answers["launchctl print"] = CommandResult(0, "\tstate = not running\n\tlast exit code = 78\n")
    assert Launchd("system", root=short_dir, run=script).state().detail == "not running, last exit code 78"
    script.answers["launchctl print"] = CommandResult(113, "")
    assert Launchd("system", root=short_dir, run=script).state().detail == "not installed"


# ---- Shared ----------------------------------------------------------------------------------------------


def test_manager_per_platform() -> None:
    assert isinstance(manager_for("user", "darwin"), Launchd)
    assert isinstance(manager_for("user", "linux"), Systemd)
    with pytest.raises(ClientError, match="not win32"):
        manager_for("user", "win32")


def test_a_missing_program_is_127_and_output_is_kept() -> None:
    assert run_command(["no-such-program-here"]) == CommandResult(127, "no-such-program-here: not found")
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"]) == CommandResult(3, "out\nerr\n")


def test_a_write_that_fails_leaves_the_old_file(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_dir / "unit"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(short_dir.iterdir()) == [path]


def test_a_program_in_a_home_folder_cannot_be_a_system_service(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_HIDDEN", (short_dir / "home",))
    elsewhere = short_dir / "opt" / "fleetd"
    python = short_dir / "home" / "python3"
    for path in (elsewhere, python):
        path.parent.mkdir()
        path.write_text(f"#!{sys.executable} -I\n")
    service_module.check_reachable(elsewhere)
    with pytest.raises(ClientError, match="cannot see"):
        service_module.check_reachable(python)
    # The script itself is visible, but the interpreter it names is not.
    elsewhere.write_text(f"#!{python}\n")
    with pytest.raises(ClientError, match="cannot see"):
        service_module.check_reachable(elsewhere)


def test_the_system_user_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    values = Values(Path("/opt/fleetd"), Path("/var/lib/fleetd"), "fleetd")
    monkeypatch.setattr(service_module, "_user_exists", lambda _: False)
    script = Script()
    assert service_module.prepare("system", values, script) == ["created the system user fleetd"]
    [line] = script.asked
    assert line.startswith("useradd --system")
    assert line.endswith("--home-dir /var/lib/fleetd fleetd")
    with pytest.raises(ClientError, match="no user nobody-here"):
        service_module.prepare("system", Values(Path("/x"), Path("/y"), "nobody-here"), script)
    monkeypatch.setattr(service_module, "_user_exists", lambda _: True)
    assert service_module.prepare("system", values, Script()) == []


def test_the_home_exists_before_launchd_logs_into_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    values = Values(Path("/opt/fleetd"), short_dir / "Library" / "fleetd")
    assert service_module.prepare("user", values, Script()) == [f"created {values.home}"]
    assert stat.S_IMODE(values.home.stat().st_mode) == 0o700
    assert service_module.prepare("user", values, Script()) == []


# ---- As a process, with a fake systemctl on the PATH -----------------------------------------------------

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="a fake systemctl stands in on Linux"
)


@pytest.fixture
def systemctl(short_dir: Path, env: dict[str, str]) -> Path:
    """A systemctl that writes down its arguments and says that the unit runs."""
    log = short_dir / "systemctl.log"
    program = short_dir / "bin" / "systemctl"
    program.parent.mkdir()
    show = shlex.quote(SHOW)
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *show*) printf %s {show};; esac\n')
    program.chmod(0o755)
    env["PATH"] = f"{program.parent}:{env['PATH']}"
    return log


@linux_only
def test_install_status_uninstall_as_a_user(
    run: Run, short_dir: Path, env: dict[str, str], systemctl: Path
) -> None:
    home = short_dir / "my home"
    unit = Path(env["XDG_CONFIG_HOME"]) / "systemd/user/fleetd.service"
    installed = run("service", "install", "--user", home=home)
    assert (installed.returncode, installed.stdout) == (
        0,
        "systemd user service: active (running), enabled, "
        "until you log out (`loginctl enable-linger` keeps it)\n",
    )
    assert f"wrote {unit}" in installed.stderr
    assert f'run --home "{home}"' in unit.read_text()
    assert "--user restart fleetd.service" in systemctl.read_text()
    state = json.loads(run("service", "status", "--user", "--json").stdout)["services"][0]
    assert (state["active"], state["pid"], state["file"]) == (True, 77, str(unit))
    removed = run("service", "uninstall", "--user", "--json")
    assert json.loads(removed.stdout)["did"][-1].endswith("is kept")
    assert not unit.exists()
    again = run("service", "uninstall", "--user")
    assert (again.returncode, again.stdout) == (Exit.ERROR, "")
    assert "no user service" in again.stderr
    assert run("service", "status", "--user").returncode == Exit.OK


@linux_only
@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_who_is_not_root_is_told_the_line_that_does_the_same(
    verb: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Systemd("system", root=short_dir, run=Script())
    manager.install("the unit")
    monkeypatch.setattr(service_module, "manager_for", lambda scope: manager)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("FLEETD_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClientError, match="needs root") as refused:
        fleetctl.main(["service", verb, "--system"], standalone_mode=False, obj=CliSession())
    assert f"service {verb} --system`" in refused.value.hint


@linux_only
def test_print_writes_nothing(run: Run, env: dict[str, str], systemctl: Path) -> None:
    shown = run("service", "install", "--user", "--print")
    assert shown.returncode == 0
    assert shown.stdout.startswith("# fleetd as a service of one user")
    assert not Path(env["XDG_CONFIG_HOME"]).exists()
    assert not systemctl.exists()
    as_json = json.loads(run("service", "install", "--user", "--print", "--json").stdout)
    assert as_json["text"].startswith("# fleetd")


@linux_only
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fleetd", "/no/such/program"], "is not a program"),
        (["--system", "--run-as", "a b"], "cannot be the name"),
        (["--user", "--run-as", "x"], "--run-as goes with --system"),
    ],
)
def test_refusals(run: Run, systemctl: Path, flags: list[str], words: str) -> None:
    done = run("service", "install", "--print", *flags)
    assert done.returncode in (Exit.ERROR, Exit.USAGE)
    assert words in done.stderr
    assert not systemctl.exists()


@linux_only
def test_the_system_service_keeps_its_own_home(run: Run, short_dir: Path) -> None:
    done = run("service", "install", "--system", "--print", home=short_dir)
    assert done.returncode == Exit.USAGE
    assert "/var/lib/fleetd" in done.stderr
    assert f"but --home says {short_dir}: add --user." in " ".join(done.stderr.split())


@linux_only
@pytest.mark.parametrize("name", ["FLEETD_HOME", "STATE_DIRECTORY"])
def test_a_home_of_the_environment_is_named_as_the_cause(
    run: Run, short_dir: Path, env: dict[str, str], name: str
) -> None:
    """No --home was typed, so an error that speaks of --home would puzzle."""
    env[name] = str(short_dir)
    done = run("service", "install", "--system", "--print")
    assert done.returncode == Exit.USAGE
    said = " ".join(done.stderr.split())
    assert f"but {name} says {short_dir}: unset {name}, or add --user." in said
    assert "--home" not in said


def test_launchd_is_waited_for_and_understood(short_dir: Path) -> None:
    """A job that is booted out stays for a while, and launchd refuses another of its name until then."""
    launchctl = Launchctl(lingers=2)
    manager = Launchd("system", root=short_dir, run=launchctl, sleep=lambda seconds: None)
    for _ in range(2):
        manager.install("the plist")
        state = manager.state()
        assert (state.installed, state.active, state.pid, state.detail) == (True, True, 3318, "running")
    assert manager.uninstall()[0] == "stopped and unloaded fleetd.daemon"
    assert (manager.state().detail, launchctl.loaded) == ("not installed", {})
