"""Each check of doctor finds what it is for, and says what to do."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from darwin import PSUTIL_FAILS, Raises
from fake_daemon import STATUS, FakeDaemon, Reply, Run
from finding_levels import level

import fleetd
from fleetctl.connection.client import Client
from fleetctl.connection.home import locate
from fleetctl.connection.replies import read
from fleetctl.doctor import checks_daemon, checks_local, checks_machine
from fleetctl.doctor.findings import Finding
from fleetctl.exits import Exit
from fleetctl.service.managers import State
from fleetctl.verbs import doctor
from fleetd import limits
from fleetd.control.daemon_status import DaemonStatus

ENGINE: dict[str, Any] = STATUS["engines"][0]
NOW = 1_795_000_000.0


# ---- This machine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [(0o700, "ok"), (0o750, "fail"), (0o701, "fail")])
def test_home_mode(short_dir: Path, mode: int, expected: str) -> None:
    short_dir.chmod(mode)
    finding = checks_local.home(short_dir, os.geteuid())
    assert level(finding) == expected
    if expected == "fail":
        assert finding.fix == f"chmod 700 {short_dir}"
    short_dir.chmod(0o700)


def test_home_missing_or_not_a_folder_or_somebody_elses_or_too_long(short_dir: Path) -> None:
    assert level(checks_local.home(short_dir / "nope", os.geteuid())) == "warn"
    (short_dir / "file").write_text("")
    assert level(checks_local.home(short_dir / "file", os.geteuid())) == "fail"
    deep = short_dir / ("x" * limits.SOCKET_PATH_BYTES)
    deep.mkdir(mode=0o700)
    assert "too long" in checks_local.home(deep, os.geteuid()).what


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_home_of_another_user(short_dir: Path) -> None:
    home = short_dir / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 4242, 4242)
    assert "belongs to user id 4242" in checks_local.home(home, 1000).what
    assert level(checks_local.home(home, 4242)) == "ok"
    assert level(checks_local.home(home, 0)) == "ok"


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o600, "ok"), (0o400, "ok"), (0o640, "fail"), (0o604, "fail")]
)
def test_token_mode(short_dir: Path, mode: int, expected: str) -> None:
    path = short_dir / "api-token"
    path.write_text("secret")
    path.chmod(mode)
    finding = checks_local.token(locate(short_dir, None), running=True)
    assert level(finding) == expected
    assert "secret" not in finding.what + finding.fix


def test_token_missing(short_dir: Path) -> None:
    address = locate(short_dir, None)
    assert level(checks_local.token(address, running=True)) == "fail"
    assert level(checks_local.token(address, running=False)) == "ok"


@pytest.mark.parametrize(
    ("toml", "environ", "expected"),
    [
        (None, {}, ("127.0.0.1", 8114)),
        ('[http]\nlisten = "127.0.0.1:9000"\n', {}, ("127.0.0.1", 9000)),
        ('[http]\nlisten = "[::1]:9000"\n', {}, ("::1", 9000)),
        (
            '[http]\nlisten = "127.0.0.1:9000"\n',
            {"FLEETD_HTTP_LISTEN": "127.0.0.1:9001"},
            ("127.0.0.1", 9001),
        ),
        ('[http]\nlisten = "127.0.0.1:0"\n', {}, None),
        ("not toml [", {}, ("127.0.0.1", 8114)),
        ('http = "odd"\n', {}, ("127.0.0.1", 8114)),
    ],
)
def test_configured_port(
    short_dir: Path, toml: str | None, environ: dict[str, str], expected: tuple[str, int] | None
) -> None:
    if toml is not None:
        (short_dir / "fleetd.toml").write_text(toml)
    assert checks_local.listen_address(short_dir, environ) == expected


def test_port_taken_free_and_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        taken = checks_local.port_free(address)
        assert level(taken) == "fail"
        assert str(address[1]) in taken.fix
        assert level(checks_local.port_answers(address)) == "ok"
    assert level(checks_local.port_free(address)) == "ok"
    assert level(checks_local.port_answers(address)) == "fail"
    assert level(checks_local.port_free(None)) == "ok"


@pytest.mark.parametrize(("free_gib", "expected"), [(0.5, "fail"), (3, "warn"), (50, "ok")])
def test_disk(short_dir: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, expected: str) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks_local.shutil, "disk_usage", lambda _: usage(0, 0, free_gib * limits.GIB))
    assert level(checks_local.disk(short_dir / "not" / "there" / "yet")) == expected


@pytest.mark.parametrize(("free_gib", "expected"), [(0.3, "fail"), (1, "warn"), (4, "ok")])
def test_memory(free_gib: float, expected: str) -> None:
    assert level(checks_local.memory(int(free_gib * limits.GIB), 8 * limits.GIB)) == expected


def test_memory_is_measured_here_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert " of " in checks_local.memory(None, None).what
    # As psutil 7.2.2 fails on macOS 27 (giampaolo/psutil#2978).
    monkeypatch.setattr(psutil, "virtual_memory", Raises(RuntimeError(PSUTIL_FAILS)))
    found = checks_local.memory(None, None)
    assert (level(found), "unknown" in found.what) == ("ok", True)


def test_a_system_that_is_short_of_memory_is_a_remark_whatever_is_free() -> None:
    found = checks_local.memory(6 * limits.GIB, 8 * limits.GIB, "warning")
    assert (level(found), "pressure: warning" in found.what) == ("warn", True)


def test_a_driver_without_its_last_file_is_told(tmp_path: Path) -> None:
    assert checks_machine.gpu_files(tmp_path) == []
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    (found,) = checks_machine.gpu_files(tmp_path)
    assert (level(found), "nvidia-modprobe" in found.fix) == ("warn", True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-uvm").touch()
    assert checks_machine.gpu_files(tmp_path) == []


def test_clock(short_dir: Path) -> None:
    os.utime(short_dir, (NOW, NOW))
    assert level(checks_local.clock(short_dir, NOW)) == "ok"
    assert level(checks_local.clock(short_dir, NOW - 3 * 86400)) == "warn"
    assert level(checks_local.clock(short_dir, 0.0)) == "fail"
    assert level(checks_local.clock(short_dir / "nope", NOW)) == "ok"


def test_python() -> None:
    assert level(checks_local.python((3, 11))) == "ok"
    assert level(checks_local.python((3, 10))) == "fail"


# ---- MLX and services ------------------------------------------------------------------------------------


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def report(**changes: Any) -> list[str]:
    found = {"blas": True, "device": "gpu", "version": "9.9", "right": True, "covered": []}
    found |= {"onnxruntime": True, "packed": True, **changes}
    return child(f"print({json.dumps(json.dumps(found))})")


@pytest.mark.parametrize(
    ("program", "expected", "words"),
    [
        (report(), ["ok"], "mlx 9.9 on the gpu"),
        (report(device="cpu"), ["ok", "ok", "ok"], "on the cpu"),
        (report(right=False), ["fail"], "wrong product"),
        (report(device="cpu", covered=["mlx-cuda-13==9.9"]), ["fail"], "over its CUDA build"),
        (child("raise ImportError('no mlx here')"), ["fail"], "ImportError: no mlx here"),
        (child("import os; os.abort()"), ["fail"], "SIGABRT"),
        (child("print('hello')"), ["fail"], "hello"),
    ],
)
def test_mlx(program: list[str], expected: list[str], words: str) -> None:
    findings = checks_machine.mlx(program)
    assert [level(finding) for finding in findings] == expected
    assert words in findings[0].what


def test_mlx_that_hangs() -> None:
    [finding] = checks_machine.mlx(child("import time; time.sleep(60)"), timeout_s=0.2)
    assert "did not answer" in finding.what
    assert level(finding) == "fail"


@pytest.mark.parametrize(
    ("platform", "machine", "fast", "expected"),
    [
        ("linux", "x86_64", True, "ok"),
        ("linux", "x86_64", False, "warn"),
        ("linux", "aarch64", False, "ok"),
        ("darwin", "arm64", False, "ok"),
    ],
)
def test_missing_mkl(
    monkeypatch: pytest.MonkeyPatch, platform: str, machine: str, fast: bool, expected: str
) -> None:
    import platform as platform_module

    program = report(device="cpu", blas=fast)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(platform_module, "machine", lambda: machine)
    assert level(checks_machine.mlx(program)[1]) == expected


@pytest.mark.parametrize(
    ("onnxruntime", "packed", "expected", "words"),
    [
        (True, True, "ok", "stay packed"),
        (True, False, "ok", "not exact on this processor"),
        (False, False, "warn", "no onnxruntime"),
    ],
)
def test_how_a_cpu_holds_weights(onnxruntime: bool, packed: bool, expected: str, words: str) -> None:
    program = report(device="cpu", onnxruntime=onnxruntime, packed=packed)
    finding = checks_machine.mlx(program)[2]
    assert level(finding) == expected
    assert words in finding.what


def test_the_real_mlx_probe_answers() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    assert checks_machine.mlx()[0].level == "ok"


@pytest.mark.parametrize(
    ("active", "running", "expected"),
    [(True, True, "ok"), (False, True, "warn"), (False, False, "fail")],
)
@pytest.mark.parametrize("manager", ["systemd", "launchd"])
def test_an_installed_service_should_run(manager: str, active: bool, running: bool, expected: str) -> None:
    state = State(manager, "user", "/f", installed=True, active=active, detail="failed (Result)")
    assert level(checks_machine.service(state, running=running)) == expected


# ---- The daemon ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"version": "0.0.9"}, "fail"),
        ({"draining": True}, "warn"),
        ({"ready": False}, "warn"),
    ],
)
def test_daemon(changes: dict[str, Any], expected: str) -> None:
    status = read({**STATUS, "version": fleetd.__version__, **changes}, DaemonStatus)
    assert level(checks_daemon.daemon(status)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"state": "failed", "error": "out of memory"}, "fail"),
        ({"progress_age_s": limits.ENGINE_STALL_S}, "warn"),
        ({"progress_age_s": limits.ENGINE_STALL_S + 0.1}, "fail"),
        ({"progress_age_s": 9999.0, "decoding": 0, "waiting": 0}, "ok"),
        ({"progress_age_s": 9999.0, "state": "loading"}, "ok"),
        ({"restarts": 3}, "warn"),
    ],
)
def test_engines(changes: dict[str, Any], expected: str) -> None:
    [finding] = checks_daemon.engines(read({"engines": [{**ENGINE, **changes}]}, DaemonStatus))
    assert level(finding) == expected


def test_no_engine_is_well() -> None:
    assert [level(finding) for finding in checks_daemon.engines(DaemonStatus())] == ["ok"]


def installed(daemon: FakeDaemon, *names: str) -> Finding:
    daemon.on(
        "GET", "/fleet/v1/models", Reply({"installed": [{"name": name} for name in names], "catalog": []})
    )
    return checks_daemon.default_model(Client(locate(daemon.home, None)), read(STATUS, DaemonStatus))


def test_default_model(daemon: FakeDaemon) -> None:
    assert "models pull smollm2-135m" in installed(daemon, "other").fix
    daemon.on("POST", "/fleet/v1/models/verify", Reply({"ok": True, "digest": "b3:abc"}))
    assert level(installed(daemon, "smollm2-135m")) == "ok"
    corrupt = {"error": {"message": "model.gguf is truncated.", "code": "model_corrupt", "hint": ""}}
    daemon.on("POST", "/fleet/v1/models/verify", Reply(corrupt, 500))
    finding = installed(daemon, "smollm2-135m")
    assert level(finding) == "fail"
    assert "truncated" in finding.what
    assert "models remove" in finding.fix


def test_models_that_cannot_be_asked_for_and_adapters_that_are_not_used(daemon: FakeDaemon) -> None:
    listing: dict[str, Any] = {"installed": [{"name": "good"}]}
    client = Client(locate(daemon.home, None))
    daemon.on("GET", "/fleet/v1/models", Reply(listing))
    assert [(level(each), each.what) for each in checks_daemon.models(client)] == [
        ("ok", "1 installed, each can be asked for")
    ]
    daemon.on("GET", "/fleet/v1/models", Reply({"installed": []}))
    assert [(level(each), each.what) for each in checks_daemon.models(client)] == [
        ("ok", "none is installed yet")
    ]
    listing["installed"] = [{"name": "tuned", "ignored": ["adapters.safetensors"]}]
    listing["unlisted"] = [{"path": "/models/my model\x1b", "reason": "'my model' is not the name of it."}]
    daemon.on("GET", "/fleet/v1/models", Reply(listing))
    tuned, odd = checks_daemon.models(client)
    assert [level(tuned), level(odd)] == ["warn", "warn"]
    assert "tuned answers without adapters.safetensors" in tuned.what
    assert "mlx_lm.fuse" in tuned.fix
    assert "is not listed: 'my model' is not the name" in odd.what
    assert "\x1b" not in odd.what
    assert "fleetctl models add" in odd.fix
    daemon.on("GET", "/fleet/v1/models", Reply({"error": {"message": "It broke.", "code": "x"}}, 500))
    assert [level(finding) for finding in checks_daemon.models(client)] == ["fail"]


# ---- The whole -------------------------------------------------------------------------------------------


@pytest.fixture
def healthy(daemon: FakeDaemon) -> FakeDaemon:
    """A daemon with nothing to complain about but this machine itself."""
    (daemon.home / "api-token").touch(mode=0o600)
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "version": fleetd.__version__, "http": None}))
    daemon.on("GET", "/fleet/v1/models", Reply({"installed": [{"name": "smollm2-135m"}], "catalog": []}))
    daemon.on("POST", "/fleet/v1/models/verify", Reply({"ok": True, "digest": "b3:abc"}))
    return daemon


def failures(stdout: str) -> list[str]:
    return [check["name"] for check in json.loads(stdout)["checks"] if check["level"] == "fail"]


def test_doctor_of_a_healthy_daemon(run: Run, healthy: FakeDaemon) -> None:
    done = run("doctor", "--json", home=healthy.home, timeout_s=90)
    names = {check["name"] for check in json.loads(done.stdout)["checks"]}
    assert {"daemon", "socket", "home", "token", "disk", "memory", "clock", "python", "mlx"} <= names
    assert {"fleet", "model", "models"} <= names
    # The machine that runs the tests may itself be short of memory or disk.
    assert set(failures(done.stdout)) <= {"disk", "memory", "mlx"}
    assert done.returncode == (Exit.ERROR if failures(done.stdout) else Exit.OK)


def test_doctor_finds_open_permissions(run: Run, healthy: FakeDaemon) -> None:
    (healthy.home / "api-token").chmod(0o644)
    healthy.socket.chmod(0o666)
    healthy.home.chmod(0o755)
    done = run("doctor", "--json", home=healthy.home, timeout_s=90)
    assert done.returncode == Exit.ERROR
    assert {"token", "socket", "home"} <= set(failures(done.stdout))
    assert json.loads(done.stdout)["ok"] is False


def test_doctor_without_a_daemon(run: Run, short_dir: Path) -> None:
    done = run("doctor", home=short_dir / "nope", timeout_s=90)
    assert done.returncode == Exit.ERROR
    assert "fail  daemon: No daemon: its home" in done.stdout
    assert "→ Start it with `fleetd run" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("checks failed.")


def test_doctor_by_socket_uses_the_home_the_daemon_names(
    run: Run, healthy: FakeDaemon, short_dir: Path
) -> None:
    other = short_dir / "other"
    other.mkdir(mode=0o700)
    status = {**STATUS, "version": fleetd.__version__, "http": None, "home": str(other)}
    healthy.on("GET", "/fleet/v1/status", Reply(status))
    done = run("--socket", str(healthy.socket), "doctor", "--json", timeout_s=90)
    [home] = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "home"]
    assert home["what"] == str(other)


def test_a_status_of_another_form_is_a_finding_with_the_daemons_version(
    run: Run, healthy: FakeDaemon
) -> None:
    healthy.on("GET", "/fleet/v1/status", Reply({"version": "9.9.9", "engines": 1}))
    checks = json.loads(run("doctor", "--json", home=healthy.home, timeout_s=90).stdout)["checks"]
    form, version = [check["what"] for check in checks if check["name"] == "daemon"]
    assert "Expected `array`, got `int`" in form
    assert version == f"It is version 9.9.9, fleetctl is {fleetd.__version__}."


def test_a_check_that_cannot_be_made_is_a_finding() -> None:
    def broken() -> Finding:
        raise OSError(5, "Input/output error")

    [finding] = doctor._guarded("disk", broken)
    assert level(finding) == "fail"
    assert "Input/output error" in finding.what


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (["ok"], "All well."),
        (["ok", "warn"], "All well, with one remark."),
        (["warn", "warn"], "All well, with 2 remarks."),
        (["ok", "fail"], "1 of 2 checks failed."),
    ],
)
def test_summary(levels: list[Any], words: str) -> None:
    assert doctor._summary([Finding("x", each, "w", "f") for each in levels]).strip() == words


def test_socket_mode_of_a_live_socket(daemon: FakeDaemon) -> None:
    assert stat.S_ISSOCK(daemon.socket.lstat().st_mode)
    for mode, expected in ((0o600, "ok"), (0o660, "fail")):
        daemon.socket.chmod(mode)
        assert (
            level(checks_local.private_file("socket", daemon.socket, kind="socket", expected=True))
            == expected
        )


# ---- Sleep -----------------------------------------------------------------------------------------------

# Of `pmset -g` in 5T33Z0/Gigabyte-Z490-Vision-G-Hackintosh-OpenCore#31, shortened.
PMSET = """System-wide power settings:
Currently in use:
 standby              1
 womp                 {womp}
 networkoversleep     0
 disksleep            10
 sleep                {sleep}
 displaysleep         20
