"""`fleetctl cache`: what is kept on the disk, and throwing it away."""

from __future__ import annotations

import json
from typing import Any

from fake_daemon import FakeDaemon, Reply, Run

from fleetctl.connection.replies import read
from fleetctl.exits import Exit
from fleetctl.verbs.cache import render
from fleetd.control.cache_report import CacheReport

MODEL: dict[str, Any] = {
    "model": "smollm2-135m",
    "blocks": 3,
    "n_bytes": 18_000_000,
    "block_tokens": 768,
    "hits": 2,
    "restored_tokens": 1024,
    "saved_s": 75.0,
    "read_bytes": 24_000_000,
    "written_bytes": 1_800_000_000,
}
REPORT: dict[str, Any] = {
    "on": True,
    "folder": "/home/cache/kv",
    "n_bytes": 18_000_000,
    "quota_bytes": 10_000_000_000,
    "read_bytes_per_s": 900_000_000.0,
    "cached_bytes_per_s": 2_000_000_000.0,
    "models": [MODEL],
}


def test_sizes_and_what_they_were_good_for(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/fleet/v1/cache", Reply(REPORT))
    shown = run("cache", home=daemon.home).stdout.splitlines()
    assert (
        shown[0]
        == "18.0 MB of 10.0 GB in /home/cache/kv, read at 900 MB/s, from the system's memory at 2.0 GB/s"
    )
    assert " ".join(shown[-1].split()) == "smollm2-135m 768 18.0 MB 2 1,024 1 min 15 s 1.8 GB"
    assert json.loads(run("cache", "--json", home=daemon.home).stdout) == REPORT


def test_what_other_machines_sent_and_got() -> None:
    machine = {
        "machine": "studio", "prompts": 2, "tokens": 8192, "n_bytes": 1_500_000_000, "saved_s": 75.0,
        "failed": 1, "sent_bytes": 18_000_000, "took_s": 12.0, "predicted_s": 10.0,
    }  # fmt: skip
    shown = render(read({**REPORT, "machines": [machine]}, CacheReport)).splitlines()
    assert " ".join(shown[-1].split()) == "studio 8,192 1.5 GB 2 1 12 s 10 s 1 min 15 s 18.0 MB"


def test_why_nothing_is_written_and_that_it_is_off() -> None:
    full = read({**REPORT, "models": [], "note": "the disk is full"}, CacheReport)
    assert "Nothing is written at the moment: the disk is full." in render(full)
    assert "cache.disk is off" in render(read({"on": False}, CacheReport))


def test_clearing_asks_first(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("POST", "/fleet/v1/cache/clear", Reply(REPORT))
    refused = run("cache", "clear", home=daemon.home)
    assert (refused.returncode, daemon.seen) == (Exit.USAGE, [])
    done = run("cache", "clear", "--yes", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.OK, "18.0 MB of kept prompts are gone.\n")
