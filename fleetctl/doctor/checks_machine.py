"""Doctor's checks that start other programs: MLX in a child process, systemd or launchd."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.exits import ClientError
from fleetctl.managers import Scope, State, manager_for
from fleetctl.render.text import one_line

# A cold import of MLX from a slow disk takes 20 s; a wedged GPU driver never answers.
MLX_S = 60.0
# MLX is imported in a child because a broken driver may abort or hang the whole process. The engine's own
# preloading runs first, so that what is checked is what an engine would do.
_MLX_PROBE = """
import json
from fleetd.engine.cpu import preload_blas
blas = preload_blas()
import mlx.core as mx
right = mx.sum(mx.ones((64, 64)) @ mx.ones((64, 64))).item() == 64.0 ** 3
device = mx.default_device().type.name
print(json.dumps({"blas": blas, "device": device, "version": mx.__version__, "right": right}))
"""


def mlx(program: list[str] | None = None, timeout_s: float = MLX_S) -> list[Finding]:
    """Check that the accelerator computes right, and that a Linux CPU has a fast BLAS."""
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
    if found["device"] == "cpu":
        findings.append(_cpu(fast=found["blas"]))
    return findings


def _broken(done: subprocess.CompletedProcess[str]) -> Finding:
    if done.returncode < 0:
        reason = f"the process was ended by {signal.Signals(-done.returncode).name}"
    else:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = one_line(lines[-1]) if lines else f"exit code {done.returncode}"
    extra = "mac" if sys.platform == "darwin" else "cuda or cpu"
    return fail(
        "mlx", f"MLX cannot be used: {reason}", f"Install fleetd with the extra for this machine ({extra})."
    )


def _cpu(*, fast: bool) -> Finding:
    import platform

    if fast:
        return ok("cpu math", "MKL is loaded")
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return warn(
            "cpu math",
            "There is no MKL: prefill is several times slower than it could be.",
            "Install the extra: pip install 'fleetd[cpu]'.",
        )
    return ok("cpu math", "MKL does not exist for this machine")


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


def services(*, running: bool) -> list[Finding]:
    """Check that each installed service runs."""
    findings = []
    scopes: tuple[Scope, ...] = ("system", "user")
    for scope in scopes:
        try:
            state = manager_for(scope).state()
        except ClientError as error:
            return [ok("service", error.message)]
        if state.installed:
            findings.append(service(state, running=running))
    return findings or [ok("service", "not installed; `fleetctl service install` starts fleetd by itself")]


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
