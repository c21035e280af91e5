"""Service files as systemd and launchd will read them."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetctl.exits import ClientError
from fleetctl.service import units
from fleetctl.service.units import Values, render

ALL = (units.SYSTEM_UNIT, units.USER_UNIT, units.DAEMON_PLIST, units.AGENT_PLIST)
PLISTS = (units.DAEMON_PLIST, units.AGENT_PLIST)
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed: units are not verified here",
)


@pytest.fixture
def values(short_dir: Path) -> Values:
    program = short_dir / "bin dir 100%" / "fleetd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return Values(program, short_dir / "my home", "fleetd", Path("/Users/a & b"), ("video", "render"))


def directives(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@needs_systemd
@pytest.mark.parametrize(("template", "flags"), [(units.SYSTEM_UNIT, []), (units.USER_UNIT, ["--user"])])
def test_systemd_accepts_the_unit(values: Values, short_dir: Path, template: str, flags: list[str]) -> None:
    path = short_dir / "fleetd.service"
    path.write_text(render(template, values))
    done = subprocess.run(
        ["systemd-analyze", *flags, "--man=no", "verify", str(path)],  # noqa: S607
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(short_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    # A warning about an unknown or misplaced setting does not change the exit code, so silence is asked for.
    complaints = [line for line in done.stderr.splitlines() if str(path) in line or "fleetd.service" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


@needs_systemd
def test_the_system_unit_is_hardened(values: Values, short_dir: Path) -> None:
    path = short_dir / "fleetd.service"
    path.write_text(render(units.SYSTEM_UNIT, values))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(path)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"exposure level for fleetd.service: ([0-9.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= 2.0


def test_the_system_unit_names_gpus_by_their_drivers_and_not_one_by_one(values: Values) -> None:
    allowed = directives(render(units.SYSTEM_UNIT, values))["DeviceAllow"]
    assert allowed == ["char-nvidia* rw", "char-drm rw"]


def test_the_system_unit_says_what_the_daemon_relies_on(values: Values) -> None:
    text = render(units.SYSTEM_UNIT, values)
    found = directives(text)
    program = str(values.fleetd).replace("%", "%%")
    assert found["ExecStart"] == [f'"{program}" run']
    for key, value in {
        "Type": "notify",
        "User": "fleetd",
        "SupplementaryGroups": "video render",
        "Restart": "on-failure",
        "TimeoutStopSec": "45",
        "WatchdogSec": "30",
        "StateDirectory": "fleetd",
        "StateDirectoryMode": "0700",
        "RuntimeDirectoryMode": "0750",
        "LimitCORE": "0",
        "UMask": "0077",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "DevicePolicy": "closed",
        # Every GPU, and files that the driver creates after this unit has started.
        "After": "network-online.target modprobe@nvidia_uvm.service",
        "Wants": "network-online.target modprobe@nvidia_uvm.service",
        "ExecStartPre": "+-/usr/bin/nvidia-modprobe -c 0 -u",
        "SystemCallErrorNumber": "EPERM",
        "WantedBy": "multi-user.target",
    }.items():
        assert found[key] == [value], key
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    # These would break the GPU, run-time compilation and the reading of free memory.
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"} & set(found)


def test_missing_groups_leave_a_unit_that_starts(values: Values) -> None:
    text = render(units.SYSTEM_UNIT, Values(values.fleetd, values.home, "fleetd"))
    assert "SupplementaryGroups" not in directives(text)


def test_the_user_unit_names_its_home(values: Values) -> None:
    found = directives(render(units.USER_UNIT, values))
    program = str(values.fleetd).replace("%", "%%")
    assert found["ExecStart"] == [f'"{program}" run --home "{values.home}"']
    assert found["WantedBy"] == ["default.target"]
    assert "User" not in found


@pytest.mark.parametrize("template", [units.SYSTEM_UNIT, units.USER_UNIT])
def test_units_have_three_sections_and_nothing_left_to_fill_in(values: Values, template: str) -> None:
    text = render(template, values)
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.read_string(text)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert "$" not in text


@pytest.mark.parametrize("template", PLISTS)
def test_plists(values: Values, template: str) -> None:
    job = plistlib.loads(render(template, values).encode())
    assert job["Label"] == Path(template).stem
    assert job["ProgramArguments"] == [str(values.fleetd), "run", "--home", str(values.home)]
    assert Path(job["ProgramArguments"][0]).is_absolute()
    assert job["RunAtLoad"] is True
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert (job["ThrottleInterval"], job["ExitTimeOut"]) == (10, 45)
    assert job["ProcessType"] == "Interactive"
    assert job["Umask"] == 0o077
    assert job["SoftResourceLimits"] == {"Core": 0, "NumberOfFiles": 65536}
    assert job["StandardOutPath"] == job["StandardErrorPath"] == f"{values.home}/fleetd.log"
    assert job["EnvironmentVariables"]["PATH"]


def test_only_the_daemon_switches_user(values: Values) -> None:
    daemon = plistlib.loads(render(units.DAEMON_PLIST, values).encode())
    assert (daemon["UserName"], daemon["EnvironmentVariables"]["HOME"]) == ("fleetd", "/Users/a & b")
    agent = plistlib.loads(render(units.AGENT_PLIST, values).encode())
    assert "UserName" not in agent
    assert "HOME" not in agent["EnvironmentVariables"]


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("name", ["a\nExecStartPre=/bin/evil", "nul\0", "a\x1b"])
def test_unit_injection_through_a_path(template: str, name: str) -> None:
    for values in (Values(Path("/x") / name, Path("/h")), Values(Path("/x"), Path("/h") / name)):
        with pytest.raises(ClientError, match="printable"):
            render(template, values)


@pytest.mark.parametrize("template", [units.SYSTEM_UNIT, units.USER_UNIT])
@pytest.mark.parametrize("name", ['a" --http 0.0.0.0:1 "', "a'b", "a\\x20b", "$HOME"])
def test_unit_injection_through_quoting(template: str, name: str) -> None:
    with pytest.raises(ClientError, match="cannot hold safely"):
        render(template, Values(Path("/x") / name, Path("/h")))


@pytest.mark.parametrize("user", ["root\nx", "a b", "-x", "x" * 40, "$user"])
def test_unit_injection_through_the_user(user: str) -> None:
    for template in ALL:
        with pytest.raises(ClientError, match="cannot be the name"):
            render(template, Values(Path("/x"), Path("/h"), user))


def test_plist_injection_is_escaped(values: Values) -> None:
    hostile = Path("/x/<string>&amp;</string></array>")
    job = plistlib.loads(render(units.AGENT_PLIST, Values(hostile, hostile)).encode())
    assert job["ProgramArguments"] == [str(hostile), "run", "--home", str(hostile)]


def test_relative_paths_are_refused() -> None:
    with pytest.raises(ClientError):
        render(units.USER_UNIT, Values(Path("bin/fleetd"), Path("/h")))


def test_installed_templates_come_first(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    package = short_dir / "fleetctl"
    (package / "templates/systemd").mkdir(parents=True)
    (package / "templates" / units.USER_UNIT).write_text("installed")
    monkeypatch.setattr(units, "__file__", str(package / "service" / "units.py"))
    assert units.find_template(units.USER_UNIT).read_text() == "installed"
    with pytest.raises(ClientError, match="missing from this installation"):
        units.find_template(units.SYSTEM_UNIT)


def test_every_template_is_used() -> None:
    root = Path(units.__file__).resolve().parents[2]
    files = {
        f"{folder}/{path.name}" for folder in ("systemd", "launchd") for path in (root / folder).iterdir()
    }
    assert files == set(ALL)
    assert sys.version_info >= (3, 11)
