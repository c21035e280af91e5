"""Machines that outlast one test do not outlast one that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kept_machines import LastingMachines


def test_tests_have_the_same_machines_until_one_of_them_fails() -> None:
    seen = list[str]()

    @contextlib.contextmanager
    def form() -> Iterator[Any]:
        name = f"machines {len(seen)}"
        seen.append(f"{name} form")
        yield name
        seen.append(f"{name} end")

    lasting, session = LastingMachines(form), SimpleNamespace(testsfailed=3)
    for failures in (0, 1, 0, 0):
        for lent in lasting.lent(session):  # type: ignore[arg-type]
            seen.append(f"{lent}")
            session.testsfailed += failures
    lasting.end()
    assert seen == [
        *("machines 0 form", "machines 0", "machines 0", "machines 0 end"),
        *("machines 4 form", "machines 4", "machines 4", "machines 4 end"),
    ]
