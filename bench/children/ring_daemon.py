"""What the daemon of one machine does for a rank, in a process of its own: the two ends of its tunnels.

``python -m bench.children.ring_daemon RANK SIZE``
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import msgspec

from bench.harness.child import serve
from fleetd.requests.ranks.ring_links import RingLinks

_HERE = "127.0.0.1"


def _key(rank: int) -> bytes:
    """Of the stream from this rank to the next one. Both ends are of this benchmark."""
    return bytes([rank]) * 32


def main(rank: int, size: int) -> None:
    # Ranks are children of the benchmark, as this process is.
    links = RingLinks(rank, size, daemon=os.getppid())
    listener = socket.create_server((_HERE, 0))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "place":
            return {"place": msgspec.to_builtins(links.place), "port": listener.getsockname()[1]}
        # To the next machine, and then from the one before: connections wait in the listener's queue.
        links.goes_to(socket.create_connection((_HERE, question["next_port"])), _key(rank))
        links.comes_from(listener.accept()[0], _key((rank - 1) % size))
        return {}

    serve(answer)
    links.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
