"""The log file that launchd lets grow: the daemon begins it anew, and nothing that it says is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What the daemon does, with a bound that a test reaches.
SPEAKER = """
import os, sys
from pathlib import Path
from fleetd import limits
from fleetd.process import observe
limits.LOG_FILE_BYTES = 4096
observe.configure("info", "json", file=Path(sys.argv[1]))
for number in range(40):
    observe.get_logger("x").info("said", number=number, pad="p" * 100)
os.write(2, b"a crash\\n")
print("to the other stream", flush=True)
"""


def speak(file: Path, output: Path) -> None:
    """As launchd starts it: both streams append to one file."""
    with output.open("ab") as out:
        done = subprocess.run([sys.executable, "-c", SPEAKER, str(file)], stdout=out, stderr=out, check=False)
    assert done.returncode == 0


def test_a_long_log_is_begun_anew_and_the_one_before_is_kept(tmp_path: Path) -> None:
    log, before = tmp_path / "fleetd.log", tmp_path / "fleetd.log.1"
    speak(log, log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleetd.log", "fleetd.log.1"]
    assert max(log.stat().st_size, before.stat().st_size) < 4096 + 400
    *said, crash, printed = (before.read_text() + log.read_text()).splitlines()
    last = int(said[-1].split('"number": ')[1].split(",")[0])
    first = int(said[0].split('"number": ')[1].split(",")[0])
    assert (last, len(said)) == (39, last - first + 1)
    assert (crash, printed) == ("a crash", "to the other stream")
    assert (log.stat().st_mode & 0o777) == 0o600


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fleetd.log").write_text("older\n")
    speak(tmp_path / "fleetd.log", tmp_path / "chosen.txt")
    assert len((tmp_path / "chosen.txt").read_text().splitlines()) == 42
    assert (tmp_path / "fleetd.log").read_text() == "older\n"


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_room(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    log = folder / "fleetd.log"
    (folder / ".fleetd.log.new").mkdir()
    speak(log, log)
    assert len(log.read_text().splitlines()) == 42
