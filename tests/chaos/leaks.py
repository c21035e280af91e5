"""What a daemon holds when nothing runs, and what was left behind by processes that are gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
from chaos_fleet import NAMES, ChaosFleet, workers
from live_daemon import LiveDaemon

_SHARED = Path("/dev/shm")
_DRAFTS = (".*.new", "*.partial", "*.draft")
#: Descriptors that come and go on an idle fleet: sessions that replace each other, a probe, the log.
_DESCRIPTORS = 12
_MEMORY = 200 << 20


class Leaks:
    """Compared with what there was at the beginning."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._descriptors = {name: descriptors(fleet[name]) for name in NAMES}
        self._memory = {name: memory(fleet[name]) for name in NAMES}
        self._forgiven = set[str]()
        #: All processes that ever belonged to a daemon here.
        self.seen: set[psutil.Process] = set()
        self.look()

    def look(self) -> None:
        """Remember the processes that there are now."""
        for name in NAMES:
            for pid in workers(self._fleet[name]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen.add(psutil.Process(pid))

    def forgive(self, left: list[str]) -> None:
        """Do not find again what was found once: the next try did not cause it."""
        self._forgiven |= set(left)
        for name in NAMES:
            self._descriptors[name] = max(self._descriptors[name], descriptors(self._fleet[name]))
            self._memory[name] = max(self._memory[name], memory(self._fleet[name]))

    def found(self) -> list[str]:
        """What there is too much of now, in words."""
        return [each for each in self._found() if each not in self._forgiven]

    def _found(self) -> list[str]:
        found: list[str] = []
        current = set[int]()
        for name in NAMES:
            daemon = self._fleet[name]
            status = daemon.status()
            current |= {engine["pid"] for engine in status["engines"]}
            requests = status["requests"]
            if requests["running"] or requests["waiting"]:
                found.append(f"{name}: requests are left: {requests}")
            now = descriptors(daemon)
            if now > self._descriptors[name] + _DESCRIPTORS:
                found.append(f"{name}: {now} descriptors, {self._descriptors[name]} before")
            if (size := memory(daemon)) > self._memory[name] + _MEMORY:
                found.append(f"{name}: {size >> 20} MiB, {self._memory[name] >> 20} before")
            found += [
                f"{name}: the dead process {process.pid} was never waited for"
                for process in daemon.processes()
                if process.status() == psutil.STATUS_ZOMBIE
            ]
            home = self._fleet.home(name)
            drafts = [path for pattern in _DRAFTS for path in home.rglob(pattern)]
            found += [f"{name}: {path.relative_to(home)} is left" for path in drafts]
        for process in list(self.seen):
            if process.pid in current:
                continue
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"the worker {process.pid} runs for nobody")
            elif (shared := _SHARED / f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}").exists():
                found.append(f"{shared} is left")
            else:
                self.seen.discard(process)
        return found

    def memory_grown(self) -> dict[str, int]:
        """MiB that each daemon has more than at the beginning."""
        return {name: (memory(self._fleet[name]) - self._memory[name]) >> 20 for name in NAMES}


def descriptors(daemon: LiveDaemon) -> int:
    return psutil.Process(daemon.process.pid).num_fds()


def memory(daemon: LiveDaemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)
