"""A newcomer's first minutes: a fresh clone, empty caches, `make demo`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, Measured, at_most
from bench.harness.child import ROOT

_LIMIT_S = 1200.0
# What finds the package index and its certificates; everything else would be a cache or a setting of ours.
_KEPT = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_KEPT_PREFIXES = ("PIP_INDEX", "PIP_EXTRA_INDEX", "PIP_TRUSTED", "PIP_CERT", "HTTP_", "HTTPS_", "NO_PROXY")


def measure(runs: int) -> Measured:
    took_s = [_demo() for _ in range(runs)]
    return Measured(
        [Figure("`make demo` from a fresh clone, empty caches", "s", took_s, at_most(240))],
        "`git clone` of this checkout's last commit into an empty folder, then `make demo` with an empty "
        "home and empty caches: it makes the virtual environment, installs, fetches the model, starts a "
        "daemon and prints an answer. Timed from before the clone to exit code 0; the network's share is "
        "in it.",
    )


def _demo() -> float:
    with tempfile.TemporaryDirectory(prefix="fleetd-demo-") as folder:
        clone, home = Path(folder) / "fleetd", Path(folder) / "home"
        home.mkdir()
        env = {k: v for k, v in os.environ.items() if k in _KEPT or k.upper().startswith(_KEPT_PREFIXES)}
        # pip's settings may be a file in the real home, such as the address of a mirror.
        env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": folder}
        env |= _pip_settings()
        begun = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)  # noqa: S607
        subprocess.run(["make", "demo"], cwd=clone, env=env, check=True, timeout=_LIMIT_S)  # noqa: S607
        return time.perf_counter() - begun


def _pip_settings() -> dict[str, str]:
    for place in ("~/.config/pip/pip.conf", "~/.pip/pip.conf"):
        if (path := Path(place).expanduser()).exists():
            return {"PIP_CONFIG_FILE": str(path)}
    return {}
