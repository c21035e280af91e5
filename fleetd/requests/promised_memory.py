"""Memory of this machine that groups were promised and do not hold yet.

    promised ──► loaded: the worker's own figure counts ──► given back when the group ends

Every group is promised memory by its machines in the order of their node ids, the machine that answers
included. Of two groups that are formed at the same moment over the same machines, the one that is first at
the first common machine gets all of them, and the other one none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from fleetd.errors import OutOfMemory


class PromisedMemory:
    def __init__(self) -> None:
        # By number: the bytes that were promised, and what tells the bytes that are held of them by now.
        self._promised: dict[int, tuple[int, Callable[[], int]]] = {}
        self._number = 0

    @property
    def outstanding_bytes(self) -> int:
        """Promised and not held yet."""
        return sum(max(0, n_bytes - held()) for n_bytes, held in self._promised.values())

    @contextmanager
    def promise(
        self, what: str, n_bytes: int, room_bytes: int, held: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Meanwhile so many bytes are promised to nobody else.

        Args:
            what: the layers, for people.
            room_bytes: that are free beside what workers hold.
            held: bytes that the worker with these layers holds by now.

        Raises OutOfMemory.
        """
        left = max(0, room_bytes - self.outstanding_bytes)
        if n_bytes > left:
            raise OutOfMemory(
                f"{what} need {n_bytes / 1e9:.1f} GB; {left / 1e9:.1f} GB are free and promised to no group.",
                hint="Unload models there (fleetctl peers), or send it again once the other group has ended.",
            )
        self._number += 1
        number = self._number
        self._promised[number] = n_bytes, held
        try:
            yield
        finally:
            del self._promised[number]


class OwnPromise:
    """What the machine that answers promises its own part of a group, when its turn has come.

    ``promise``: given what tells the bytes that are held of it by now.
    """

    def __init__(
        self,
        promise: Callable[[Callable[[], int]], AbstractContextManager[None]] = lambda held: nullcontext(),
    ) -> None:
        self._promise, self._kept, self._made = promise, ExitStack(), False

    def make(self, held: Callable[[], int]) -> None:
        """Promise it, once. Raises OutOfMemory."""
        if not self._made:
            self._made = True
            self._kept.enter_context(self._promise(held))

    def close(self) -> None:
        """Idempotent."""
        self._kept.close()
