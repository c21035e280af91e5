"""What runs leave behind: values by name, and helpers that every scenario needs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Self, TypeVar

from bench.figures import Measured, ratios

T = TypeVar("T")


class Samples(defaultdict[Hashable, list[float]]):
    """One value per run under each name; a name is any hashable, such as a (side, length)."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self[name].append(value)

    def ratios(self, over: Hashable, under: Hashable) -> list[float]:
        """``over / under``, run by run."""
        return ratios(self[over], self[under])


class Closing:
    """Use as a context manager: ``close`` is called at the end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wait_for(look: Callable[[], T | None], within_s: float, poll_s: float, failure: Callable[[], str]) -> T:
    """The first value of ``look`` that is true. Raises RuntimeError with ``failure()`` after ``within_s``."""
    deadline = time.perf_counter() + within_s
    while not (found := look()):
        if time.perf_counter() > deadline:
            raise RuntimeError(failure())
        time.sleep(poll_s)
    return found


def merged(*parts: Measured) -> Measured:
    """The rows of all parts in their order, and how each was measured."""
    return Measured([figure for part in parts for figure in part.figures], "\n\n".join(p.how for p in parts))
