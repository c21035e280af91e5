"""What a daemon has in memory: the parts of its libraries that it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from live_daemon import LiveDaemon

_LOADED = """
import json, ssl, sys
usual, paths = ssl.create_default_context, ssl.SSLContext.set_default_verify_paths
from fleetd.startup import lean_imports
lean_imports.load()
from fleetd import app
import aiohttp.connector
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "authorities": [
        len(context.get_ca_certs())
        for context in (aiohttp.connector._SSL_CONTEXT_VERIFIED, aiohttp.connector._SSL_CONTEXT_UNVERIFIED)
    ],
    "verifies": aiohttp.connector._SSL_CONTEXT_VERIFIED.verify_mode == ssl.CERT_REQUIRED,
    "restored": ssl.create_default_context is usual
    and ssl.SSLContext.set_default_verify_paths is paths
    and "rich" not in sys.modules,
}))
import rich  # still there for whoever wants it
"""


@pytest.mark.one_loop
def test_a_daemon_imports_no_more_than_it_uses() -> None:
    ran = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert not {"rich", "pygments", "spake2", "zeroconf", "mlx", "numpy"} & set(found["modules"])
    # It comes with the first machine to be paired with.
    assert "cryptography" not in found["modules"]
    assert not {"csv", "platformdirs", "statistics", "zipfile"} & set(found["modules"])
    assert {"structlog", "aiohttp", "fleetd"} <= set(found["modules"])
    assert found["authorities"] == [0, 0]
    assert found["verifies"]
    assert found["restored"]


@pytest.mark.one_loop
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_new_daemon_without_peers_has_no_cryptography_in_memory(tmp_path: Path) -> None:
    """Another process has made its key; after a restart the key is there."""
    with LiveDaemon(tmp_path / "home", tmp_path / "models") as daemon:
        assert _libraries(daemon) == {"uvloop"}
        daemon.restart()
        assert _libraries(daemon) == {"uvloop"}


def _libraries(daemon: LiveDaemon) -> set[str]:
    """Which of these two the daemon has in memory; it always has the first."""
    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    return {name for name in ("uvloop", "cryptography") if f"/{name}/" in mapped}


@pytest.mark.one_loop
def test_a_worker_begins_without_rich() -> None:
    program = "import sys; from fleetd.engine import worker; print('rich' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
