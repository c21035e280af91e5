"""The ways to one machine: where it may be found, how each way has done, which one to take.

Sans-IO. An address is a hint until somebody has answered there, so hints are few, forgotten first, and never
push out an address that has worked or that the settings name. A way that nobody has measured is judged by
what its kind usually does; people are shown only what was measured.
"""

from __future__ import annotations

import ipaddress
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fleetd import limits

Address = tuple[str, int]
Source = Literal["static", "remembered", "mdns", "told"]
Kind = Literal["loopback", "thunderbolt", "wired", "wifi", "tailscale", "virtual", ""]

# The stronger source is kept where an address comes from several.
_SOURCES: Sequence[Source] = ("static", "remembered", "mdns", "told")
_HINTS: Sequence[Source] = ("mdns", "told")
_TAILSCALE = (ipaddress.ip_network("100.64.0.0/10"), ipaddress.ip_network("fd7a:115c:a1e0::/48"))
# What a kind usually does, until it is measured: round trip in seconds, bytes per second.
_USUAL: dict[str, tuple[float, float]] = {
    "loopback": (0.0001, 2e9),
    "thunderbolt": (0.0003, 1e9),
    "wired": (0.0005, 115e6),
    "": (0.001, 60e6),
    "wifi": (0.004, 30e6),
    "virtual": (0.005, 20e6),
    "tailscale": (0.010, 10e6),
}
# A way is left only for one that is clearly better, or two alike would take turns for ever.
_FASTER, _NEARER, _NEARER_S = 1.5, 0.5, 0.0005
_REASONS_SHOWN = 3


def guess_kind(host: str) -> Kind:
    """What kind of way an address looks like; "" where the address alone does not tell."""
    bare, _, interface = host.partition("%")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return ""
    if address.is_loopback:
        return "loopback"
    if any(address in network for network in _TAILSCALE):
        return "tailscale"
    if address.version == 4 and address.is_link_local:
        return "thunderbolt"  # two machines on one cable, with nobody to give out addresses
    if interface.startswith("bridge"):
        return "thunderbolt"  # macOS names its Thunderbolt bridge so
    return ""


@dataclass(slots=True)
class PeerPath:
    """One address of a machine and how it has done."""

    address: Address
    source: Source
    kind: Kind
    due_s: float
    failures: int = 0  # since it last worked
    reason: str = ""  # of the last failure; "" once it works again
    tried_s: float | None = None
    worked_s: float | None = None
    _round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=limits.LINK_ROUND_TRIPS))
    _speeds: deque[float] = field(default_factory=lambda: deque(maxlen=limits.LINK_SPEEDS))

    @property
    def works(self) -> bool:
        return self.worked_s is not None and not self.failures

    @property
    def is_hint(self) -> bool:
        """Only said by somebody; nobody has answered there, and no settings name it."""
        return self.source in _HINTS and self.worked_s is None

    @property
    def rtt_s(self) -> float | None:
        """The median of the last round trips."""
        return _quantile(self._round_trips, 0.5)

    @property
    def bytes_per_s(self) -> float | None:
        """What three of four transfers reached."""
        return _quantile(self._speeds, 0.25)

    @property
    def expected_rtt_s(self) -> float:
        return self.rtt_s or _USUAL[self.kind][0]

    @property
    def expected_bytes_per_s(self) -> float:
        return self.bytes_per_s or _USUAL[self.kind][1]

    def round_trip(self, seconds: float) -> None:
        if 0 < seconds < math.inf:
            self._round_trips.append(seconds)

    def transferred(self, count: int, seconds: float) -> None:
        if count >= limits.LINK_TRANSFER_BYTES and 0 < seconds < math.inf:
            self._speeds.append(count / seconds)


