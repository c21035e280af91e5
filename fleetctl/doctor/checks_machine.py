"""Doctor's checks that start other programs: MLX in a child process, systemd or launchd."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from fleetctl.connection.home import model_folders
from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.exits import ClientError
from fleetctl.render.text import one_line
from fleetctl.service.installation import started_by, troubles
from fleetctl.service.managers import Scope, State, manager_for, run_command
from fleetd.process import supported

# A cold import of MLX from a slow disk takes 20 s; a wedged GPU driver never answers.
MLX_S = 60.0
# MLX is imported in a child because a broken driver may abort or hang the whole process. The engine's own
# preloading runs first, so that what is checked is what an engine would do.
#
# The CUDA build and the CPU's have a file of the same name: where both are installed, the later one has won.
_MLX_PROBE = """
import importlib.metadata, importlib.util, json
from fleetd.engine.cpu.products import preload_blas
blas = preload_blas()
import mlx.core as mx
from fleetd.engine.cpu.packed_product import kernels
right = mx.sum(mx.ones((64, 64)) @ mx.ones((64, 64))).item() == 64.0 ** 3
device = mx.default_device().type.name
covered = [
    f"{build.name}=={build.version}"
    for build in importlib.metadata.distributions() if build.name.startswith("mlx-cuda")
    for file in build.files or () if file.name == "libmlx.so" and file.size != file.locate().stat().st_size
]
found = {"blas": blas, "device": device, "version": mx.__version__, "right": right, "covered": covered}
found["onnxruntime"] = importlib.util.find_spec("onnxruntime") is not None
found["packed"] = device == "cpu" and bool(kernels())
print(json.dumps(found))
"""


def mlx(program: list[str] | None = None, timeout_s: float = MLX_S) -> list[Finding]:
    """Check that the accelerator computes right, and that a Linux CPU has a fast BLAS."""
    what, fix = supported.here()
    if what:
        return [fail("mlx", what, fix)]
    try:
        done = subprocess.run(
            program or [sys.executable, "-c", _MLX_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            fail(
                "mlx",
                f"MLX did not answer within {timeout_s:.0f} s.",
                "The GPU driver may hang: restart the machine.",
            )
        ]
    if done.returncode != 0:
        return [_broken(done)]
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return [fail("mlx", f"MLX said {one_line(done.stdout[:200])!r}.", "Reinstall mlx.")]
    if not found["right"]:
        return [fail("mlx", "MLX computes a wrong product.", "Update the GPU driver, reinstall mlx.")]
    findings = [ok("mlx", f"mlx {found['version']} on the {found['device']}")]
    if covered := found["covered"]:
        fix = shlex.join([sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", *covered])
        return [fail("mlx", "The CPU's build of MLX lies over its CUDA build.", fix)]
    if found["device"] == "cpu":
        findings += [
            _cpu(fast=found["blas"]),
            _weights(packed=found["packed"], onnxruntime=found["onnxruntime"]),
        ]
    return findings


def _broken(done: subprocess.CompletedProcess[str]) -> Finding:
    if done.returncode < 0:
        reason = f"the process was ended by {signal.Signals(-done.returncode).name}"
    else:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = one_line(lines[-1]) if lines else f"exit code {done.returncode}"
    return fail("mlx", f"MLX cannot be used: {reason}", "Install fleetd again (docs/install.md says how).")


def _cpu(*, fast: bool) -> Finding:
    import platform

    if fast:
        return ok("cpu math", "MKL is loaded")
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return warn(
            "cpu math",
            "There is no MKL: prefill is several times slower than it could be.",
            "Install it where fleetd is: pip install mkl.",
        )
    return ok("cpu math", "MKL does not exist for this machine")


def _weights(*, packed: bool, onnxruntime: bool) -> Finding:
    """How a CPU holds quantised weights."""
    if packed:
        return ok("cpu weights", "quantised weights stay packed")
    if onnxruntime:
        return ok("cpu weights", "onnxruntime is not exact on this processor: weights become 32-bit floats")
    return warn(
        "cpu weights",
        "There is no onnxruntime: weights become 32-bit floats, several times their size.",
        "Install it where fleetd is: pip install onnxruntime.",
    )


def installation(program: Path, home: Path, *, installed: bool = True) -> list[Finding]:
    """Check that a service can reach its program and models, and that they stay where they are."""
    found = troubles(program, model_folders(home, os.environ), sys.platform, Path.home())
    return [
        (fail if each.stops and installed else warn)("service files", each.what, each.fix) for each in found
    ]


def wakes(platform: str = sys.platform) -> list[Finding]:
    """Warn of a Mac that sleeps, and that paired machines cannot wake."""
    if platform != "darwin":
        return []
    shown = run_command(["pmset", "-g"])
    settings = dict(re.findall(r"^\s*(sleep|womp)\s+(\d+)", shown.output, re.MULTILINE))
    if shown.code != 0 or settings.get("womp") != "0" or settings.get("sleep", "0") == "0":
        return []
    what = f"This Mac sleeps after {settings['sleep']} minutes, and paired machines cannot wake it."
    fix = "Switch on Wake for network access in System Settings, or run `sudo pmset -a womp 1`."
    return [warn("sleep", what, fix)]


def gpu_files(root: Path = Path("/")) -> list[Finding]:
    """Check that a loaded NVIDIA driver has created its last file, without which CUDA finds no GPU."""
    if not (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia-uvm").exists():
        return []
    return [
        warn(
            "GPU driver",
            "The NVIDIA driver is loaded, but /dev/nvidia-uvm is missing, and CUDA finds no GPU without it.",
            "sudo nvidia-modprobe -c 0 -u; the daemon sees it within a second.",
        )
    ]


def services(home: Path, *, running: bool) -> list[Finding]:
    """Check that each installed service runs, and will do so after the next update of Python."""
    findings = []
    scopes: tuple[Scope, ...] = ("system", "user")
    for scope in scopes:
        try:
            state = manager_for(scope).state()
        except ClientError as error:
            return [ok("service", error.message)]
        if state.installed:
            findings.append(service(state, running=running))
            program = started_by(Path(state.file))
            findings += [] if program is None else installation(program, home)
    if findings:
        return findings
    absent = ok("service", "not installed; `fleetctl service install` starts fleetd by itself")
    ours = Path(sys.executable).with_name("fleetd")
    return [absent, *(installation(ours, home, installed=False) if ours.exists() else [])]


def service(state: State, *, running: bool) -> Finding:
    """The finding for one installed service."""
    name = f"service ({state.scope})"
    if state.active:
        return ok(name, f"{state.manager}: {state.detail}")
    what = f"It is installed but not running: {state.detail}."
    if state.manager == "systemd":
        fix = f"journalctl {'--user ' if state.scope == 'user' else ''}-u fleetd -n 30 tells why."
    else:
        fix = "fleetd.log in the daemon's home tells why."
    # A daemon started by hand holds the home, so the service cannot start beside it.
    return warn(name, what, fix) if running else fail(name, what, fix)
