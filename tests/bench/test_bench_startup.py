"""What changes to imports save is measured by starts with them and without."""

from __future__ import annotations

import importlib

import pytest

from bench import startup


@pytest.mark.parametrize("title", startup.CHANGES)
def test_each_measured_change_is_there(title: str) -> None:
    change = startup.CHANGES[title]
    assert callable(getattr(importlib.import_module(change.module), change.name))


@pytest.mark.one_loop
def test_a_program_is_started_with_a_change_and_without_it() -> None:
    program = """
from fleetd.startup import collector
with collector.paused_for_imports():
    kept = [[] for _ in range(100_000)]
"""
    change = startup.Change(program, "fleetd.startup.collector", "paused_for_imports")
    lines = startup.compared(change, "", 2)
    assert [line.rpartition(") ")[2] for line in lines] == list(startup.UNITS.values())
    assert all(" with, " in line and " without, saves " in line for line in lines)
