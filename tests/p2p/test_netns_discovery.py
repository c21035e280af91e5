"""Discovery between machines with a network of their own: found by mDNS, cables cut, packets dropped."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_daemon import SOON_S
from netns import Lab, LabHost, why_not

PROGRAM = Path(__file__).with_name("discovering.py")


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    if reason := why_not():
        pytest.skip(f"NETWORKS OF SEVERAL MACHINES ARE NOT TESTED: {reason}")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(3) as built:
        yield built


class DiscoveringProcess:
    """A discovering process on one host of a lab, and its news."""

    def __init__(self, host: LabHost, letter: str) -> None:
        self.host = host
        self.node_id = letter * 56
        command = [sys.executable, str(PROGRAM), self.node_id, f"machine-{letter}", "8115"]
        self.process = host.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._news: list[dict[str, Any]] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):  # others are its log
                with self._more:
                    self._news.append(json.loads(line))
                    self._more.notify_all()

    def forget(self) -> None:
        """Only what comes from now on counts."""
        with self._more:
            self._news.clear()

    def hears(self, met: Callable[[dict[str, Any]], bool], within_s: float) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def heard() -> bool:
            found[:] = [news for news in self._news if met(news)]
            return bool(found)

        with self._more:
            if not self._more.wait_for(heard, within_s):
                raise AssertionError(f"in {within_s} s {self.node_id[0]} heard only {self._news}")
        return found[0]

    def sees(self, other: DiscoveringProcess, within_s: float = SOON_S) -> None:
        news = self.hears(lambda news: news.get("seen") == other.node_id, within_s)
        assert other.host.address in news["hosts"]

    def runs(self) -> None:
        self.hears(lambda news: news.get("state") == "running", SOON_S)


def test_three_machines_find_each_other_on_a_network_and_hear_a_goodbye(lab: Lab) -> None:
    first, second, third = (
        DiscoveringProcess(host, letter) for host, letter in zip(lab.hosts, "abc", strict=True)
    )
    for machine, others in ((first, (second, third)), (second, (third,)), (third, (first,))):
        for other in others:
            machine.sees(other)
    assert second.process.stdin is not None
    second.process.stdin.close()
    first.hears(lambda news: news.get("gone") == second.node_id, SOON_S)


@pytest.mark.long
def test_a_cut_off_machine_is_found_once_packets_pass_again(lab: Lab) -> None:
    lab.cut(lab.hosts[1])
    first, second = DiscoveringProcess(lab.hosts[0], "a"), DiscoveringProcess(lab.hosts[1], "b")
    first.runs()
    second.runs()
    with pytest.raises(AssertionError):
        first.sees(second, within_s=5.0)
    lab.mend(lab.hosts[1])
    # Neither knows of the cut: the next question, at most a minute later, finds them.
    first.sees(second, within_s=65.0)


@pytest.mark.long
def test_machines_find_each_other_though_a_third_of_all_packets_is_lost(lab: Lab) -> None:
    lab.tell(loss=0.33)
    first, second, third = (
        DiscoveringProcess(host, letter) for host, letter in zip(lab.hosts, "abc", strict=True)
    )
    for machine, others in ((first, (second, third)), (second, (third,)), (third, (first,))):
        for other in others:
            machine.sees(other, within_s=20.0)
