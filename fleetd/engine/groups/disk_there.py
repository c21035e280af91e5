"""A member's disk, seen from the worker that answers: what is asked of it, and what it has told.

A question waits for nothing: it goes with the next message to the member, and the answer comes when its disk
has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fleetd import limits
from fleetd.engine.groups.messages import FindKept, KeptTold, LeaveKept, ReadKept, StoreKept
from fleetd.engine.groups.remote_rows import CachesThere, RemoteNote, RemoteRows


class KeptPart:
    """A member's part of one prompt's beginning.

    ``found``: what its disk has of it, None until that is known; ``read``: the same of what was read.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.found: KeptTold | None = None
        self.read: KeptTold | None = None
        # What stands for the caches there, once they are asked for.
        self.rows: RemoteRows | None = None
        self.left = False

    @property
    def waits(self) -> bool:
        """True while an answer is due."""
        return self.found is None or (self.rows is not None and self.read is None)


class DiskThere:
    """``tell``: sends the changes that there are now."""

    def __init__(self, there: CachesThere, tell: Callable[[], None]) -> None:
        self._there, self._tell = there, tell
        # Of which an answer is due.
        self._due: dict[int, KeptPart] = {}

    @property
    def asked(self) -> bool:
        """True while an answer is due that is of use; on any thread."""
        return bool(self._due)

    def find(self, names: Sequence[bytes]) -> KeptPart:
        """Ask what there is of blocks with these names."""
        part = KeptPart(self._there.number())
        self._due[part.number] = part
        self._there.tell(FindKept(part.number, list(names)))
        self._tell()
        return part

    def read(self, part: KeptPart, blocks: int, room: int) -> None:
        """Have the first ``blocks`` of it read, with room for ``room`` tokens."""
        part.rows = RemoteRows(self._there)
        self._due[part.number] = part
        self._there.tell(ReadKept(part.number, part.rows.number, blocks, room))
        self._tell()

    def leave(self, part: KeptPart) -> None:
        """Nothing more is wanted of it. Idempotent."""
        if not part.left:
            part.left = True
            self._due.pop(part.number, None)
            self._there.tell(LeaveKept(part.number))

    def store(
        self, rows: RemoteRows, names: Sequence[bytes], tokens: int, states: Mapping[int, RemoteNote]
    ) -> None:
        """Have the whole blocks of a prompt written, which ``rows`` stands for."""
        saved = [(at, note.number) for at, note in states.items()]
        self._there.tell(StoreKept(rows.number, tokens, list(names), saved))
        # One message has room for the names of one prompt.
        self._tell()

    def take(self, told: KeptTold) -> None:
        """An answer; one that nothing waits for has no effect."""
        part = self._due.pop(told.kept, None)
        if part is None:
            return
        if part.rows is None:
            part.found = told
        else:
            part.read = told
            part.rows.tokens = told.blocks * limits.CACHE_BLOCK_TOKENS
