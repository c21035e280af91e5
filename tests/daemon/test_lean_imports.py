"""What a daemon has in memory: the parts of its libraries that it uses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_LOADED = """
import json, ssl, sys
usual = ssl.create_default_context
from fleetd import lean_imports
lean_imports.load()
from fleetd import app
import aiohttp.connector
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "authorities": len(aiohttp.connector._SSL_CONTEXT_VERIFIED.get_ca_certs()),
    "verifies": aiohttp.connector._SSL_CONTEXT_VERIFIED.verify_mode == ssl.CERT_REQUIRED,
    "restored": ssl.create_default_context is usual and "rich" not in sys.modules,
}))
import rich  # still there for whoever wants it
"""


@pytest.mark.one_loop
def test_a_daemon_imports_no_more_than_it_uses() -> None:
    ran = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert not {"rich", "pygments", "greenlet", "spake2", "zeroconf", "mlx", "numpy"} & set(found["modules"])
    assert not {"csv", "platformdirs", "statistics", "zipfile"} & set(found["modules"])
    assert {"structlog", "aiohttp", "fleetd"} <= set(found["modules"])
    assert found["authorities"] == 0
    assert found["verifies"]
    assert found["restored"]
