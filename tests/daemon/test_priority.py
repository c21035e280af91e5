"""A worker yields its cores to workers of other sessions, not only to those of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_GROUP = Path("/proc/self/autogroup")
# The file is empty in a process of the first session, that of a container too if nobody has begun another.
_SHARED_AMONG_SESSIONS = _GROUP.exists() and bool(_GROUP.read_text().strip())
_PROGRAM = """
import os
from pathlib import Path
from fleetd.process import priority
priority.yield_cores(7)
group = Path("/proc/self/autogroup")
print(os.nice(0), *(group.read_text().split()[-1:] if group.exists() else ()))
"""


def nice_values(*, own_session: bool) -> tuple[int, str]:
    """Of the process, and of its session ("" if the system has none)."""
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        start_new_session=own_session,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return int(told[0]), told[1] if len(told) > 1 else ""


def test_the_leader_of_a_session_yields_with_all_of_it() -> None:
    process, session = nice_values(own_session=True)
    assert process == os.nice(0) + 7
    if session:
        assert int(session) == process


@pytest.mark.skipif(not _SHARED_AMONG_SESSIONS, reason="the system does not share its cores among sessions")
def test_a_process_of_another_s_session_changes_nothing_for_that() -> None:
    before = _GROUP.read_text()
    process, session = nice_values(own_session=False)
    assert process == os.nice(0) + 7
    assert session == before.split()[-1]
    assert _GROUP.read_text() == before
