"""What imports make is not looked at by the garbage collector; what comes later is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fleetd.startup import collector


class Cycle:
    """Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True, scope="module")
def thawed() -> Iterator[None]:
    """Once for all tests: it takes seconds."""
    yield
    gc.unfreeze()
    gc.collect()
    # As it was before: what the tests have imported stays, and costs the full collections of all later tests.
    gc.freeze()


def test_nothing_is_collected_meanwhile_and_what_was_made_is_left_alone() -> None:
    with collector.paused_for_imports():
        assert not gc.isenabled()
        made = weakref.ref(Cycle())
    assert gc.isenabled()
    gc.collect()
    assert made() is not None


def test_what_is_made_later_is_collected() -> None:
    with collector.paused_for_imports():
        pass
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), collector.paused_for_imports():
        raise ImportError
    assert gc.isenabled()
