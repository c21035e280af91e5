"""What stays in memory without the garbage collector: objects of fleetd's own classes, and bytes."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Kept:
    """Compared with what there was at the beginning of ``without_collector``."""

    def __init__(self) -> None:
        self._objects, self._bytes = _objects(), _bytes()

    @property
    def objects(self) -> Counter[str]:
        """Objects more than before, by class."""
        return _objects() - self._objects

    @property
    def n_bytes(self) -> int:
        return _bytes() - self._bytes


@contextmanager
def without_collector() -> Iterator[Kept]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield Kept()
    finally:
        tracemalloc.stop()
        gc.enable()


def _objects() -> Counter[str]:
    kinds = (type(each) for each in gc.get_objects())
    # Some libraries' classes have something else than a name there.
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("fleetd."))


def _bytes() -> int:
    return tracemalloc.get_traced_memory()[0]
