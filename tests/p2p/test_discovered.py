"""Claims from the network: what is believed, what is refused, and what a flood can do."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.p2p.discovery.discovered import (
    DiscoveredPeer,
    DiscoveryTable,
    is_plausible,
    read_claim,
    write_text,
)

ME, OTHER = "m" * 56, "o" * 56
HOST = "192.168.1.7"


def text(**changes: bytes | None) -> dict[bytes, bytes]:
    """A good claim, changed; None leaves a string out."""
    good: dict[str, bytes | None] = {"id": OTHER.encode(), "name": b"studio", "v": b"1-2", "pair": b"42"}
    return {key.encode(): value for key, value in (good | changes).items() if value is not None}


def number(index: int) -> DiscoveredPeer:
    digits = "".join(string.ascii_lowercase[int(digit)] for digit in f"{index:056d}")
    return DiscoveredPeer(digits, f"m{index}", ((HOST, 8115),), (1, 1))


def table(kept: set[str] | None = None) -> DiscoveryTable:
    return DiscoveryTable(ME, (kept or set()).__contains__)


# ---- One claim -------------------------------------------------------------------------------------------


def test_a_machine_reads_what_another_writes() -> None:
    written = write_text(node_id=OTHER, name="Anna's Studio", versions=(1, 3), pairing="7")
    wire = {key.encode(): value.encode() for key, value in written.items()}
    assert read_claim(wire, [HOST, "fd00::7"], 8115, loopback=False) == DiscoveredPeer(
        OTHER, "Anna's Studio", ((HOST, 8115), ("fd00::7", 8115)), (1, 3), "7"
    )


@given(st.text(max_size=400))
def test_any_name_fits_into_a_txt_record_and_comes_back_printable(name: str) -> None:
    written = write_text(node_id=OTHER, name=name, versions=(1, 1), pairing="")
    assert len(f"name={written['name']}".encode()) <= limits.CLAIM_TEXT_BYTES
    wire = {key.encode(): value.encode() for key, value in written.items()}
    claim = read_claim(wire, [HOST], 8115, loopback=False)
    assert claim is not None
    assert claim.name == written["name"].strip()
    assert claim.name.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": b"o" * 55},
        {"id": b"o" * 57},
        {"id": b"O" * 56},
        {"id": b"0" * 56},
        {"id": b""},
        {"id": None},
        {"v": b""},
        {"v": b"1"},
        {"v": b"2-1"},
        {"v": b"0-1"},
        {"v": b"1-999999"},
        {"v": b"1-2\n"},
        {"v": "\u0661-\u0662".encode()},
        {"v": None},
    ],
)
def test_a_claim_without_form_is_refused(changes: dict[str, bytes | None]) -> None:
    assert read_claim(text(**changes), [HOST], 8115, loopback=False) is None


@pytest.mark.parametrize(("port", "believed"), [(0, False), (1, True), (65535, True), (65536, False)])
def test_ports_that_cannot_be_are_refused(port: int, believed: bool) -> None:
    assert (read_claim(text(), [HOST], port, loopback=False) is not None) == believed


@pytest.mark.parametrize("pair", [b"4" * 17, b"\x1b[2J", b"4 2", "é".encode(), None])
def test_a_nameplate_without_form_is_no_pairing_window(pair: bytes | None) -> None:
    claim = read_claim(text(pair=pair), [HOST], 8115, loopback=False)
    assert claim is not None
    assert claim.pairing == ""


def test_a_name_cannot_move_the_cursor_of_a_terminal() -> None:
    claim = read_claim(text(name=b"a\x1b[2J\r\nb\xff\xe2\x80\xae"), [HOST], 8115, loopback=False)
    assert claim is not None
    assert claim.name == "a[2Jb\ufffd"


def test_a_name_is_cut_at_its_bound() -> None:
    for length in (limits.MEMBER_NAME_CHARS, limits.MEMBER_NAME_CHARS + 1):
        claim = read_claim(text(name=b"n" * length), [HOST], 8115, loopback=False)
        assert claim is not None
        assert len(claim.name) == limits.MEMBER_NAME_CHARS


def test_a_claim_cannot_aim_this_machine_at_its_own_local_services() -> None:
    hosts = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"]  # noqa: S104
    assert read_claim(text(), hosts, 6379, loopback=False) is None
    claim = read_claim(text(), [*hosts, HOST], 6379, loopback=False)
    assert claim is not None
    assert claim.addresses == ((HOST, 6379),)


def test_a_daemon_on_loopback_believes_loopback() -> None:
    claim = read_claim(text(), ["127.0.0.1"], 8115, loopback=True)
    assert claim is not None
    assert claim.addresses == (("127.0.0.1", 8115),)


@pytest.mark.parametrize(
    ("host", "plausible"),
    [
        ("10.0.0.1", True),
        ("169.254.1.1", True),
        ("100.64.0.1", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("2001:db8::1", True),
        ("fe80::1", False),  # of which interface?
        ("224.0.0.251", False),
        ("255.255.255.255", False),
        ("240.0.0.1", False),
        ("ff02::fb", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
        ("", False),
        ("10.0.0.1; rm -rf /", False),
    ],
)
def test_only_addresses_of_single_machines_are_plausible(host: str, plausible: bool) -> None:
    assert is_plausible(host, loopback=False) == plausible


def test_addresses_are_bounded_and_said_once() -> None:
    hosts = [f"10.0.0.{index}" for index in range(limits.ADDRESSES_PER_PEER + 1)]
    for count in (limits.ADDRESSES_PER_PEER, limits.ADDRESSES_PER_PEER + 1):
        claim = read_claim(text(), hosts[:1] * 5 + hosts[:count], 8115, loopback=False)
        assert claim is not None
        assert len(claim.addresses) == limits.ADDRESSES_PER_PEER


@given(
    st.dictionaries(st.sampled_from([b"id", b"name", b"v", b"pair", b"x"]), st.binary()),
    st.lists(st.text(max_size=20) | st.ip_addresses().map(str)),
    st.integers(),
)
def test_any_bytes_are_a_claim_in_form_or_nothing(
    words: dict[bytes, bytes], hosts: list[str], port: int
) -> None:
    claim = read_claim({b"id": OTHER.encode(), b"v": b"1-1"} | words, hosts, port, loopback=False)
    if claim is not None:
        assert len(claim.node_id) == 56
        assert claim.name.isprintable()
        assert 1 <= len(claim.addresses) <= limits.ADDRESSES_PER_PEER
        assert all(is_plausible(host, loopback=False) for host, _ in claim.addresses)


# ---- Many claims -----------------------------------------------------------------------------------------


def test_nobody_else_is_this_machine() -> None:
    seen = table()
    assert not seen.accept(DiscoveredPeer(ME, "me", ((HOST, 8115),), (1, 1)), "x", 0.0)
    assert not seen


def test_sixty_four_machines_are_remembered_and_one_more_replaces_the_most_silent() -> None:
    seen = table()
    for index in range(limits.DISCOVERED_PEERS):
        assert seen.accept(number(index), f"i{index}", 0.0)
    assert len(seen) == limits.DISCOVERED_PEERS
    seen.accept(number(0), "i0", 0.5)
    assert seen.accept(number(999), "i999", 1.0)
    assert len(seen) == limits.DISCOVERED_PEERS
    assert number(0).node_id in seen
    assert number(1).node_id not in seen


def test_a_flood_of_strangers_never_pushes_out_a_member() -> None:
    members = {number(index).node_id for index in range(10)}
    seen = table(members)
    for index in range(10):
        seen.accept(number(index), f"i{index}", 0.0)
    for index in range(10, 2000):
        seen.accept(number(index), f"i{index}", float(index))
    assert members <= set(seen)
    assert len(seen) == limits.DISCOVERED_PEERS


def test_a_table_full_of_members_takes_no_stranger() -> None:
    members = {number(index).node_id for index in range(limits.DISCOVERED_PEERS)}
    seen = table(members)
    for index in range(limits.DISCOVERED_PEERS):
        seen.accept(number(index), f"i{index}", 0.0)
    assert not seen.accept(number(999), "i999", 10.0)
    assert set(seen) == members


def test_a_flood_of_claims_is_acted_on_at_a_bounded_rate() -> None:
    seen = table()
    at_once = sum(seen.accept(number(1), "i", 0.0) for _ in range(limits.CLAIMS_AT_ONCE + 1))
    assert at_once == limits.CLAIMS_AT_ONCE
    later = sum(seen.accept(number(index), "i", 1.0 + index / 10_000) for index in range(10_000))
    assert 2 * limits.CLAIMS_PER_S - 1 <= later <= 2 * limits.CLAIMS_PER_S


def test_a_machine_that_is_not_heard_of_is_forgotten_in_time() -> None:
    seen = table()
    seen.accept(number(1), "i", 0.0)
    seen.expire(limits.DISCOVERED_TTL_S - 0.001)
    assert list(seen.values()) == [number(1)]
    seen.expire(limits.DISCOVERED_TTL_S)
    assert not seen


def test_a_goodbye_takes_back_what_was_said_under_its_name_and_nothing_else() -> None:
    seen = table()
    seen.accept(number(1), "one", 0.0)
    seen.accept(number(2), "two", 0.0)
    seen.gone("three")
    seen.gone("one")
    assert list(seen) == [number(2).node_id]
