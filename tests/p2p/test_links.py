"""Ways to a machine: the order in which they are tried, what is forgotten, and when a way is changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleetd import limits
from fleetd.p2p.links import Address, PeerPath, PeerPaths, guess_kind
from fleetd.text.host_port import host_port

LAN, WIFI, CABLE, TAILNET = (
    ("10.0.0.2", 8115),
    ("10.9.0.2", 8115),
    ("169.254.3.4", 8115),
    ("100.70.1.1", 8115),
)
KINDS = {LAN[0]: "wired", WIFI[0]: "wifi", CABLE[0]: "thunderbolt", TAILNET[0]: "tailscale"}


def all_paths(*addresses: Address) -> PeerPaths:
    paths = PeerPaths(lambda host: KINDS.get(host, ""))  # type: ignore[arg-type,return-value]
    for address in addresses:
        paths.add(address, "mdns", 0.0)
        paths.succeeded(address, 0.0)
    return paths


def hint(number: int) -> Address:
    return (f"10.1.{number >> 8}.{number & 255}", 8115)


def path_of(paths: PeerPaths, address: Address) -> PeerPath:
    path = paths.get(address)
    assert path is not None
    return path


# ---- Order and retries -----------------------------------------------------------------------------------


def test_unmeasured_addresses_are_tried_by_what_their_kind_usually_does() -> None:
    paths = all_paths()
    for address in (TAILNET, WIFI, LAN, CABLE):
        paths.add(address, "mdns", 0.0)
    assert paths.order(0.0) == [CABLE, LAN, WIFI, TAILNET]


def test_a_measured_round_trip_beats_what_the_kind_usually_does() -> None:
    paths = all_paths(LAN, WIFI)
    paths.round_trip(WIFI, 0.0002, 1.0)
    assert paths.order(1.0) == [WIFI, LAN]


def test_what_has_worked_is_tried_before_what_never_has_and_failures_last() -> None:
    paths = all_paths(WIFI)
    paths.add(CABLE, "mdns", 0.0)
    paths.add(LAN, "mdns", 0.0)
    assert paths.order(0.0) == [WIFI, CABLE, LAN]
    paths.failed(WIFI, "refused", 0.0, 0.0)
    assert paths.order(100.0) == [CABLE, LAN, WIFI]


@given(st.integers(1, 60), st.floats(0, 1, exclude_max=True))
def test_waits_double_from_half_a_second_to_thirty_and_are_spread(failures: int, random: float) -> None:
    paths = all_paths()
    paths.add(LAN, "static", 0.0)
    for _ in range(failures):
        paths.failed(LAN, "no answer", 10.0, random)
    full_s = min(limits.DIAL_AGAIN_S * 2 ** (failures - 1), limits.DIAL_AGAIN_MOST_S)
    assert 0.75 * full_s <= path_of(paths, LAN).due_s - 10.0 <= full_s
    assert paths.order(10.0 + full_s) == [LAN]
    assert paths.order(10.0 + 0.74 * full_s) == []


def test_success_and_a_lost_session_start_the_waits_from_the_beginning() -> None:
    paths = all_paths(LAN)
    for _ in range(10):
        paths.failed(LAN, "no answer", 0.0, 0.0)
    paths.retry(LAN, 1.0)
    assert paths.order(1.0) == [LAN]
    paths.failed(LAN, "no answer", 1.0, 0.0)
    assert path_of(paths, LAN).due_s == 1.0 + limits.DIAL_AGAIN_S
    paths.succeeded(LAN, 2.0)
    assert (path_of(paths, LAN).failures, path_of(paths, LAN).reason) == (0, "")


def test_a_machine_that_announces_itself_is_tried_at_once() -> None:
    paths = all_paths()
    waits_s = limits.DIAL_AGAIN_MOST_S / 2
    paths.add(LAN, "mdns", 0.0)
    for _ in range(10):
        paths.failed(LAN, "no answer", 0.0, 0.0)
    assert paths.order(waits_s) == []
    paths.add(LAN, "told", waits_s)  # hearsay is no sign of life
    assert paths.order(waits_s) == []
    paths.add(LAN, "mdns", waits_s)
    assert paths.order(waits_s) == [LAN]


def test_a_flood_of_announcements_does_not_make_this_machine_dial_faster() -> None:
    paths = all_paths()
    paths.add(LAN, "mdns", 0.0)
    dials = 0
    for step in range(10_000):  # ten seconds, a thousand announcements in each
        now = step / 1000
        paths.add(LAN, "mdns", now)
        if paths.order(now):
            dials += 1
            paths.failed(LAN, "refused", now, 0.9)
    assert dials <= 10 / limits.DIAL_AGAIN_S + 1


# ---- What is kept ----------------------------------------------------------------------------------------


def test_sixteen_addresses_are_kept_and_a_seventeenth_waits_until_one_has_failed() -> None:
    paths = all_paths()
    for number in range(limits.ADDRESSES_PER_PEER):
        paths.add(hint(number), "mdns", 0.0)
    assert len(paths) == limits.ADDRESSES_PER_PEER
    paths.add(hint(99), "mdns", 0.0)
    assert paths.get(hint(99)) is None
    paths.failed(hint(3), "refused", 0.0, 0.0)
    paths.add(hint(99), "mdns", 0.0)
    assert paths.get(hint(99)) is not None
    assert paths.get(hint(3)) is None
    assert len(paths) == limits.ADDRESSES_PER_PEER


def test_spoofed_addresses_never_push_out_what_works_or_is_configured() -> None:
    paths = all_paths(LAN)
    paths.add(TAILNET, "static", 0.0)
    paths.add(WIFI, "remembered", 0.0)
    for address in (TAILNET, WIFI, LAN):
        for _ in range(5):
            paths.failed(address, "no answer", 1.0, 0.0)
    for number in range(1000):
        paths.add(hint(number), "mdns", 2.0)
        paths.failed(hint(number), "refused", 2.0, 0.0)
    assert all(paths.get(address) for address in (LAN, TAILNET, WIFI))


def test_a_spoofed_address_does_not_take_the_place_of_one_that_has_worked_and_is_down_for_now() -> None:
    paths = all_paths(LAN)
    for number in range(limits.ADDRESSES_PER_PEER - 1):
        paths.add(hint(number), "mdns", 0.0)
    paths.failed(LAN, "no answer", 1.0, 0.0)
    paths.add(hint(99), "mdns", 1.0)
    assert paths.get(LAN) is not None


def test_an_address_that_somebody_answered_at_finds_room_among_hints() -> None:
    paths = all_paths()
    for number in range(limits.ADDRESSES_PER_PEER):
        paths.add(hint(number), "told", 0.0)
    paths.add(LAN, "remembered", 0.0)
    assert paths.get(LAN) is not None
    assert len(paths) == limits.ADDRESSES_PER_PEER


def test_an_announcement_never_puts_a_dial_off() -> None:
    """A session has just ended, and the machine is to be dialled at once."""
    paths = all_paths(LAN)
    paths.failed(LAN, "It is off.", 10.0, 0.0)
    paths.retry(LAN, 10.0)
    paths.add(LAN, "mdns", 10.0)
    assert paths.order(10.0) == [LAN]


def test_the_stronger_source_of_an_address_is_kept() -> None:
    paths = all_paths()
    paths.add(LAN, "told", 0.0)
    for source in ("static", "mdns", "remembered"):
        paths.add(LAN, source, 0.0)  # type: ignore[arg-type]
    assert path_of(paths, LAN).source == "static"


def test_remembered_are_those_that_worked_latest_first_and_those_not_met_since_the_start() -> None:
    paths = all_paths()
    for address, source in ((LAN, "mdns"), (WIFI, "mdns"), (CABLE, "remembered"), (TAILNET, "mdns")):
        paths.add(address, source, 0.0)  # type: ignore[arg-type]
    paths.succeeded(LAN, 1.0)
    paths.succeeded(WIFI, 2.0)
    assert paths.remembered() == [WIFI, LAN, CABLE]
    paths.round_trip(LAN, 0.001, 3.0)
    assert paths.remembered() == [LAN, WIFI, CABLE]


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, the bounds hold and what matters stays."""

    addresses = st.integers(0, 40).map(hint)

    def __init__(self) -> None:
        super().__init__()
        self.paths = PeerPaths()
        self.now = 0.0
        self.static: set[Address] = set()

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(address=addresses, source=st.sampled_from(["remembered", "mdns", "told"]))
    def add(self, address: Address, source: Any) -> None:
        works = {path.address for path in self.paths if path.works}
        self.paths.add(address, source, self.now)
        if source != "remembered":
            assert works <= {path.address for path in self.paths}

    @precondition(lambda self: len(self.static) < 3)
    @rule(address=addresses)
    def configure(self, address: Address) -> None:
        self.paths.add(address, "static", self.now)
        self.static.add(address)

    @rule(address=addresses, random=st.floats(0, 1, exclude_max=True))
    def fail(self, address: Address, random: float) -> None:
        self.paths.failed(address, "no answer", self.now, random)

    @rule(address=addresses)
    def succeed(self, address: Address) -> None:
        self.paths.succeeded(address, self.now)

    @rule(address=addresses, seconds=st.floats(allow_nan=True), count=st.integers(-1, 1 << 40))
    def measure(self, address: Address, seconds: float, count: int) -> None:
        self.paths.round_trip(address, seconds, self.now)
        self.paths.transferred(address, count, seconds, self.now)

    @invariant()
    def holds(self) -> None:
        known = {path.address for path in self.paths}
        assert len(known) <= limits.ADDRESSES_PER_PEER
        assert self.static <= known
        order = self.paths.order(self.now)
        assert len(set(order)) == len(order)
        assert set(order) == {path.address for path in self.paths if path.due_s <= self.now}
        # Nobody waits for longer than the longest wait.
        assert set(self.paths.order(self.now + limits.DIAL_AGAIN_MOST_S)) == known
        works = {path.address for path in self.paths if path.works}
        for best in (self.paths.best_for_bulk(), self.paths.best_for_control()):
            assert best in works if works else best is None
        assert self.paths.why_unusable()


