"""What stays in memory without the garbage collector: objects of fleetd's own classes, and bytes."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class KeptObjects:
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

    async def until_few(self, most: int, within_s: float = 30.0) -> None:
        """Until there are at most so many objects of each class more than before: their ends may be due.

        Raises AssertionError with those that are too many.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._too_many(most):  # noqa: ASYNC110  (nothing tells when an object is freed)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"still there: {self._too_many(most)}") from None

    def _too_many(self, most: int) -> dict[str, int]:
        return {name: count for name, count in self.objects.items() if count > most}


@contextmanager
def without_collector() -> Iterator[KeptObjects]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield KeptObjects()
    finally:
        tracemalloc.stop()
        gc.enable()


def _objects() -> Counter[str]:
    kinds = (type(each) for each in gc.get_objects())
    # Some libraries' classes have something else than a name there.
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("fleetd."))


def _bytes() -> int:
    return tracemalloc.get_traced_memory()[0]
