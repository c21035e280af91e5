"""Continuous integration runs what anybody can run here, and reports come with what is needed to help."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).parents[2]
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted(path.name for path in (REPO / ".ci").iterdir())


# The first major version of each action that runs on Node 24: runners have no older one any more.
FLOORS = {
    "actions/checkout": 5,
    "actions/setup-python": 6,
    "actions/cache": 5,
    "actions/upload-artifact": 6,
    "actions/download-artifact": 7,
    "astral-sh/setup-uv": 7,
}
# macOS 27, which hosted runners have as a preview only.
PREVIEW = "xcode-27"


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps() -> list[dict[str, Any]]:
    return [step for path in WORKFLOWS for job in jobs(path).values() for step in job["steps"]]


def commands() -> list[str]:
    return [step["run"] for step in steps() if "run" in step]


def test_no_action_needs_a_node_that_runners_do_not_have() -> None:
    used = {tuple(step["uses"].split("@v")) for step in steps() if "uses" in step}
    assert {name for name, _ in used} == set(FLOORS)
    for name, version in used:
        assert int(version) >= FLOORS[name], name


def test_every_step_is_a_script_that_runs_here_too() -> None:
    called = [re.fullmatch(r"\.ci/([a-z-]+)( (pip|uv|pipx))*", command) for command in commands()]
    assert len(called) >= 8
    assert all(called), commands()
    # Each script is run somewhere: one that nothing runs goes bad unseen.
    assert sorted({found[1] for found in called if found}) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_run_from_anywhere(name: str) -> None:
    script = REPO / ".ci" / name
    text = script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "set -euo pipefail\ncd " in text


def test_tests_and_installations_run_on_all_kinds_of_machine() -> None:
    linux, macs = {"ubuntu-24.04", "ubuntu-24.04-arm"}, {"macos-15", "macos-26"}
    (checks,) = [jobs(path) for path in WORKFLOWS if path.name == "checks.yml"]
    (nightly,) = [jobs(path) for path in WORKFLOWS if path.name == "nightly.yml"]
    for job in (checks["tests"], checks["install"]):
        assert set(job["strategy"]["matrix"]["os"]) == linux | macs
    assert set(nightly["long"]["strategy"]["matrix"]["os"]) == linux | {"macos-15"}
    assert set(checks["metal"]["strategy"]["matrix"]["os"]) == macs | {PREVIEW}
    assert all("timeout-minutes" in job for job in (*checks.values(), *nightly.values()))


def test_a_preview_of_a_system_is_tried_and_may_fail() -> None:
    (checks,) = [jobs(path) for path in WORKFLOWS if path.name == "checks.yml"]
    assert checks["install"]["strategy"]["matrix"]["include"] == [{"os": PREVIEW, "python": "3.14"}]
    for name in ("install", "metal"):
        assert checks[name]["continue-on-error"] == f"${{{{ matrix.os == '{PREVIEW}' }}}}"


@pytest.mark.parametrize("name", ["bug", "machine", "wish"])
def test_a_report_asks_what_doctor_finds(name: str) -> None:
    text = (REPO / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8")
    assert "`fleetctl doctor --json`" in text
    fields = [field for field in yaml.safe_load(text)["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)


def test_the_lock_names_no_other_index() -> None:
    lock = (REPO / "uv.lock").read_text(encoding="utf-8")
    hosts = set(re.findall(r'(?:registry|url) = "([a-z]+://[^/"]+)', lock))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}