TestAnyHistory = AnyHistory.TestCase


# ---- Measuring and choosing ------------------------------------------------------------------------------


def test_figures_are_the_median_and_the_pessimistic_bandwidth() -> None:
    path = PeerPath(LAN, "mdns", "wired", due_s=0.0)
    assert (path.rtt_s, path.bytes_per_s) == (None, None)
    for number in (5, 1, 4, 2, 3):
        path.round_trip(number / 1000)
        # Within a factor of two: what is slower than that, a faster transfer replaces.
        path.transferred((5 + number) * limits.LINK_TRANSFER_BYTES, 1.0, 0.0)
    assert path.rtt_s == 0.003
    assert path.bytes_per_s == 7 * limits.LINK_TRANSFER_BYTES


def test_only_the_last_measurements_count() -> None:
    path = PeerPath(LAN, "mdns", "wired", due_s=0.0)
    for _ in range(100):
        path.round_trip(1.0)
        path.transferred(limits.LINK_TRANSFER_BYTES, 1.0, 0.0)
    for _ in range(limits.LINK_ROUND_TRIPS):
        path.round_trip(0.001)
    for _ in range(limits.LINK_SPEEDS):
        path.transferred(limits.LINK_TRANSFER_BYTES, 0.5, 0.0)
    assert (path.rtt_s, path.bytes_per_s) == (0.001, 2 * limits.LINK_TRANSFER_BYTES)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_measurement_that_cannot_be_is_ignored(seconds: float) -> None:
    path = PeerPath(LAN, "mdns", "wired", due_s=0.0)
    path.round_trip(seconds)
    path.transferred(limits.LINK_TRANSFER_BYTES, seconds, 0.0)
    assert (path.rtt_s, path.bytes_per_s) == (None, None)


