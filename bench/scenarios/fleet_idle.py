"""What it costs a daemon to belong to a fleet in which nothing happens."""

from __future__ import annotations

import socket
import time

import psutil

from bench.figures import Figure, Measured, at_most
from bench.harness.child import Child
from bench.harness.daemon import Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import wait_for

_PEERS = 15
_WINDOW_S = 20.0
_MOST_RUNS = 3
_SETTLED_WITHIN_S = 60.0
# What the system counts for a connection; where it does not, there is no figure.
_COUNTED = hasattr(socket, "TCP_INFO")


def measure(runs: int) -> Measured:
    bytes_per_s: list[float] = []
    cpu: list[float] = []
    names = [f"peer-{number}" for number in range(_PEERS)]
    with Fleet(["measured"], names) as fleet, Child("nodes") as peers:
        me = fleet.ids["measured"]
        daemon = fleet.start("measured")
        ports = peers.ask(do="open", folders=[str(fleet.identity_folder(name)) for name in names])["found"]
        peers.ask(do="tell_cards")
        met = {fleet.ids[name]: port for name, port in zip(names, ports, strict=True)}
        peers.ask(do="meet", ports=met | {me: daemon.status()["fleet"]["port"]})
        _settle(daemon)
        process = psutil.Process(daemon.process.pid)
        for _ in range(min(runs, _MOST_RUNS)):
            begun, busy_s, passed = time.perf_counter(), _busy_s(process), _passed(peers, me)
            time.sleep(_WINDOW_S)
            took_s = time.perf_counter() - begun
            cpu.append((_busy_s(process) - busy_s) / took_s)
            bytes_per_s.append((_passed(peers, me) - passed) / took_s / _PEERS)
    return Measured(_figures(bytes_per_s, cpu), _HOW)


def _settle(daemon: Daemon) -> None:
    """A daemon measures its ways to new peers first, one after the other."""
    wait_for(
        lambda: all(path["bytes_per_s"] is not None for peer in daemon.peers() for path in peer["paths"]),
        _SETTLED_WITHIN_S,
        0.5,
        lambda: f"the daemon did not get to know its ways:\n{daemon.log()}",
    )


def _passed(peers: Child, node_id: str) -> int:
    return int(peers.ask(do="passed", node_id=node_id)["found"]) if _COUNTED else 0


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _figures(bytes_per_s: list[float], cpu: list[float]) -> list[Figure]:
    note = f"{_PEERS} simulated peers: real nodes without the rest of a daemon, in one process"
    found = [Figure(f"Idle at {_PEERS + 1} nodes, share of a core", "%", cpu, at_most(0.01), note=note)]
    if _COUNTED:
        per_peer = [rate / 1000 for rate in bytes_per_s]
        title = f"Idle at {_PEERS + 1} nodes, traffic per peer"
        found.append(Figure(title, "kB/s", per_peer, at_most(1.0), note="both ways, TLS included"))
    return found


_HOW = (
    f"Idle: a daemon with {_PEERS} peers in sessions with it and with each other; they tell their cards, "
    f"with eight models each, as often as daemons do. Counted over {_WINDOW_S:.0f} s, after the daemon has "
    "measured its ways to all of them: the processor time of the daemon's process, and the bytes that TCP "
    "has carried in the sessions with it."
)
