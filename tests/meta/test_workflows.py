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


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def commands() -> list[str]:
    steps = [step for path in WORKFLOWS for job in jobs(path).values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


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


def test_tests_and_installations_run_on_all_three_kinds_of_machine() -> None:
    kinds = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"}
    (checks,) = [jobs(path) for path in WORKFLOWS if path.name == "checks.yml"]
    (nightly,) = [jobs(path) for path in WORKFLOWS if path.name == "nightly.yml"]
    for job in (checks["tests"], checks["install"], nightly["long"]):
        assert set(job["strategy"]["matrix"]["os"]) == kinds
    assert checks["metal"]["runs-on"] == "macos-15"
    assert all("timeout-minutes" in job for job in (*checks.values(), *nightly.values()))


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
