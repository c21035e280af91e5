"""A cable that is long: frames between two TAP devices arrive after a delay, in their order.

Run as a program: ``wire.py SECONDS NAME NAME`` makes the devices, prints "ready" and ends with its
stdin. The kernels of many virtual machines lack netem; this needs only /dev/net/tun. Devices with a large MTU
make it cheap: a frame is a system call or two, whatever its size.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536
# What may be on its way: more than TCP's windows hold. Beyond it frames wait in the device, or are lost.
_FRAMES = 4096


def main(delay_s: float, names: list[str]) -> None:
    ends = [_tap(name) for name in names]
    other = dict(zip(ends, reversed(ends), strict=True))
    # (when it arrives, where, what), in the order of arrival, because the delay is the same for all.
    under_way: deque[tuple[float, int, bytes]] = deque()
    selector = selectors.DefaultSelector()
    for end in ends:
        selector.register(end, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            if key.fileobj is sys.stdin:
                return
            # Errors mean that nothing waits, or that the device is down.
            with contextlib.suppress(OSError):
                while len(under_way) < _FRAMES:
                    frame = os.read(key.fd, _FRAME_BYTES)
                    under_way.append((time.monotonic() + delay_s, other[key.fd], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, out, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                os.write(out, frame)


def _tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
