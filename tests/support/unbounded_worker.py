"""The real worker, as on macOS or a GPU, where no address-space limit works.

Its first argument: "builds", where building a model takes memory without end; "renders", where templates may.
"""

from __future__ import annotations

import sys
import time

from fleetd.engine import worker
from fleetd.engine.cpu import address_space, products
from fleetd.limits import MIB


def greedy() -> None:
    """Take a GiB in a second or so, and no more than 4."""
    held = []
    while len(held) < 256:
        held.append(bytearray(b"x" * 16 * MIB))
        time.sleep(0.01)
    sys.exit("Nothing has ended this worker.")


if __name__ == "__main__":
    address_space.is_bounded = lambda device: False
    if sys.argv.pop(1) == "builds":
        # Called where a load begins.
        products.preload_blas = greedy
    sys.exit(worker.main())
