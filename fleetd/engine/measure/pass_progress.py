"""Whether a rank gets on with its passes: two words of memory that its process and the daemon share.

A rank that waits for one that has stopped waits for ever, and cannot say so: it is looked at from outside.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from fleetd import limits

_WORD = 8
_DONE, _DUE = 0, 1
# Passes whose times say what the next one may take.
_LAST = 33


class PassProgress:
    """``fd``: a file of ``create``; it is not closed here."""

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = mmap.mmap(fd, 2 * _WORD)
        self._words = memoryview(self._memory).cast("Q")
        self._clock = clock
        # Seconds of the last short passes, and seconds for each token of the last long ones.
        self._short_s: deque[float] = deque(maxlen=_LAST)
        self._token_s: deque[float] = deque(maxlen=_LAST)

    @staticmethod
    def create() -> int:
        """The descriptor of a new file without a name, which processes share by inheriting it. Raises OSError
        if the disk is full."""
        with tempfile.TemporaryFile(buffering=0) as file:
            # Written, for a place that the disk has not got would end whoever writes there first.
            file.write(bytes(2 * _WORD))
            return os.dup(file.fileno())

    @classmethod
    def alone(cls) -> PassProgress:
        """One that no other process looks at."""
        fd = cls.create()
        try:
            return cls(fd)
        finally:
            os.close(fd)

    @property
    def done(self) -> int:
        """Passes that have ended."""
        return self._words[_DONE]

    @property
    def under_way(self) -> bool:
        """True while something is that has its time."""
        return self._words[_DUE] > 0

    @property
    def late_s(self) -> float:
        """Seconds by which what is under way is late; 0 if it is not, or nothing is under way."""
        due_us = self._words[_DUE]
        return max(0.0, self._clock() - due_us / 1e6) if due_us else 0.0

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done meanwhile has to be over in so many seconds."""
        self._words[_DUE] = int((self._clock() + seconds) * 1e6)
        try:
            yield
        finally:
            self._words[_DUE] = 0

    @contextmanager
    def passing(self, tokens: int) -> Iterator[None]:
        """A pass over so many tokens; it is late if it takes many times what others have taken."""
        begun_s = self._clock()
        with self.within(self.allowed_s(tokens)):
            yield
        self._words[_DONE] += 1
        took_s = self._clock() - begun_s
        if tokens <= limits.RANK_SHORT_TOKENS:
            self._short_s.append(took_s)
        else:
            self._token_s.append(took_s / tokens)

    def allowed_s(self, tokens: int) -> float:
        """Seconds that a pass over so many tokens may take, by what others have taken."""
        long = tokens > limits.RANK_SHORT_TOKENS
        if not self._short_s or (long and not self._token_s):
            # Kernels are compiled in a first pass.
            return limits.RANK_FIRST_S
        expected_s = max(_median(self._short_s), tokens * _median(self._token_s) if long else 0.0)
        return max(limits.RANK_STALL_S, limits.RANK_STALL_PASSES * expected_s)

    def close(self) -> None:
        self._words.release()
        self._memory.close()


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
