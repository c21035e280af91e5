"""How soon an answer's client hears that a member of the model's group is lost, and when the answer goes on.

A member is lost while the answer streams: its worker or its daemon is killed, or stops as a machine does that
falls asleep. A third machine can hold what the lost one held.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from bench.figures import Figure, Measured, at_most
from bench.harness.daemon import fetch_model
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL

_HERE, _OTHERS = "here", ("there", "spare")
# The model takes 166 MB in int8, beside 537 MB to work with: no machine may hold all of it.
_BUDGET_BYTES = 695_000_000
_SETTINGS = {
    "FLEETD_ENGINE_CPU_ARITHMETIC": "int8",
    "FLEETD_ENGINE_THREADS": "1",
    "FLEETD_ENGINE_MAX_MEMORY_BYTES": str(_BUDGET_BYTES),
}
_QUESTION = [{"role": "user", "content": "Write a long story about a fox."}]
_TOKENS, _BEFORE = 64, 5
_WITHIN_S, _POLL_S = 120.0, 0.1
_GOES_ON = ": loading going on"


def measure(runs: int) -> Measured:
    fetch_model()
    seen = Samples()
    with Fleet([_HERE, *_OTHERS]) as fleet:
        for name in (_HERE, *_OTHERS):
            fleet.start(name, **_SETTINGS)
        whole = _answer(fleet, lambda: None, Samples(), "")
        for _ in range(runs):
            for title, lose in _LOSSES.items():
                _until_both_may_help(fleet)
                _answer(fleet, lambda: None, Samples(), "")
                with lose(fleet, _member(fleet)) as strike:
                    if _answer(fleet, strike, seen, title) != whole:
                        raise RuntimeError(f"{title}: the answer is another one\n{fleet[_HERE].log()}")
    return Measured(_figures(seen), _HOW)


def _answer(fleet: Fleet, strike: Callable[[], None], seen: Samples, title: str) -> str:
    """The text. ``strike`` is called after a few pieces of it; ``seen`` gets the seconds until the client is
    told and until the next piece after that."""
    text, pieces = "", 0
    struck_s = told_s = 0.0
    asked = {"model": DEFAULT_MODEL, "messages": _QUESTION, "max_tokens": _TOKENS}
    with fleet[_HERE].stream("chat/completions", **asked) as stream:
        for frame in stream.frames():
            if "error" in (frame.data or {}):
                raise RuntimeError(f"{title}: {frame.line}\n{fleet[_HERE].log()}")
            if struck_s and not told_s and frame.line.startswith(_GOES_ON):
                told_s = frame.at_s
                seen[title, "told"].append(told_s - struck_s)
            if not frame.text:
                continue
            text, pieces = text + frame.text, pieces + 1
            if told_s and len(seen[title, "on"]) < len(seen[title, "told"]):
                seen[title, "on"].append(frame.at_s - struck_s)
            if pieces == _BEFORE:
                struck_s = frame.at_s
                strike()
    return text


# ---- Losses ----------------------------------------------------------------------------------------------


@contextmanager
def _worker_killed(fleet: Fleet, name: str) -> Iterator[Callable[[], None]]:
    yield lambda: _workers(fleet, name)[0].kill()


@contextmanager
def _worker_stopped(fleet: Fleet, name: str) -> Iterator[Callable[[], None]]:
    yield lambda: _workers(fleet, name)[0].suspend()


@contextmanager
def _daemon_killed(fleet: Fleet, name: str) -> Iterator[Callable[[], None]]:
    yield lambda: fleet[name].process.kill()
    fleet[name].process.wait()
    fleet.start(name, **_SETTINGS)


@contextmanager
def _machine_asleep(fleet: Fleet, name: str) -> Iterator[Callable[[], None]]:
    workers = _workers(fleet, name)

    def strike() -> None:
        fleet.signal(name, signal.SIGSTOP)
        for worker in workers:
            worker.suspend()

    yield strike
    for worker in workers:
        worker.resume()
    fleet.signal(name, signal.SIGCONT)


_LOSSES = {
    "a member's worker was killed": _worker_killed,
    "a member's worker has stopped": _worker_stopped,
    "a member's daemon was killed": _daemon_killed,
    "a member fell asleep": _machine_asleep,
}


def _workers(fleet: Fleet, name: str) -> list[psutil.Process]:
    return psutil.Process(fleet[name].process.pid).children(recursive=True)


def _front(fleet: Fleet) -> dict[str, Any]:
    return next(engine for engine in fleet[_HERE].status()["engines"] if engine["model"] == DEFAULT_MODEL)


def _member(fleet: Fleet) -> str:
    """The machine that holds the other layers."""
    (found,) = _front(fleet)["members"]
    return str(found["name"])


def _until_both_may_help(fleet: Fleet) -> None:
    """Until the machine that is asked knows that both others have the model, and their ways to it."""
    fleet.until_usable(_HERE, *_OTHERS)

    def known() -> bool:
        peers = [fleet.peer(_HERE, name) for name in _OTHERS]
        return all(
            any(model["name"] == DEFAULT_MODEL for model in peer["models"])
            and any(path["bytes_per_s"] is not None for path in peer["paths"])
            for peer in peers
        )

    wait_for(known, _WITHIN_S, _POLL_S, fleet[_HERE].log)


def _figures(seen: Samples) -> list[Figure]:
    within = at_most(3.0)
    return [
        *(Figure(f"Told that {loss}", "s", seen[loss, "told"], within, of="worst") for loss in _LOSSES),
        *(Figure(f"The answer goes on after {loss}", "s", seen[loss, "on"]) for loss in _LOSSES),
    ]


_HOW = (
    "Three daemons, paired, each with less memory than the model takes in int8: two hold it, the third is "
    f"spare. After {_BEFORE} pieces of a greedy answer of {_TOKENS} tokens, one loses what it holds. Told: "
    "the client's stream says that the answer goes on, and why. The seconds until the next piece have in "
    "them that the spare machine loads the layers and that the prompt and the answer so far are read again. "
    "The answers are the same bytes as without a loss."
)