def test_a_short_transfer_says_nothing_about_the_bandwidth() -> None:
    path = PeerPath(LAN, "mdns", "wired", due_s=0.0)
    path.transferred(limits.LINK_TRANSFER_BYTES - 1, 1.0, 0.0)
    assert path.bytes_per_s is None
    path.transferred(limits.LINK_TRANSFER_BYTES, 1.0, 0.0)
    assert path.bytes_per_s == limits.LINK_TRANSFER_BYTES


def test_bulk_changes_its_way_only_for_one_half_as_fast_again() -> None:
    paths = all_paths(LAN, WIFI)
    paths.transferred(WIFI, 100_000_000, 1.0, 0.0)
    paths.transferred(LAN, 99_000_000, 1.0, 0.0)
    assert paths.best_for_bulk() == WIFI
    for _ in range(limits.LINK_SPEEDS):
        paths.transferred(LAN, 149_000_000, 1.0, 0.0)
    assert paths.best_for_bulk() == WIFI
    for _ in range(limits.LINK_SPEEDS):
        paths.transferred(LAN, 150_000_000, 1.0, 0.0)
    assert paths.best_for_bulk() == LAN


def test_control_changes_its_way_only_for_half_the_round_trip_and_half_a_millisecond() -> None:
    paths = all_paths(LAN, WIFI)
    paths.round_trip(WIFI, 0.00030, 0.0)
    paths.round_trip(LAN, 0.00040, 0.0)
    assert paths.best_for_control() == WIFI
    for _ in range(limits.LINK_ROUND_TRIPS):
        paths.round_trip(LAN, 0.00005, 0.0)  # a sixth, but who would notice a quarter of a millisecond
    assert paths.best_for_control() == WIFI
    for _ in range(limits.LINK_ROUND_TRIPS):
        paths.round_trip(WIFI, 0.00200, 0.0)
        paths.round_trip(LAN, 0.00101, 0.0)  # a millisecond less, but not half
    assert paths.best_for_control() == WIFI
    for _ in range(limits.LINK_ROUND_TRIPS):
        paths.round_trip(LAN, 0.00099, 0.0)
    assert paths.best_for_control() == LAN


