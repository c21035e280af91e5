"""A process that makes a new home's key and certificate while its daemon starts.

Making them takes cryptography: 11 MB that would stay in the daemon's memory, and a tenth of its start.

    python -m fleetd.p2p.membership.new_identity FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.p2p.membership import key_files


def begin(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start to make an identity in ``folder``; None if there is something already, or if this process has
    the library in memory anyway.

    ``finish`` must follow. A process that fails is no error: ``Identity.load_or_create`` then makes the
    identity in the daemon, or says why there can be none.
    """
    names = (key_files.KEY_NAME, key_files.CERTIFICATE_NAME)
    if "cryptography" in sys.modules or any(os.path.lexists(folder / name) for name in names):
        return None
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:  # no process can be had
        return None


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end; one that hangs is killed. Blocks."""
    try:
        process.wait(limits.NEW_IDENTITY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(folder: Path) -> int:
    with suppress(FleetError):
        key_files.load_or_create(folder)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
