"""What a machine of a lab does for the test of tunnels: a rank of an MLX ring, its tunnels, and a capture.

python ring_host.py capture FILE               all frames of eth0, until stdin ends
python ring_host.py rank    RANK ADDRESS OTHER  one of two ranks; prints the sum that it found
python ring_host.py listen ADDRESS | send ADDRESS   the values of rank 0 without a tunnel
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec

from fleetd.engine.settings import RingPlace
from fleetd.requests.ranks.ring_links import RingLinks

PORT = 8200
# 256 KiB of one value at each rank, which its frames would show.
VALUES, COUNT = (1.1875e3, 7.4375e-2), 1 << 16
_ALL_FRAMES = 3
# What the system keeps of frames that are not read yet. It lets no one set more than its own limit.
_BUFFER_BYTES = 8 << 20


def capture(file: Path) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES)) as wire,
        file.open("wb") as out,
    ):
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        wire.bind(("eth0", 0))
        _say("ready")
        while sys.stdin not in (ready := select.select([sys.stdin, wire], [], [])[0]) or wire in ready:
            frame = wire.recv(1 << 16)
            out.write(len(frame).to_bytes(4, "big") + frame)


def rank(number: int, address: str, other: str) -> None:
    """The rank is a process of its own: none of its threads runs while it waits for the other one."""
    with closing(RingLinks(number, 2)) as links, socket.create_server((address, PORT)) as listener:
        links.goes_to(_reached(other), bytes([number]) * 32)
        links.comes_from(listener.accept()[0], bytes([1 - number]) * 32)
        place = msgspec.json.encode(links.place).decode()
        done = subprocess.run(
            [sys.executable, __file__, "sum", place],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        _say(done.stdout.strip())
        # Until the other one has all of it.
        sys.stdin.read()


def add(place: RingPlace) -> None:
    import mlx.core as mx

    from fleetd.engine.measure.pass_progress import PassProgress
    from fleetd.engine.ranks import ring

    mx.set_default_device(mx.cpu)
    progress = PassProgress.alone()
    group = ring.joined(place, progress)
    ring.check(group, progress)
    found = mx.distributed.all_sum(mx.full(COUNT, VALUES[place.rank]), group=group)
    mx.eval(found)
    _say(f"{found.min().item()} {found.max().item()}")


def plain(address: str, *, listens: bool) -> None:
    import numpy as np

    data = np.full(COUNT, VALUES[0], np.float32).tobytes()
    if not listens:
        with _reached(address) as sock:
            sock.sendall(data)
        return
    with socket.create_server((address, PORT)) as listener, listener.accept()[0] as sock:
        left = len(data)
        while left:
            left -= len(sock.recv(left))
        _say("read")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _reached(address: str) -> socket.socket:
    """Once somebody listens there."""
    until = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((address, PORT), 60)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main(what: str, *rest: str) -> None:
    match what:
        case "capture":
            capture(Path(rest[0]))
        case "rank":
            rank(int(rest[0]), rest[1], rest[2])
        case "sum":
            add(msgspec.json.decode(rest[0], type=RingPlace))
        case "listen" | "send":
            plain(rest[0], listens=what == "listen")


if __name__ == "__main__":
    main(*sys.argv[1:])
