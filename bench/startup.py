"""``python -m bench.startup [--runs N]``: what the changes in ``fleetd/startup/`` save.

The imports of a daemon and of an engine worker run in new processes, with a change and without it, in turns:
seconds of the processor, seconds, memory at the end, and seconds of one full garbage collection after that.
The ranges are the quartiles of the differences.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import msgspec

from bench.figures import alternated
from bench.harness.child import ROOT
from bench.harness.samples import Samples

RUNS = 20
DAEMON = """
from fleetd.startup import collector, lean_imports
with collector.paused_for_imports():
    lean_imports.load()
    import fleetd.app
"""
WORKER = """
import os
from fleetd.engine import worker
worker.import_libraries(os.environ["BENCH_CACHE"])
"""
_WITHOUT = """
import contextlib, {module}
{module}.{name} = lambda *_: contextlib.nullcontext()
"""
_REPORT = """
import gc, json, os, psutil, time
used, began = time.process_time(), time.process_time()
gc.collect()
found = {"cpu_s": used, "collection_s": time.process_time() - began}
print(json.dumps(found | {"rss_mb": psutil.Process().memory_info().rss / 1e6}), flush=True)
os._exit(0)
"""


class Change(msgspec.Struct, frozen=True):
    """A context manager of ``module``, and the program whose imports it changes."""

    program: str
    module: str
    name: str


CHANGES = {
    "worker: transformers' index": Change(WORKER, "fleetd.startup.import_index", "stored"),
    "worker: garbage collector": Change(WORKER, "fleetd.startup.collector", "paused_for_imports"),
    "daemon: garbage collector": Change(DAEMON, "fleetd.startup.collector", "paused_for_imports"),
    "daemon: no rich": Change(DAEMON, "fleetd.process.without_rich", "without_rich"),
    "daemon: no authorities": Change(DAEMON, "fleetd.startup.lean_imports", "without_authorities"),
}
UNITS = {"cpu_s": "s of CPU", "wall_s": "s", "rss_mb": "MB", "collection_s": "s a full collection"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a change's name")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"starts each way, {RUNS} if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as cache:
        for title, change in CHANGES.items():
            if not args.names or any(name in title for name in args.names):
                print("\n".join([title, *compared(change, cache, max(2, args.runs))]), flush=True)


def compared(change: Change, cache: str, runs: int) -> list[str]:
    """One line for each unit: with the change, without it, and the median and quartiles of what it saves."""
    without = _WITHOUT.format(module=change.module, name=change.name) + change.program
    for program in (change.program, without):
        started(program, cache)  # files are in memory, and transformers' index is stored
    seen = Samples()
    for run in range(runs):
        for program in alternated(run, (change.program, without)):
            for name, value in started(program, cache).items():
                seen[name, program].append(value)
    lines = []
    for name, unit in UNITS.items():
        ours, theirs = seen[name, change.program], seen[name, without]
        saved = [b - a for a, b in zip(ours, theirs, strict=True)]
        low, _, high = statistics.quantiles(saved, n=4)
        lines.append(
            f"  {statistics.median(ours):8.3f} with, {statistics.median(theirs):8.3f} without, "
            f"saves {statistics.median(saved):7.3f} ({low:.3f} to {high:.3f}) {unit}"
        )
    return lines


def started(program: str, cache: str) -> dict[str, float]:
    """What one process that runs ``program`` took."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_CACHE": cache}
    began = time.perf_counter()
    command = [sys.executable, "-c", program + _REPORT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"bench.startup: {done.stderr.strip()}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"wall_s": time.perf_counter() - began}


if __name__ == "__main__":
    main()