"""


@pytest.mark.parametrize(
    ("womp", "sleep", "levels"),
    [("1", "1 (sleep prevented by sharingd, coreaudiod)", []), ("0", "0", []), ("0", "1", ["warn"])],
)
def test_a_mac_that_nobody_can_wake(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, womp: str, sleep: str, levels: list[str]
) -> None:
    program = short_dir / "pmset"
    program.write_text(f"#!/bin/sh\ncat <<'end'\n{PMSET.format(womp=womp, sleep=sleep)}end\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_dir}:{os.environ['PATH']}")
    assert checks_machine.wakes("linux") == []
    assert [level(finding) for finding in checks_machine.wakes("darwin")] == levels


def test_an_address_for_ollamas_clients_that_is_taken() -> None:
    assert checks_daemon.ollama(DaemonStatus()) == []
    taken = "another program listens at 127.0.0.1:11434"
    (finding,) = checks_daemon.ollama(read(STATUS | {"ollama_missing": taken}, DaemonStatus))
    assert (level(finding), taken in finding.what) == ("warn", True)


def test_models_whose_files_could_not_be_hashed() -> None:
    assert checks_daemon.digests(DaemonStatus()) == []
    wrong = {"a": "No such device", "b\x1b[31m": "Permission denied"}
    found = checks_daemon.digests(read(STATUS | {"undigested": wrong}, DaemonStatus))
    assert [(level(finding), finding.name) for finding in found] == [
        ("warn", "model a"),
        ("warn", "model b\\x1b[31m"),
    ]
    assert "No such device" in found[0].what


def test_a_machine_that_may_sleep_while_it_computes() -> None:
    assert checks_daemon.power(DaemonStatus()) == []
    refused = read(STATUS | {"power": {"held": False, "refused": "the battery is at 20%"}}, DaemonStatus)
    (finding,) = checks_daemon.power(refused)
    assert level(finding) == "warn"
    assert "battery is at 20%" in finding.what
    assert "Plug it in" in finding.fix


def test_a_machine_without_a_battery_is_not_to_be_plugged_in() -> None:
    power = {"held": False, "refused": "this system has no command for it"}
    (finding,) = checks_daemon.power(read(STATUS | {"power": power}, DaemonStatus))
    assert finding.fix == "Turn off automatic sleep in the system's settings, if it has any."
