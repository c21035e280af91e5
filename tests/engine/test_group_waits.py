"""How long a worker waits for the other machines of its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetd import limits
from fleetd.engine.groups import flight
from fleetd.engine.groups.flight import GroupStages


class WaitedMember:
    """A member of which nothing comes. ``waits_s``: what each wait for it takes."""

    def __init__(self, *waits_s: float) -> None:
        self._waits_s = [*waits_s]
        self.now_s = 1000.0
        self.moved, self.checked_s = self, list[float]()
        self.hops_lost: list[Any] = []

    @property
    def over(self) -> bool:
        return not self._waits_s

    def clear(self) -> None:
        pass

    def wait(self, _seconds: float) -> None:
        self.now_s += self._waits_s.pop(0)

    def collect(self) -> bool:
        return False

    def check(self, _since_s: float, now_s: float) -> None:
        self.checked_s.append(now_s)


def test_a_worker_that_stood_still_itself_reads_what_came_before_it_takes_a_member_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    still_s = 2 * limits.GROUP_SILENT_S
    member: Any = WaitedMember(0.5, still_s, 0.5)
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=lambda: member.now_s))
    GroupStages((member,)).wait(lambda: member.over)
    assert member.checked_s == [1000.5, 1001.0 + still_s]
