"""The paths to one machine: its known addresses, how each has performed, and which one to use.

Sans-IO. An address is a hint until the machine has answered there, so hints are few, forgotten first, and
never replace an address that has worked or that the settings name. A path without measurements is judged by
the usual figures of its kind; views show measured figures only.
"""

from __future__ import annotations

import ipaddress
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fleetd import limits
from fleetd.p2p.link_speeds import LinkSpeeds, quantile
from fleetd.text.host_port import host_port

Address = tuple[str, int]
Source = Literal["static", "remembered", "mdns", "told"]
Kind = Literal["loopback", "thunderbolt", "wired", "wifi", "tailscale", "virtual", ""]

# The stronger source is kept if an address comes from several.
_SOURCES: Sequence[Source] = ("static", "remembered", "mdns", "told")
_HINTS: Sequence[Source] = ("mdns", "told")
_TAILSCALE = (ipaddress.ip_network("100.64.0.0/10"), ipaddress.ip_network("fd7a:115c:a1e0::/48"))
#: In the reason of a path where a system answered and no daemon listened.
REFUSED = "refused the connection"
# Usual figures of a kind, until it is measured: round trip in seconds, bytes per second.
_USUAL: dict[str, tuple[float, float]] = {
    "loopback": (0.0001, 2e9),
    "thunderbolt": (0.0003, 1e9),
    "wired": (0.0005, 115e6),
    "": (0.001, 60e6),
    "wifi": (0.004, 30e6),
    "virtual": (0.005, 20e6),
    "tailscale": (0.010, 10e6),
}


def usual_speed(kind: Kind) -> tuple[float, float]:
    """A round trip in seconds and the bytes per second of a path of this kind, until it is measured."""
    return _USUAL[kind]


# A path is left only for a clearly better one, or two similar paths would alternate for ever.
_FASTER, _NEARER, _NEARER_S = 1.5, 0.5, 0.0005
_REASONS_SHOWN = 3


def guess_kind(host: str) -> Kind:
    """The kind of path that an address suggests; "" where the address alone does not show it."""
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
        return "thunderbolt"  # two machines on one cable, without a DHCP server
    if interface.startswith("bridge"):
        return "thunderbolt"  # the name of the Thunderbolt bridge on macOS
    return ""


@dataclass(slots=True)
class PeerPath:
    """One address of a machine, with its measurements and failures."""

    address: Address
    source: Source
    kind: Kind
    due_s: float
    failures: int = 0  # since it last worked
    reason: str = ""  # of the last failure; "" once it works again
    tried_s: float | None = None
    worked_s: float | None = None
    _round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=limits.LINK_ROUND_TRIPS))
    speeds: LinkSpeeds = field(default_factory=LinkSpeeds)

    @property
    def works(self) -> bool:
        return self.worked_s is not None and not self.failures

    @property
    def is_hint(self) -> bool:
        """True for an address that has not worked yet and that the settings do not name."""
        return self.source in _HINTS and self.worked_s is None

    @property
    def rtt_s(self) -> float | None:
        """The median of the last round trips."""
        return quantile(self._round_trips, 0.5)

    @property
    def bytes_per_s(self) -> float | None:
        """The lower quartile of the last transfers that count."""
        return self.speeds.bytes_per_s

    @property
    def expected_rtt_s(self) -> float:
        return self.rtt_s or usual_speed(self.kind)[0]

    @property
    def usual_bytes_per_s(self) -> float:
        """Bytes per second that are usual for this kind of path."""
        return usual_speed(self.kind)[1]

    @property
    def expected_bytes_per_s(self) -> float:
        return self.bytes_per_s or self.usual_bytes_per_s

    def succeeded(self, now: float) -> None:
        """The machine answered at this address."""
        self.tried_s = self.worked_s = self.due_s = now
        self.failures, self.reason = 0, ""

    def failed(self, reason: str, now: float, random: float) -> None:
        """No machine could be reached at this address. ``random`` in [0, 1) spreads the retries of many."""
        self.due_s = now + backoff_s(self.failures, random)
        self.failures += 1
        self.reason = reason
        self.tried_s = now

    def round_trip(self, seconds: float) -> None:
        if 0 < seconds < math.inf:
            self._round_trips.append(seconds)

    def transferred(self, count: int, seconds: float, now: float, *, sure: bool = True) -> None:
        if _tells(count, seconds):
            self.speeds.transferred(count / seconds, now, sure=sure)

    def carried(self, count: int, seconds: float, now: float) -> None:
        """Note a transfer as ``transferred`` does, if it may have waited for other things meanwhile."""
        if _tells(count, seconds):
            self.speeds.carried(count / seconds, now)


