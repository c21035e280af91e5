"""A ring of two machines with a network of their own: what is captured at both ends of tunnels is sealed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ring_host
from netns import Lab, LabHost, why_not
from ring_host import COUNT, VALUES

pytestmark = [pytest.mark.timeout(300)]

HOST = Path(ring_host.__file__)
SUM = sum(VALUES)
# So many of one value in a row are no chance.
RUN = 8


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    if reason := why_not():
        pytest.skip(f"WHAT TUNNELS SHOW ON A WIRE IS NOT TESTED: {reason}")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2) as made:
        yield made


def start(host: LabHost, *arguments: object) -> subprocess.Popen[str]:
    return host.start(
        [sys.executable, str(HOST), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class LabCapture:
    """All frames that one machine's eth0 sends and receives."""

    def __init__(self, host: LabHost, file: Path) -> None:
        self._file = file
        self._process = start(host, "capture", file)
        assert line(self._process) == "ready"

    def frames(self) -> list[bytes]:
        """Ends it. What has passed the wire by now is in it."""
        self._process.communicate("", timeout=60)
        data, found = self._file.read_bytes(), []
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(data[4 : 4 + size])
            data = data[4 + size :]
        return found


def shown(frames: list[bytes]) -> set[float]:
    """Values that somebody at the wire can read."""
    every = {*VALUES, SUM}
    return {value for value in every if any(struct.pack("<f", value) * RUN in frame for frame in frames)}


def test_a_sum_of_two_machines_is_sealed_on_the_wire_at_both_ends(lab: Lab, tmp_path: Path) -> None:
    captures = [LabCapture(host, tmp_path / f"ring{host.number}") for host in lab.hosts]
    ranks = [
        start(host, "rank", host.number, host.address, lab.hosts[1 - host.number].address)
        for host in lab.hosts
    ]
    for rank in ranks:
        least, most = map(float, line(rank).split())
        assert least == most == pytest.approx(SUM)
    for rank in ranks:
        rank.communicate("", timeout=60)
        assert rank.returncode == 0
    for capture in captures:
        frames = capture.frames()
        # Half of the array goes each way, twice. The system drops frames that a busy machine reads too late.
        assert sum(map(len, frames)) > COUNT * 4
        assert shown(frames) == set()


def test_the_same_values_without_a_tunnel_are_seen_by_the_capture(lab: Lab, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    captures = [LabCapture(host, tmp_path / f"plain{host.number}") for host in lab.hosts]
    listener = start(lab.hosts[1], "listen", lab.hosts[1].address)
    sender = start(lab.hosts[0], "send", lab.hosts[1].address)
    assert line(listener) == "read"
    for process in (listener, sender):
        process.communicate("", timeout=60)
    for capture in captures:
        assert shown(capture.frames()) == {VALUES[0]}
