"""The two machines that benchmarks measure are apart: a core each, a link of the speed that is claimed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.harness.cores import Share, starting_on, why_no_cores, why_no_share
from bench.harness.network import Cable, Link, why_not

SLOW = Link("8 Mbit/s", bits_per_s=8e6)
FAR = Link("far", rtt_s=0.1)
# Says on which cores it may run, once it is asked.
CORES = "import os; input(); print(sorted(os.sched_getaffinity(0)), flush=True)"
SINK = (
    "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True); c, _ = s.accept()\n"
    "while c.recv(1 << 16): pass\n"
    "c.sendall(b'!')"
)
SOURCE = (
    "import socket, sys, time; t = time.monotonic(); c = socket.create_connection((sys.argv[1], 7000))\n"
    "c.sendall(bytes(int(sys.argv[2]))); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.monotonic() - t)"
)
# Says how much of a core it got within a second, its start left out.
BURN = (
    "import time; t, used = time.monotonic(), time.process_time()\nwhile time.monotonic() - t < 1: pass\n"
    "print((time.process_time() - used) / (time.monotonic() - t))"
)


def seconds(cable: Cable, count: int) -> float:
    """From connecting to the answer that all bytes have come."""
    here, there = cable.ends
    sink = subprocess.Popen([*there.enter, sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    try:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        command = [*here.enter, sys.executable, "-c", SOURCE, there.address, str(count)]
        return float(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    finally:
        sink.communicate(timeout=60)


@pytest.mark.skipif(bool(why_not(SLOW)), reason=why_not(SLOW))
def test_a_slow_link_is_as_slow_as_it_says() -> None:
    with Cable(SLOW) as cable:
        # Two megabytes at one a second; the bucket's depth and nothing else comes for free.
        assert seconds(cable, 2_000_000) > 1.8


@pytest.mark.skipif(bool(why_not(FAR)), reason=why_not(FAR))
def test_a_far_machine_answers_after_every_round_trip() -> None:
    with Cable(FAR) as cable:
        # One to connect, one for the answer.
        assert seconds(cable, 1) >= 0.2


@pytest.mark.skipif(bool(why_no_cores()), reason=why_no_cores())
def test_what_a_machine_starts_meanwhile_stays_on_its_core() -> None:
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    with starting_on({core}):
        child = subprocess.Popen(
            [sys.executable, "-c", CORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert os.sched_getaffinity(0) == everywhere
    assert child.communicate("\n", timeout=60)[0] == f"[{core}]\n"


@pytest.mark.skipif(bool(why_no_share()), reason=why_no_share())
def test_a_share_of_a_core_is_what_its_processes_get() -> None:
    share = Share(0.2)
    try:
        with starting_on({min(os.sched_getaffinity(0))}, share):
            child = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True)
        assert float(child.communicate(timeout=60)[0]) < 0.6
    finally:
        share.close()
