"""An Ethernet switch in user space: frames between TAP devices, with loss and cut cables on demand.

Run as a program: ``tap_switch.py NAME...`` makes the devices, prints "ready", obeys one JSON command per line
on stdin, and ends with it. The kernels of CI machines often lack netem; this needs only /dev/net/tun.

    {"loss": 0.2}     share of frames dropped on their way out of each port
    {"cut": [0, 2]}   ports whose cable is cut, while the machine behind still believes that it has a link
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import selectors
import struct
import sys

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
        self._loss = 0.0
        self._cut: set[int] = set()

    def obey(self, command: dict[str, object]) -> None:
        if isinstance(loss := command.get("loss"), int | float):
            self._loss = float(loss)
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
                if out != port and out not in self._cut and random.random() >= self._loss:
                    try:
                        os.write(out, frame)
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
        for key, _ in selector.select():
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
