"""An Ethernet switch in user space: frames between TAP devices, lost, late or doubled on demand; cut cables.

Run as a program: ``tap_switch.py NAME...`` makes the devices, prints "ready", obeys one JSON command per line
on stdin, and ends with it. The kernels of CI machines often lack netem; this needs only /dev/net/tun.

    {"loss": 0.2}      share of frames dropped on their way out of each port
    {"doubled": 0.2}   share of frames that are sent twice
    {"late": 0.2}      share of frames that later ones overtake, by up to ``late_s`` seconds
    {"cut": [0, 2]}    ports whose cable is cut, while the machine behind still believes that it has a link
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65536
GROUP_BIT = 1  # in the first byte of a destination that is not one machine


def make_tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return handle


class Switch:
    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._port_of: dict[bytes, int] = {}
        self._shares = {"loss": 0.0, "doubled": 0.0, "late": 0.0, "late_s": 0.0}
        self._cut: set[int] = set()
        self._waiting: list[tuple[float, int, bytes]] = []

    def obey(self, command: dict[str, object]) -> None:
        for name in self._shares:
            if isinstance(share := command.get(name), int | float):
                self._shares[name] = float(share)
        if isinstance(cut := command.get("cut"), list):
            self._cut = {self._ports[number] for number in cut}

    def forward(self, port: int) -> None:
        """Pass on what waits at a port; a flood at one does not keep the others waiting for long."""
        for _ in range(64):
            try:
                frame = os.read(port, FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                return  # EIO: the device is down
            if port in self._cut:
                continue
            self._port_of[frame[6:12]] = port
            known = None if frame[0] & GROUP_BIT else self._port_of.get(frame[:6])
            for out in [known] if known is not None else self._ports:
                if out != port and out not in self._cut and random.random() >= self._shares["loss"]:
                    self._send(out, frame)

    def _send(self, out: int, frame: bytes) -> None:
        for _ in range(2 if random.random() < self._shares["doubled"] else 1):
            if random.random() < self._shares["late"]:
                due_s = time.monotonic() + random.uniform(0, self._shares["late_s"])
                heapq.heappush(self._waiting, (due_s, out, frame))
            else:
                _write(out, frame)

    def send_late(self) -> float | None:
        """Send the late frames that are due; returns the seconds until the next is, None without one."""
        while self._waiting:
            left_s = self._waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            _, out, frame = heapq.heappop(self._waiting)
            _write(out, frame)
        return None


def _write(port: int, frame: bytes) -> None:
    try:
        os.write(port, frame)
    except OSError:
        pass  # its queue is full or it is down: switches drop


def main(names: list[str]) -> None:
    ports = [make_tap(name) for name in names]
    switch = Switch(ports)
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)  # noqa: T201
    while True:
        for key, _ in selector.select(switch.send_late()):
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                switch.obey(json.loads(line))
                print("done", flush=True)  # noqa: T201
            else:
                switch.forward(key.fd)


if __name__ == "__main__":
    main(sys.argv[1:])
