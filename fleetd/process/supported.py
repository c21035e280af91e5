"""Whether MLX has a build for this machine and this Python: said before anything is installed or loaded.

Run as a script by the Makefile, with the Python that is to run fleetd; it imports nothing of fleetd.
"""

from __future__ import annotations

import platform
import subprocess
import sys


def unsupported(system: str, machine: str, *, translated: bool = False) -> tuple[str, str]:
    """What is wrong and what to do about it; ("", "") if nothing is.

    ``translated``: Rosetta runs this Python for an Apple chip.
    """
    if (system, machine) != ("Darwin", "x86_64"):
        return "", ""
    if translated:
        return (
            "This Python was built for Intel Macs, and MLX, which computes for fleetd, has no build for it.",
            "Install Python for Apple silicon (`brew install python@3.12`, or from python.org) and use that.",
        )
    return (
        "This Mac has an Intel processor, and MLX, which computes for fleetd, has no build for it.",
        "Run fleetd on a Mac with Apple silicon or on Linux. From this one, use their API over the network.",
    )


def here() -> tuple[str, str]:
    """The same of this process."""
    system, machine = platform.system(), platform.machine()
    return unsupported(system, machine, translated=system == "Darwin" and _translated())


def _translated() -> bool:
    try:
        told = subprocess.run(
            ["sysctl", "-n", "sysctl.proc_translated"],  # noqa: S607  (a Mac's own; tests put theirs first)
            capture_output=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return told.stdout.strip() == b"1"


if __name__ == "__main__":
    sys.exit("\n".join(here()).strip() or 0)
