"""Questions that may take long: nobody waits for them, one is asked at a time, what failed is asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fleetd import limits
from fleetd.hardware.aside import Aside

SOON_S = 10.0


def test_a_driver_that_does_not_answer_holds_nothing_up() -> None:
    answers, asked = threading.Event(), []

    def ask() -> str:
        asked.append(threading.current_thread())
        answers.wait(SOON_S)
        return "a GPU"

    aside = Aside("driver", ask)
    assert [aside.read() for _ in range(5)] == [None] * 5
    assert len(asked) == 1
    assert asked[0].daemon, "it must not keep the process"
    answers.set()
    aside.wait(SOON_S)
    assert [aside.read() for _ in range(5)] == ["a GPU"] * 5
    assert len(asked) == 1


def counting(*failures: int) -> Callable[[], int]:
    """An ask that answers with the number of its call, and fails at these."""
    calls = []

    def ask() -> int:
        calls.append(None)
        if len(calls) in failures:
            raise RuntimeError("no driver yet")
        return len(calls)

    return ask


def settled(aside: Aside[int]) -> int | None:
    aside.read()
    aside.wait(SOON_S)
    return aside.read()


def test_what_failed_is_unknown_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = Aside("driver", counting(1))
    assert settled(aside) is None
    assert settled(aside) is None, "not before its time"
    monkeypatch.setattr(limits, "DEVICE_RETRY_S", 0.0)
    aside = Aside("driver", counting(1))
    settled(aside)
    aside.wait(SOON_S)
    assert aside.read() == 2


def test_an_answer_becomes_old_by_its_age_or_when_it_is_forgotten() -> None:
    lasting = Aside("driver", counting())
    assert [settled(lasting), settled(lasting)] == [1, 1]
    lasting.forget()
    assert lasting.read() is not None, "the old one stands until there is a new one"
    lasting.wait(SOON_S)
    assert lasting.read() == 2
    fleeting = Aside("card", counting(), again_s=0.0)
    settled(fleeting)
    fleeting.wait(SOON_S)
    assert (fleeting.read() or 0) >= 2


def test_what_is_forgotten_while_it_is_asked_is_asked_once_more() -> None:
    answers, calls = threading.Event(), []

    def ask() -> int:
        calls.append(None)
        answers.wait(SOON_S)
        return len(calls)

    aside = Aside("driver", ask)
    aside.read()
    aside.forget()
    answers.set()
    aside.wait(SOON_S)
    assert settled(aside) == 2
