"""Runs a schedule of faults against a fleet, and says what came of each try."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import faults
import process_hooks
from chaos_fleet import NAMES, ChaosFleet, asked, failed_fetches, take_copy
from leaks import Leaks
from live_daemon import WAIT_S
from netns import Lab
from tries import Ask, Fault, Outcome, Tally, Try, TryReply, judged, schedule, worst

from fleetd.engine.cpu import openmp_file

#: After the last fault: until every machine answers rightly again, and until nothing is left behind.
RECOVER_S, CLEAN_S = 120.0, 40.0
_TRACEBACK = re.compile(r"Traceback|never retrieved|\"bug\"")


@contextlib.contextmanager
def fleet(models_dir: Path, network: str) -> Iterator[ChaosFleet]:
    """A fleet that is at work. ``network``: "proxies" or "switch"."""
    root = Path(tempfile.mkdtemp(prefix="ch-"))
    with contextlib.ExitStack() as stack:
        stack.callback(openmp_file.sweep)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        lab = stack.enter_context(Lab(len(NAMES))) if network == "switch" else None
        small = take_copy(models_dir, root)
        made = stack.enter_context(ChaosFleet(root / "f", small, stack, lab))
        assert made.all_loaded()
        made.until_usable(limit_s=WAIT_S)
        yield made


class ChaosRun:
    """Tries one after another. ``told`` gets a line for each."""

    def __init__(self, fleet: ChaosFleet, tally: Tally, told: Callable[[str], None]) -> None:
        self._fleet, self._tally, self._told = fleet, tally, told
        self._leaks = Leaks(fleet)
        self._logs_read = dict[Path, int]()
        self._check_number = 0
        self._phases: list[float] = []
        # Set once a daemon does not start again: then nothing more can be tried.
        self._lost = False
        self._untold_trouble()

    def through(self, seed: int, count: int, until_s: float) -> None:
        """Until so many faults were tried, or that time of ``time.monotonic`` has come."""
        for tried in schedule(seed, faults.possible(self._fleet), count, len(NAMES)):
            if time.monotonic() >= until_s:
                break
            begun = time.monotonic()
            outcome, why = self._try(tried)
            self._tally.add(tried, outcome, why)
            kinds = ", ".join(fault.kind for fault in tried.faults)
            seconds = time.monotonic() - begun
            phases = "+".join(f"{each:.1f}" for each in self._phases)
            self._told(f"{tried.number:>4} {outcome:<7} {seconds:5.1f} s ({phases})  {kinds}  {why[:300]}")
            if self._lost:
                return
        self._told(f"MiB more than at the beginning: {self._leaks.memory_grown()}")

    def _try(self, tried: Try) -> tuple[Outcome, str]:
        self._leaks.look()
        killed: set[str] = set()
        expected = {ask.question: self._fleet.expected(ask) for ask in tried.asks}
        read = self._read_before([ask for ask in tried.asks if ask.read_by is not None])
        failed = self._failed_fetches()
        begun = time.monotonic()
        with ThreadPoolExecutor(len(tried.asks) + len(tried.faults)) as pool:
            replies = [pool.submit(self._ask, ask, begun) for ask in tried.asks]
            harms = [pool.submit(self._harm, fault, begun, killed) for fault in tried.faults]
            for harm in harms:
                harm.result()
            found = read
            for ask, reply in zip(tried.asks, (reply.result() for reply in replies), strict=True):
                found.append(judged(reply, expected[ask.question], killed=NAMES[ask.machine] in killed))
                self._tally.answered(tried, ask, reply, right=found[-1][0] is Outcome.RIGHT)
        times = [begun, time.monotonic()]
        for after in (self._recovered, self._clean):
            found.append(after())
            times.append(time.monotonic())
            if self._lost:
                break
        self._phases = [later - earlier for earlier, later in pairwise(times)]
        # One that began anew since has forgotten those that it counted before.
        more = (after - before for before, after in zip(failed, self._failed_fetches(), strict=True))
        self._tally.fetches_failed(tried, sum(each for each in more if each > 0))
        found.append(self._untold_trouble())
        outcome = worst(each for each, _ in found)
        return outcome, "; ".join(why for each, why in found if each is outcome and why)

    def _read_before(self, asks: list[Ask]) -> list[tuple[Outcome, str]]:
        """Let the machines that are to keep prompts read them, undisturbed, and have them on their disks
        alone. Each reads alone: what another one has helped with is not sent on."""
        found: list[tuple[Outcome, str]] = []
        fetched = [ask for ask in asks if ask.fetches]
        for fetcher, reader in {(ask.machine, ask.read_by) for ask in fetched if ask.read_by is not None}:
            here, there = NAMES[fetcher], NAMES[reader]
            try:
                self._fleet.unload(here, seen_by=there)
                found += [self._read(ask, reader) for ask in fetched]
                self._fleet.unload(there, seen_by=here)
                self._fleet.load_again(here)
            except AssertionError:
                found.append((Outcome.HUNG, f"{here} and {there} never saw each other unload the model"))
        restored = [ask for ask in asks if ask.restores]
        found += [self._read(ask, ask.machine) for ask in restored]
        for machine in {ask.machine for ask in restored}:
            self._fleet.load_again(NAMES[machine])
        return found

    def _read(self, ask: Ask, machine: int) -> tuple[Outcome, str]:
        reply = asked(self._fleet[NAMES[machine]], replace(ask, machine=machine, stream=False))
        return judged(reply, self._fleet.expected(ask), killed=False)

    def _failed_fetches(self) -> list[int]:
        return [failed_fetches(self._fleet[name]) for name in NAMES]

    def _ask(self, ask: Ask, begun: float) -> TryReply:
        time.sleep(max(0.0, begun + ask.after_s - time.monotonic()))
        return asked(self._fleet[NAMES[ask.machine]], ask)

    def _harm(self, fault: Fault, begun: float, killed: set[str]) -> None:
        time.sleep(max(0.0, begun + fault.begins_s - time.monotonic()))
        with faults.KINDS[fault.kind](faults.Harm(self._fleet, fault.seed, killed)):
            time.sleep(fault.lasts_s)

    def _recovered(self) -> tuple[Outcome, str]:
        """Whether every machine runs, meets the others and answers rightly, within the bound."""
        end = time.monotonic() + RECOVER_S
        for name in NAMES:
            process_hooks.tell(self._fleet.home(name))
        try:
            self._fleet.revive()
        except AssertionError as error:
            self._lost = True
            return Outcome.WRONG, f"afterwards a daemon does not start: {str(error)[-4000:]}"
        said = ""
        for number, name in enumerate(NAMES):
            self._check_number += 1
            prompt = f"Say {self._check_number % 7}."
            ask = Ask(number, "small", prompt, 3, stream=False, after_s=0)
            while (verdict := judged(asked(self._fleet[name], ask), self._fleet.expected(ask), killed=False))[
                0
            ] is not Outcome.RIGHT:
                outcome, why = verdict
                said = f"afterwards {name}: {why}"
                if outcome is Outcome.WRONG:
                    return outcome, said
                if time.monotonic() > end:
                    return Outcome.HUNG, said
                time.sleep(0.2)
        try:
            self._fleet.until_usable(limit_s=max(1.0, end - time.monotonic()))
        except AssertionError:
            return Outcome.HUNG, f"afterwards machines do not meet: {[self._fleet.states(n) for n in NAMES]}"
        while not self._fleet.all_loaded():
            if time.monotonic() > end:
                return Outcome.HUNG, "afterwards a model cannot be loaded"
            time.sleep(0.2)
        return Outcome.RIGHT, ""

    def _clean(self) -> tuple[Outcome, str]:
        end = time.monotonic() + CLEAN_S
        while left := self._leaks.found():
            if time.monotonic() > end:
                self._leaks.forgive(left)
                return Outcome.LEAKED, "; ".join(left)
            time.sleep(0.2)
        return Outcome.RIGHT, ""

    def _untold_trouble(self) -> tuple[Outcome, str]:
        """Whether a daemon has logged a bug since the last look."""
        found: list[str] = []
        for name in NAMES:
            path = self._fleet[name].log
            with path.open("rb") as file:
                file.seek(self._logs_read.get(path, 0))
                text = file.read()
            self._logs_read[path] = self._logs_read.get(path, 0) + len(text)
            lines = text.decode("utf-8", "replace").splitlines()
            for number, line in enumerate(lines):
                if _TRACEBACK.search(line):
                    found.append(f"{name} logged: {' | '.join(lines[number : number + 40])[:4000]}")
                    break
        return (Outcome.WRONG, "; ".join(found)) if found else (Outcome.RIGHT, "")
