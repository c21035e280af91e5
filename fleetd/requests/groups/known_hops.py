"""Which members of groups did not stay connected to each other: those are not connected again at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from fleetd import limits
from fleetd.errors import PeerUnreachable


class KnownHops:
    """A stream between two members that breaks in the middle of an answer ends their group. So the next one
    has none, for ``limits.GROUP_RELAY_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By who sends to whom, as node ids.
        self._broke_s: dict[tuple[str, str], float] = {}

    def broke(self, pairs: Iterable[tuple[str, str]]) -> None:
        """The stream of one of these pairs broke."""
        self._broke_s |= dict.fromkeys(pairs, self._clock())

    def check(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Raises PeerUnreachable if the stream of one of them broke a short while ago."""
        since_s = self._clock() - limits.GROUP_RELAY_S
        self._broke_s = {pair: at_s for pair, at_s in self._broke_s.items() if at_s > since_s}
        if any(pair in self._broke_s for pair in pairs):
            raise PeerUnreachable(
                "Two members of the group lost each other a short while ago: hidden states pass through here."
            )
