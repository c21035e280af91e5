"""Which of a daemon's children is its worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.harness.cores import worker_of


def test_a_child_that_has_ended_and_is_not_reaped_is_no_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody has taken its status
        with pytest.raises(RuntimeError, match="0 workers where one was expected"):
            worker_of(os.getpid(), {0})
