"""The RDMA devices of this machine: on a Mac, one for each Thunderbolt port."""

from __future__ import annotations

import subprocess
import sys

from fleetd import limits
from fleetd.text.rdma_tools import active_devices


def active(platform: str = sys.platform) -> list[str]:
    """Names of devices that are linked to another machine; none elsewhere than on a Mac, or if its tool is
    missing. Blocks for some milliseconds."""
    if platform != "darwin":
        return []
    try:
        done = subprocess.run(
            ["ibv_devinfo"],  # noqa: S607  (a Mac's own; tests put theirs first)
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limits.PROBE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return active_devices(done.stdout)