class PeerPaths:
    """All known ways to one machine.

    Args:
        kind_of: tells an address's kind from its host; the daemon knows its interfaces and can tell more.
    """

    def __init__(self, kind_of: Callable[[str], Kind] = guess_kind) -> None:
        self._kind_of = kind_of
        self._paths: dict[Address, PeerPath] = {}
        self._for_bulk: Address | None = None
        self._for_control: Address | None = None

    def __iter__(self) -> Iterator[PeerPath]:
        return iter(self._paths.values())

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, address: Address) -> PeerPath | None:
        return self._paths.get(address)

    # ---- what is known and what happened -----------------------------------------------------------------

    def add(self, address: Address, source: Source, now: float) -> None:
        """Somebody says that the machine is there. One that failed before is tried again soon."""
        path = self._paths.get(address)
        if path is None:
            if self._make_room(source):
                self._paths[address] = PeerPath(address, source, self._kind_of(address[0]), due_s=now)
            return
        if _SOURCES.index(source) < _SOURCES.index(path.source):
            path.source = source
        if source == "mdns" and path.tried_s is not None:
            # It has just said that it is up. However often that is said, tries keep their least distance.
            path.due_s = min(path.due_s, max(now, path.tried_s + limits.DIAL_AGAIN_S))

    def succeeded(self, address: Address, now: float) -> None:
        if (path := self._paths.get(address)) is not None:
            path.tried_s = path.worked_s = path.due_s = now
            path.failures, path.reason = 0, ""

    def failed(self, address: Address, reason: str, now: float, random: float) -> None:
        """Nobody answered there. ``random`` in [0, 1) spreads the next tries of many machines."""
        if (path := self._paths.get(address)) is None:
            return
        path.due_s = now + backoff_s(path.failures, random)
        path.failures += 1
        path.reason = reason
        path.tried_s = now

    def retry(self, address: Address, now: float) -> None:
        """A session at this address has ended: whoever was there may be back at once."""
        if (path := self._paths.get(address)) is not None:
            path.failures, path.due_s = 0, now

    def round_trip(self, address: Address, seconds: float, now: float) -> None:
        """A ping came back this way."""
        if (path := self._paths.get(address)) is not None:
            path.worked_s = now
            path.round_trip(seconds)

    def transferred(self, address: Address, count: int, seconds: float) -> None:
        """Bytes that really went there, and how long they took."""
        if (path := self._paths.get(address)) is not None:
            path.transferred(count, seconds)

    def _make_room(self, source: Source) -> bool:
        if len(self._paths) < limits.ADDRESSES_PER_PEER:
            return True
        # For a hint only another one goes that was tried in vain: a flood of them must not outrun the tries.
        hints = [path for path in self if path.is_hint]
        spare = [path for path in hints if path.failures]
        if not spare and source not in _HINTS:
            spare = hints or [path for path in self if path.source != "static"]
        if not spare:
            return False
        # Of hints that failed the one most often; otherwise the one that worked longest ago, if ever.
        victim = min(
            spare, key=lambda path: (-math.inf if path.worked_s is None else path.worked_s, -path.failures)
        )
        del self._paths[victim.address]
        return True

    # ---- which one to take -------------------------------------------------------------------------------

    def order(self, now: float) -> list[Address]:
        """Addresses to dial now, best first: those that worked last, then by how near they are."""
        due = [path for path in self if path.due_s <= now]
        due.sort(key=lambda path: (path.failures, path.worked_s is None, path.expected_rtt_s))
        return [path.address for path in due]

    def best_for_control(self, current: Address | None = None) -> Address | None:
        """The nearest way that works; None while none does. ``current``: the one that a session takes now."""

        def is_better(new: PeerPath, old: PeerPath) -> bool:
            gain_s = old.expected_rtt_s - new.expected_rtt_s
            return new.expected_rtt_s <= old.expected_rtt_s * _NEARER and gain_s > _NEARER_S

        self._for_control = self._choose(
            current or self._for_control, lambda path: path.expected_rtt_s, is_better
        )
        return self._for_control

    def best_for_bulk(self) -> Address | None:
        """The fastest way that works; None while none does."""

        def is_better(new: PeerPath, old: PeerPath) -> bool:
            return new.expected_bytes_per_s >= old.expected_bytes_per_s * _FASTER

        self._for_bulk = self._choose(self._for_bulk, lambda path: -path.expected_bytes_per_s, is_better)
        return self._for_bulk

    def _choose(
        self,
        current: Address | None,
        cost: Callable[[PeerPath], float],
        is_better: Callable[[PeerPath, PeerPath], bool],
    ) -> Address | None:
        working = [path for path in self if path.works]
        if not working:
            return None
        best = min(working, key=cost)
        old = self._paths.get(current) if current is not None else None
        if old is None or not old.works or is_better(best, old):
            return best.address
        return old.address

    # ---- for later and for people ------------------------------------------------------------------------

    def remembered(self) -> list[Address]:
        """Where to look after a restart: what worked last first, then what worked before this start."""
        kept = [path for path in self if path.worked_s is not None or path.source == "remembered"]
        kept.sort(key=lambda path: -math.inf if path.worked_s is None else path.worked_s, reverse=True)
        return [path.address for path in kept]

    def why_unusable(self) -> str:
        """What people are told when no way works: the reasons of the likeliest addresses first."""
        if not self._paths:
            return "No address of it is known: it has not been seen on this network."
        tried = [path for path in self if path.reason]
        if not tried:
            return "Its addresses have not been tried yet."
        tried.sort(key=lambda path: (path.worked_s is None, path.failures, path.expected_rtt_s))
        reasons = list(dict.fromkeys(path.reason for path in tried))
        left = len(reasons) - _REASONS_SHOWN
        return " ".join(reasons[:_REASONS_SHOWN]) + (f" {left} more addresses failed." if left > 0 else "")


def backoff_s(failures: int, random: float) -> float:
    """How long to wait after one more failure than so many; ``random`` in [0, 1) keeps machines apart."""
    return min(limits.DIAL_AGAIN_S * 2.0 ** min(failures, 32), limits.DIAL_AGAIN_MOST_S) * (1 - random / 4)


def _quantile(samples: Sequence[float] | deque[float], share: float) -> float | None:
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[round(share * (len(ordered) - 1))]