def test_two_ways_alike_do_not_take_turns() -> None:
    paths = all_paths(LAN, WIFI)
    chosen = set()
    for step in range(200):
        paths.transferred(LAN, 100_000_000 + (step % 7) * 5_000_000, 1.0, 0.0)
        paths.transferred(WIFI, 100_000_000 + (step % 5) * 5_000_000, 1.0, 0.0)
        chosen.add(paths.best_for_bulk())
    assert len(chosen) == 1


def test_a_way_that_stops_working_is_left_at_once_whatever_it_was_worth() -> None:
    paths = all_paths(CABLE, TAILNET)
    assert paths.best_for_bulk() == paths.best_for_control() == CABLE
    paths.failed(CABLE, "no route", 1.0, 0.0)
    assert paths.best_for_bulk() == paths.best_for_control() == TAILNET
    paths.failed(TAILNET, "no answer", 1.0, 0.0)
    assert paths.best_for_bulk() is paths.best_for_control() is None


# ---- For people ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("169.254.10.20", "thunderbolt"),
        ("fe80::1%bridge0", "thunderbolt"),
        ("fe80::1%en0", ""),
        ("100.64.0.1", "tailscale"),
        ("100.127.255.255", "tailscale"),
        ("100.128.0.1", ""),
        ("fd7a:115c:a1e0::5", "tailscale"),
        ("fd7a:115c:a1e1::5", ""),
        ("192.168.1.5", ""),
        ("studio.local", ""),
        ("", ""),
    ],
)
def test_an_address_is_guessed_by_its_look(host: str, kind: str) -> None:
    assert guess_kind(host) == kind


def test_addresses_that_fail_alike_are_one_reason() -> None:
    paths = all_paths()
    for address, seen in ((LAN, 1), (("fd00::2", 8115), 2)):
        paths.add(address, "mdns", 0.0)
        for _ in range(seen):
            paths.failed(address, f"{host_port(*address)} refused the connection.", 0.0, 0.0)
    assert paths.why_unusable() == f"{host_port(*LAN)} refused the connection."


def test_why_nobody_answers_is_said_with_the_likeliest_address_first() -> None:
    paths = all_paths()
    assert "No address" in paths.why_unusable()
    paths.add(TAILNET, "mdns", 0.0)
    assert "not been tried" in paths.why_unusable()
    paths.failed(TAILNET, "The tailnet is down.", 0.0, 0.0)
    paths.add(LAN, "mdns", 0.0)
    paths.failed(LAN, "Refused.", 0.0, 0.0)
    assert paths.why_unusable() == "Refused. The tailnet is down."
    for number in range(3):
        paths.add(hint(number), "mdns", 0.0)
        paths.failed(hint(number), f"Reason {number}.", 0.0, 0.0)
    assert paths.why_unusable().endswith("2 more addresses failed.")
