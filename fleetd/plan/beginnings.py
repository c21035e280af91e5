"""What of a prompt need not be computed: where it lies, and how soon it is where it is needed. Pure.

own memory < own disk < another machine's disk < compute < compute together, whatever costs least
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import msgspec

from fleetd import limits
from fleetd.cache.pricing import checked_tokens, look_s, restore_s
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed


class KeptBeginning(msgspec.Struct, frozen=True):
    """What one machine has of a prompt, about: tokens in its prefix cache, and on its disk.

    ``n_bytes``: of the rows of those on the disk; ``bytes_per_s``: at which it reads them, 0 if that is not
    measured; ``cached``: how much of them its system has in memory.
    """

    memory_tokens: int = 0
    disk_tokens: int = 0
    n_bytes: int = 0
    bytes_per_s: float = 0.0
    cached: float = 0.0


class Beginning(msgspec.Struct, frozen=True):
    """The first ``tokens`` of a prompt, which a machine can have in its caches after ``seconds``.

    ``restored``: of these, what comes from its own disk; ``fetched``: from the machine called ``name``.
    """

    tokens: int
    seconds: float
    restored: int = 0
    fetched: int = 0
    name: str = ""


def from_disk(kept: KeptBeginning, known_tokens: int, state_bytes: int = 0) -> Beginning | None:
    """A machine's own blocks, beyond the tokens that its memory has; None where the disk has no more.

    Args:
        state_bytes: a snapshot's size: of what the model keeps without a row for every token.
    """
    lacking = kept.disk_tokens - known_tokens
    if lacking <= 0:
        return None
    n_bytes = kept.n_bytes * lacking // kept.disk_tokens + state_bytes
    return Beginning(kept.disk_tokens, restore_s(n_bytes, kept.bytes_per_s), restored=lacking)


def from_peer(
    kept: KeptBeginning,
    known_tokens: int,
    own: Beginning | None,
    fetch: FetchSpeed,
    name: str,
    speed: PrefillSpeed,
    state_bytes: int = 0,
) -> Beginning | None:
    """Another machine's blocks, beyond what is here; None where it has too few more.

    Args:
        own: what is read from this machine's disk first.
        fetch: how fast the other machine's blocks come.
        speed: at which this machine computes meanwhile, unless the model keeps a state.
        state_bytes: as in ``from_disk``. Two snapshots come, of which one is checked by the other.
    """
    first_s, restored = 0.0, 0
    if own is not None:
        known_tokens, first_s, restored = own.tokens, own.seconds, own.restored
    lacking = kept.disk_tokens - known_tokens
    if lacking < limits.FETCH_LEAST_TOKENS or fetch.bytes_per_s <= 0:
        return None

    def sent_s(tokens: int) -> float:
        n_bytes = kept.n_bytes * tokens // kept.disk_tokens + 2 * state_bytes
        return fetch.seconds(n_bytes)

    def computed_s(tokens: int) -> float:
        return speed.total(1.0, range(known_tokens, known_tokens + tokens), MEASURED_TOKENS)

    seconds = sent_s(lacking)
    if not state_bytes and mixes(met_s := meeting_s(lacking, computed_s, sent_s), seconds):
        seconds = met_s
    tokens = min(lacking, checked_tokens(states=state_bytes > 0))
    check_s = speed.total(1.0, range(kept.disk_tokens - tokens, kept.disk_tokens), MEASURED_TOKENS)
    check_s += look_s(kept.n_bytes * lacking // kept.disk_tokens)
    return Beginning(kept.disk_tokens, first_s + seconds + check_s, restored, lacking, name)


def meeting_s(pieces: int, computed_s: Callable[[int], float], sent_s: Callable[[int], float]) -> float:
    """How long until what is computed from the first piece on meets what is sent, the last piece first.

    Args:
        computed_s: what computing the first so many of the pieces takes; it grows.
        sent_s: what sending the last so many of them takes; it grows.
    """

    def both_s(computed: int) -> float:
        return max(computed_s(computed), sent_s(pieces - computed))

    at = bisect.bisect_left(
        range(pieces), True, key=lambda computed: computed_s(computed) >= sent_s(pieces - computed)
    )
    return min(both_s(at), both_s(max(0, at - 1)))


def gains(seconds: float, instead_s: float) -> bool:
    """True if something takes so much less time than the other that it is worth doing."""
    return seconds <= (1 - limits.FETCH_LEAST_GAIN) * instead_s


def mixes(met_s: float, waited_s: float) -> bool:
    """True if computing towards what comes, until the two meet, is clearly sooner than waiting for it."""
    return met_s <= (1 - limits.FETCH_MIX_GAIN) * waited_s
