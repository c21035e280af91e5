"""Kills writers of a roster file again and again, and looks at what is left each time.

A program of its own, so that forking is cheap and no thread is forked: ``roster_writer.py FOLDER COUNT SEED``
prints how many of COUNT kills left something else than a whole roster at least as new as the last one that
its writer had acknowledged, how many acknowledgements there were, and how many kills came amid a write.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from pathlib import Path

from machines import machine

from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile


def write_for_ever(path: Path, acknowledge: int) -> None:
    """Each version says how old it is in its first record's number."""
    roster = Roster(machine(0), RosterFile(path).load())
    for number in range(1, 30):
        if not roster.members:
            roster.admit(machine(number).certificate, "n", True)
    while True:
        record = roster.allow_prompts(machine(1).node_id, allowed=True)
        RosterFile(path).save(roster.records())
        os.write(acknowledge, record.sequence.to_bytes(8))


def main(folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    path = folder / "roster"
    lost = acknowledged = amid = 0
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            write_for_ever(path, writing)
        os.close(writing)
        select.select([reading], [], [])  # it is at work
        select.select([], [], [], chance.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = b""
        while piece := os.read(reading, 1 << 16):
            said += piece
        os.close(reading)
        acknowledged += len(said) // 8
        amid += any(folder.glob(".roster.*.new"))
        found = Roster(machine(0), RosterFile(path).load())
        lost += found.members[machine(1).node_id].sequence < int.from_bytes(said[-8:])
    left = [entry.name for entry in folder.iterdir()]
    print(lost, acknowledged, amid, *left)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
