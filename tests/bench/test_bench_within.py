"""A step of a measurement ends within its time, with all that it has started, and keeps what it had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench import results
from bench.harness.child import ROOT
from bench.within import KILLED, LATE

_WITHIN_S = 60.0
# Writes its process id and, as a worker may, is in a session of its own and does not listen.
_DEAF = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:
    import subprocess
    subprocess.Popen([sys.executable, sys.argv[2], sys.argv[1] + "-worker"], start_new_session=True)
pathlib.Path(sys.argv[1] + ".new").write_text(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""
_FAMILY = """
import signal, sys, threading
from pathlib import Path
from bench import __main__ as command
from bench.families import FAMILIES, Family
from bench.figures import Figure, Taking

folder = sys.argv[1]

def figures():
    yield Figure("the first", "s", [1.5])
    Path(folder, "had").touch()
    threading.Event().wait()

FAMILIES["card-nccl"] = Family("of a test", 1, 1, lambda runs: Taking(figures(), "so"), ())
sys.argv = ["bench", "--into", folder, "card-nccl"]
sys.exit(command.main())
"""


def within(seconds: float, command: list[str], grace_s: float = 30.0) -> subprocess.Popen[bytes]:
    code = f"import sys; from bench.within import main; sys.exit(main({seconds}, sys.argv[1:], {grace_s}))"
    return subprocess.Popen([sys.executable, "-c", code, *command], cwd=ROOT)


def until(there: Callable[[], bool]) -> None:
    ends = time.monotonic() + _WITHIN_S
    while not there():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", 139)])
def test_a_command_that_ends_by_itself_ends_as_it_does(command: str, code: int) -> None:
    assert within(_WITHIN_S, ["sh", "-c", command]).wait(_WITHIN_S) == code


def test_a_command_that_takes_too_long_is_asked_to_end() -> None:
    assert within(0.2, ["sleep", "1000"]).wait(_WITHIN_S) == LATE


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere an orphan cannot be found: it is NOT proved gone"
)
@pytest.mark.parametrize("parent", ["deaf", "gone"])
def test_what_does_not_listen_is_killed_with_its_workers_also_if_they_are_orphans(
    parent: str, tmp_path: Path
) -> None:
    program, told, worker = tmp_path / "deaf.py", tmp_path / "pid", tmp_path / "pid-worker"
    program.write_text(_DEAF)
    started = [sys.executable, str(program), str(told), str(program)]
    if parent == "gone":
        # The shell leaves them behind.
        started = ["sh", "-c", '"$@" & sleep 1000', "sh", *started]
    with within(1000, started, grace_s=0.2) as step:
        until(lambda: told.exists() and worker.exists())
        step.send_signal(signal.SIGTERM)
        assert step.wait(_WITHIN_S) == 128 + signal.SIGTERM
    assert not any(psutil.pid_exists(int(path.read_text())) for path in (told, worker))
    # A late one has another code.
    assert within(0.5, ["sh", "-c", "trap '' TERM; sleep 1000"], grace_s=0.2).wait(_WITHIN_S) == KILLED


def test_figures_of_a_measurement_that_is_cut_off_are_kept_and_called_so(tmp_path: Path) -> None:
    with within(1000, [sys.executable, "-c", _FAMILY, str(tmp_path)]) as step:
        until((tmp_path / "had").exists)
        step.send_signal(signal.SIGTERM)
        step.wait(_WITHIN_S)
    (result,) = results.load(tmp_path / "benchmarks.json").values()
    assert [figure.title for figure in result.measured.figures] == ["the first"]
    assert result.cut == "SystemExit"


# ---- The script -------------------------------------------------------------------------------------------

_STAND_IN = """
import os, sys
if sys.argv[1] == "-":
    sys.stdin.read()
elif sys.argv[2] == "bench.within":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
else:
    print("step", sys.argv[-1], flush=True)
    sys.exit(sys.argv[-1] == {fails!r})
"""


def script(tmp_path: Path, *arguments: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    source = tmp_path / "stand_in.py"
    source.write_text(_STAND_IN.format(python=sys.executable, fails=fails))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {source} "$@"\n')
    python.chmod(0o755)
    env = os.environ | {
        "FLEETD_PYTHON": str(python),
        "GPU_OUT": str(tmp_path / "out"),
        "PYTHONPATH": str(ROOT),
    }
    env |= {"MLX_PTX_CACHE_DIR": str(tmp_path / "mlx"), "CUDA_CACHE_PATH": str(tmp_path / "driver")}
    return subprocess.run([str(ROOT / ".ci" / "gpu"), *arguments], env=env, capture_output=True, text=True)


def test_a_step_that_fails_ends_alone_and_the_script_says_which(tmp_path: Path) -> None:
    done = script(tmp_path, "card-smart", "card-batch", "card-nccl", fails="card-batch")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("step")] == [
        "step card-smart",
        "step card-batch",
        "step card-nccl",
    ]
    assert done.stderr.strip().endswith("not proved: card-batch (1)")
    told = (tmp_path / "out" / "steps.log").read_text()
    assert told.endswith("== card-nccl (at most 30 s)\nstep card-nccl\n")


def test_nothing_of_an_earlier_run_looks_like_a_figure_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("benchmarks.json", "benchmarks.md", "steps.log"):
        (tmp_path / "out" / name).write_text("earlier")
    assert script(tmp_path, "card-nccl").returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.txt", "steps.log"]
    assert "earlier" not in (tmp_path / "out" / "steps.log").read_text()


def test_a_script_without_time_begins_no_step(tmp_path: Path) -> None:
    done = script(tmp_path, "--minutes", "0", "card-nccl")
    assert (done.returncode, "step" in done.stdout) == (1, False)
    assert "card-nccl (no time left)" in done.stderr