class PeerPaths:
    """All known paths to one machine.

    Args:
        kind_of: the kind of path to a host; the daemon uses its interfaces, which show more than the address.
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
        """Add an address, or a stronger source for a known one. mDNS makes a failed address due soon."""
        path = self._paths.get(address)
        if path is None:
            if self._make_room(source):
                self._paths[address] = PeerPath(address, source, self._kind_of(address[0]), due_s=now)
            return
        if _SOURCES.index(source) < _SOURCES.index(path.source):
            path.source = source
        if source == "mdns" and path.tried_s is not None:
            # The machine has just announced itself. Repeated announcements do not shorten the least interval.
            path.due_s = min(path.due_s, max(now, path.tried_s + limits.DIAL_AGAIN_S))

    @property
    def refused(self) -> bool:
        """True if a system answered at an address, and its daemon did not: the machine is awake."""
        return any(REFUSED in path.reason for path in self)

    def succeeded(self, address: Address, now: float) -> None:
        if (path := self._paths.get(address)) is not None:
            path.succeeded(now)

    def failed(self, address: Address, reason: str, now: float, random: float) -> None:
        if (path := self._paths.get(address)) is not None:
            path.failed(reason, now, random)

    def retry(self, address: Address, now: float) -> None:
        """A session at this address has ended: the machine may be back at once, so dial without delay."""
        if (path := self._paths.get(address)) is not None:
            path.failures, path.due_s = 0, now

    def round_trip(self, address: Address, seconds: float, now: float) -> None:
        """Record the round trip of a ping."""
        if (path := self._paths.get(address)) is not None:
            path.worked_s = now
            path.round_trip(seconds)

    def transferred(
        self, address: Address, count: int, seconds: float, now: float, *, sure: bool = True
    ) -> None:
        """Record a transfer of ``count`` bytes. ``sure``: nothing else is likely to have slowed it."""
        if (path := self._paths.get(address)) is not None:
            path.transferred(count, seconds, now, sure=sure)

    def _make_room(self, source: Source) -> bool:
        if len(self._paths) < limits.ADDRESSES_PER_PEER:
            return True
        # A hint replaces only a hint that failed: a flood of hints must not outrun the dials.
        hints = [path for path in self if path.is_hint]
        spare = [path for path in hints if path.failures]
        if not spare and source not in _HINTS:
            spare = hints or [path for path in self if path.source != "static"]
        if not spare:
            return False
        # The hint with the most failures; otherwise the address that worked longest ago, or never.
        victim = min(
            spare, key=lambda path: (-math.inf if path.worked_s is None else path.worked_s, -path.failures)
        )
        del self._paths[victim.address]
        return True

    # ---- which one to take -------------------------------------------------------------------------------

    def order(self, now: float) -> list[Address]:
        """Addresses that are due, best first: fewest failures, then those that worked, then shortest round
        trip."""
        due = [path for path in self if path.due_s <= now]
        due.sort(key=lambda path: (path.failures, path.worked_s is None, path.expected_rtt_s))
        return [path.address for path in due]

    def best_for_control(self, current: Address | None = None) -> Address | None:
        """The working path with the shortest round trip, or None. ``current``: the path of the session."""

        def is_better(new: PeerPath, old: PeerPath) -> bool:
            gain_s = old.expected_rtt_s - new.expected_rtt_s
            return new.expected_rtt_s <= old.expected_rtt_s * _NEARER and gain_s > _NEARER_S

        self._for_control = self._choose(
            current or self._for_control, lambda path: path.expected_rtt_s, is_better
        )
        return self._for_control

    def best_for_bulk(self) -> Address | None:
        """The working path with the most bytes per second, or None."""

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
        """Addresses to dial after a restart: the last that worked first, then those of earlier runs."""
        kept = [path for path in self if path.worked_s is not None or path.source == "remembered"]
        kept.sort(key=lambda path: -math.inf if path.worked_s is None else path.worked_s, reverse=True)
        return [path.address for path in kept]

    def why_unusable(self) -> str:
        """The reasons why no path works, those of the likeliest addresses first."""
        if not self._paths:
            return "No address of it is known: it has not been seen on this network."
        tried = [path for path in self if path.reason]
        if not tried:
            return "Its addresses have not been tried yet."
        tried.sort(key=lambda path: (path.worked_s is None, path.failures, path.expected_rtt_s))
        # Of addresses that fail alike, the likeliest is enough.
        alike = {path.reason.replace(host_port(*path.address), ""): path.reason for path in reversed(tried)}
        reasons = [path.reason for path in tried if path.reason in alike.values()]
        reasons = list(dict.fromkeys(reasons))
        left = len(reasons) - _REASONS_SHOWN
        return " ".join(reasons[:_REASONS_SHOWN]) + (f" {left} more addresses failed." if left > 0 else "")


def backoff_s(failures: int, random: float) -> float:
    """Seconds to wait after a failure that ``failures`` others came before; ``random`` in [0, 1) spreads
    the retries of many machines."""
    return min(limits.DIAL_AGAIN_S * 2.0 ** min(failures, 32), limits.DIAL_AGAIN_MOST_S) * (1 - random / 4)


def _tells(count: int, seconds: float) -> bool:
    """True if a transfer says something about the bandwidth."""
    return count >= limits.LINK_TRANSFER_BYTES and 0 < seconds < math.inf
