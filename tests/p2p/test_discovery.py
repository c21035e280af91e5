"""mDNS on the loopback interface: machines find each other, and strangers on the network cannot do harm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from zeroconf import ServiceInfo
from zeroconf._protocol.outgoing import DNSOutgoing

from fleetd import limits
from fleetd.p2p.discovery import discovered, interfaces, mdns
from fleetd.p2p.discovery import discovery as module
from fleetd.p2p.discovery.discovery import RUNNING, DiscoveredPeer, Discovery, choose
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.discovery.mdns import SERVICE, FloodFilter, budget
from fleetd.p2p.discovery.network_checks import probe_multicast

LOOPBACK = "127.0.0.1"
GROUP = ("224.0.0.251", 5353)
RESPONSE = 0x8400


@pytest.fixture(scope="module", autouse=True)
def needs_multicast() -> None:
    local = next(found for found in interfaces.read() if LOOPBACK in found.addresses)
    fact = probe_multicast(local)
    if not fact.works:
        pytest.skip(f"mDNS IS NOT TESTED: no multicast on the loopback interface here, {fact.reason}")


def new_id() -> str:
    """Other tests, and other daemons of this machine, share the loopback interface."""
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz234567", k=56))


class DiscoveringMachine:
    """A running Discovery and what it was told."""

    def __init__(self, name: str, *, node_id: str = "", port: int = 8115, host: str = LOOPBACK) -> None:
        self.node_id = node_id or new_id()
        self.heard: dict[str, DiscoveredPeer] = {}
        self.news = asyncio.Event()
        self.members: set[str] = set()
        self.discovery = Discovery(
            node_id=self.node_id,
            name=name,
            port=port,
            versions=(1, 1),
            host=host,
            on_seen=self._seen,
            keep=lambda node_id: node_id in self.members,
        )

    def _seen(self, found: DiscoveredPeer) -> None:
        self.heard[found.node_id] = found
        self.news.set()

    async def until(self, met: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not met():
                self.news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self.news.wait()

    async def meets(self, *others: DiscoveringMachine) -> None:
        await self.until(lambda: all(other.node_id in self.heard for other in others))

    @property
    def gate(self) -> FloodFilter:
        responder = self.discovery.responder
        assert responder is not None
        return responder.filters[0]


@asynccontextmanager
async def running(machine: DiscoveringMachine, *, goodbye: bool = True) -> AsyncIterator[DiscoveringMachine]:
    task = asyncio.create_task(machine.discovery.run())
    try:
        yield machine
        assert not task.done()
    finally:
        if goodbye:
            await machine.discovery.stop()
        else:
            task.cancel()
        await asyncio.wait([task])
        assert machine.discovery.state == "stopped"


def packet(node_id: str, *, hosts: tuple[str, ...] = ("10.0.0.7",), port: int = 8115, **text: str) -> bytes:
    """What a machine, or somebody in its name, multicasts."""
    described = ServiceInfo(
        SERVICE,
        f"{node_id[:7]}-x.{SERVICE}",
        port,
        properties={"id": node_id, "name": "x", "v": "1-1", "pair": ""} | text,
        server=f"fleetd-{node_id[:16]}.local.",
        parsed_addresses=list(hosts),
    )
    out = DNSOutgoing(RESPONSE)
    for record in (
        described.dns_pointer(),
        described.dns_service(),
        described.dns_text(),
        *described.dns_addresses(),
    ):
        out.add_answer_at_time(record, 0)
    (data,) = out.packets()
    return data


# ---- Finding each other ----------------------------------------------------------------------------------


async def test_two_machines_see_each_other_and_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they say when they come and go; nobody has to ask again."""
    monkeypatch.setattr(module, "_EARLY_S", ())
    first, second = DiscoveringMachine("first"), DiscoveringMachine("second", port=8116)
    async with running(first):
        await first.until(lambda: first.discovery.state == RUNNING)
        async with running(second):
            await asyncio.gather(first.meets(second), second.meets(first))
            seen = first.discovery.seen[second.node_id]
            assert seen == DiscoveredPeer(second.node_id, "second", ((LOOPBACK, 8116),), (1, 1), "")
            assert first.node_id not in first.discovery.seen
        await first.until(lambda: second.node_id not in first.discovery.seen)


async def test_a_machine_that_died_without_goodbye_and_came_back_is_heard_at_its_new_port() -> None:
    watcher, before = DiscoveringMachine("watcher"), DiscoveringMachine("dies", port=8120)
    async with running(watcher):
        async with running(before, goodbye=False):
            await watcher.meets(before)
        assert before.node_id in watcher.discovery.seen
        again = DiscoveringMachine("dies", node_id=before.node_id, port=8121)
        async with running(again):
            await watcher.until(
                lambda: watcher.discovery.seen[before.node_id].addresses == ((LOOPBACK, 8121),)
            )


async def test_a_pairing_window_is_announced_and_taken_back_and_outlives_a_new_network() -> None:
    shows, looks = DiscoveringMachine("shows"), DiscoveringMachine("looks")
    await shows.discovery.announce_pairing("7")  # before it runs
    async with running(shows), running(looks):
        await looks.until(lambda: shows.node_id in looks.heard and looks.heard[shows.node_id].pairing == "7")
        await shows.discovery.announce_pairing("")
        await looks.until(lambda: looks.heard[shows.node_id].pairing == "")
        await shows.discovery.announce_pairing("42")
        await looks.until(lambda: looks.heard[shows.node_id].pairing == "42")


async def test_what_a_machine_says_now_replaces_at_once_what_it_has_said_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mdns, "_SAY_AGAIN_S", 100.0)
    shows, looks = DiscoveringMachine("shows"), DiscoveringMachine("looks")
    await shows.discovery.announce_pairing("7")
    async with running(shows), running(looks):
        await looks.until(lambda: shows.node_id in looks.heard and looks.heard[shows.node_id].pairing == "7")
        for nameplate in ("", "42"):
            await asyncio.sleep(1.1)  # mDNS treats records older than a second in another way
            await shows.discovery.announce_pairing(nameplate)
            await looks.until(lambda said=nameplate: looks.heard[shows.node_id].pairing == said)


async def test_a_window_that_opens_and_closes_quickly_is_not_taken_for_open() -> None:
    shows, looks = DiscoveringMachine("shows"), DiscoveringMachine("looks")
    async with running(shows), running(looks):
        await looks.meets(shows)
        await shows.discovery.announce_pairing("5")
        await looks.until(lambda: looks.heard[shows.node_id].pairing == "5")
        for nameplate in ("", "5", ""):
            await shows.discovery.announce_pairing(nameplate)
            await asyncio.sleep(0.05)  # it is said; the same is heard again only after most of a second
        await looks.until(lambda: looks.heard[shows.node_id].pairing == "")


class Ear(asyncio.DatagramProtocol):
    """Hears all mDNS of the loopback interface."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.heard.append(data)


@asynccontextmanager
async def listening() -> AsyncIterator[Ear]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(GROUP)
    member = socket.inet_aton(GROUP[0]) + socket.inet_aton(LOOPBACK)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    transport, ear = await asyncio.get_running_loop().create_datagram_endpoint(Ear, sock=sock)
    try:
        yield ear
    finally:
        transport.close()


async def test_a_newcomer_is_told_at_once_and_a_crowd_of_them_only_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_EARLY_S", ())  # it has no other reason to speak
    machine = DiscoveringMachine("m")
    async with listening() as ear, running(machine):
        await machine.until(lambda: machine.discovery.state == RUNNING)

        def spoke() -> int:
            return sum(machine.node_id[:16].encode() in data for data in ear.heard)

        # Its own first question is answered, and it has announced itself three times.
        await machine.until(lambda: spoke() >= 4)
        # However long this takes, it is within the pause.
        monkeypatch.setattr(mdns, "_INTRODUCE_S", 3600.0)
        responder, told, send = machine.discovery.responder, list[object](), mdns.adapter.send_records
        assert responder is not None
        responder._introduced_s -= 3600.0

        def counted(*given: Any) -> None:
            told.append(given)
            send(*given)

        monkeypatch.setattr(mdns.adapter, "send_records", counted)
        before = spoke()
        for _ in range(10):
            machine.gate.datagram_received(packet(new_id()), GROUP)
        await machine.until(lambda: spoke() > before and len(machine.heard) >= 10)
        assert len(told) == 1


async def test_names_of_any_kind_can_be_announced() -> None:
    watcher = DiscoveringMachine("watcher")
    names = ["", ".", "Anna's Mac Studio (2)", "a.b._tcp.local.", "ü" * 300, "\x00\x1b[2J", "-" * 63]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(watcher))
        machines = [DiscoveringMachine(name) for name in names]
        for machine in machines:
            await stack.enter_async_context(running(machine))
        await watcher.meets(*machines)
        assert watcher.heard[machines[2].node_id].name == "Anna's Mac Studio (2)"


def test_nobody_waits_for_zeroconf_to_be_imported() -> None:
    code = "import sys, fleetd.p2p.discovery.discovery; sys.exit('zeroconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- Networks come and go --------------------------------------------------------------------------------


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[Interface]:
    """The interfaces that the system is said to have; looked at often."""
    local = next(found for found in interfaces.read() if LOOPBACK in found.addresses)
    found = [replace(local, kind="wired", multicast=True, addresses=(LOOPBACK,))]
    monkeypatch.setattr(interfaces, "read", lambda: list(found))
    monkeypatch.setattr(limits, "DISCOVERY_REFRESH_S", 0.02)
    monkeypatch.setattr(limits, "DISCOVERY_AGAIN_S", 0.02)
    monkeypatch.setattr(module, "_EARLY_S", ())
    return found


async def test_without_a_network_it_says_so_and_starts_when_one_comes(network: list[Interface]) -> None:
    cable = network.pop()
    machine = DiscoveringMachine("m", host="0.0.0.0")  # noqa: S104
    async with running(machine):
        await machine.until(lambda: "no network interface" in machine.discovery.state)
        network.append(cable)
        await machine.until(lambda: machine.discovery.state == RUNNING)


async def test_another_network_is_announced_on_and_the_machines_seen_are_kept(
    network: list[Interface],
) -> None:
    machine, other = DiscoveringMachine("m", host="0.0.0.0"), DiscoveringMachine("other")  # noqa: S104
    async with running(machine), running(other):
        await machine.until(lambda: machine.discovery.state == RUNNING)
        await machine.meets(other)
        before = machine.discovery.responder
        network[0] = replace(network[0], addresses=(LOOPBACK, "127.0.0.2"))
        await machine.until(lambda: machine.discovery.responder not in (before, None))
        assert other.node_id in machine.discovery.seen
        await other.until(
            lambda: (
                machine.node_id in other.heard
                and ("127.0.0.2", 8115) in other.heard[machine.node_id].addresses
            )
        )


async def test_a_socket_that_dies_is_replaced(network: list[Interface]) -> None:
    machine = DiscoveringMachine("m")
    async with running(machine):
        await machine.until(lambda: machine.discovery.state == RUNNING)
        before = machine.discovery.responder
        assert before is not None
        before.zeroconf.engine.readers[0].transport.close()
        await machine.until(lambda: machine.discovery.responder not in (before, None))


async def test_what_keeps_it_from_running_is_said_and_it_tries_again(
    network: list[Interface], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = mdns.Responder, []

    def refuse(**parts: Any) -> mdns.Responder:
        tries.append(parts)
        if len(tries) == 1:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        if len(tries) == 2:
            raise RuntimeError("anything at all")
        return real(**parts)

    monkeypatch.setattr(mdns, "Responder", refuse)
    machine, states = DiscoveringMachine("m"), set()

    def settled() -> bool:
        states.add(machine.discovery.state)
        return machine.discovery.state == RUNNING

    monkeypatch.setattr(machine.discovery, "_say", lambda state: states.add(state) or say(state))
    say = Discovery._say.__get__(machine.discovery)
    async with running(machine):
        await machine.until(settled)
    assert any("disallow-other-stacks" in state for state in states)
    assert any("anything at all" in state for state in states)


async def test_a_responder_that_cannot_be_closed_ends_neither_discovery_nor_the_daemon(
    network: list[Interface], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = mdns.Responder.close, 0

    async def close(responder: mdns.Responder) -> None:
        nonlocal tries
        tries += 1
        await real(responder)
        raise RuntimeError("anything at all")

    monkeypatch.setattr(mdns.Responder, "close", close)
    machine = DiscoveringMachine("m")
    async with running(machine):
        await machine.until(lambda: machine.discovery.state == RUNNING)
        first = machine.discovery.responder
        assert first is not None
        first.zeroconf.engine.readers[0].transport.close()
        await machine.until(lambda: machine.discovery.responder not in (first, None))
    assert tries


async def test_an_address_that_this_machine_does_not_have_is_no_silent_success() -> None:
    machine = DiscoveringMachine("m", host="192.0.2.254")
    async with running(machine):
        await machine.until(lambda: "no network interface" in machine.discovery.state)


async def test_multicast_that_the_system_refuses_to_send_shows_until_it_works_again() -> None:
    machine = DiscoveringMachine("m")
    async with running(machine):
        await machine.until(lambda: machine.discovery.state == RUNNING)
        machine.gate.error_received(OSError(errno.EPERM, "Operation not permitted"))
        assert "firewall" in machine.discovery.state
        responder = machine.discovery.responder
        assert responder is not None
        responder.ask()
        assert machine.discovery.state == RUNNING


async def test_a_machine_that_stops_as_it_looks_at_its_networks_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery, made = DiscoveringMachine("m").discovery, list[Any]()
    asked, answers, look = threading.Event(), threading.Event(), discovery._choose

    def slow() -> tuple[list[str], list[int]]:
        asked.set()
        assert answers.wait(60)
        return look()

    monkeypatch.setattr(discovery, "_choose", slow)
    monkeypatch.setattr(mdns, "Responder", lambda **options: made.append(options))
    running = asyncio.create_task(discovery.run())
    assert await asyncio.to_thread(asked.wait, 60)
    await discovery.stop()
    answers.set()
    await running
    assert not made


async def test_stopping_twice_or_before_the_start_is_nothing_special() -> None:
    machine = DiscoveringMachine("m")
    await machine.discovery.stop()
    await machine.discovery.stop()
    await machine.discovery.run()
    assert machine.discovery.state == "stopped"


# ---- What is announced -----------------------------------------------------------------------------------


def interface(name: str, *addresses: str, kind: Any = "wired", **changes: Any) -> Interface:
    return replace(
        Interface(name=name, kind=kind, addresses=addresses, networks=(), mtu=1500, up=True, multicast=True),
        **changes,
    )


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: {"en5": 5, "en6": 6}[name])


@pytest.mark.usefixtures("indexes")
def test_a_machine_announces_what_others_can_reach_and_nothing_else() -> None:
    found = [
        interface("lo0", LOOPBACK, "::1", kind="loopback"),
        interface("en5", "192.168.1.5", "fd00::5", "fe80::5%en5"),
        interface("en0", "192.168.2.5", kind="wifi"),
        interface("bridge0", "169.254.5.5", kind="thunderbolt"),
        interface("docker0", "172.17.0.1", kind="virtual"),
        interface("utun4", "100.70.0.5", kind="tailscale"),
        interface("en7", "192.168.7.5", up=False),
        interface("ppp1", "10.64.0.5", multicast=False),
    ]
    everything = ["192.168.1.5", "192.168.2.5", "169.254.5.5", "fd00::5"]
    assert choose("0.0.0.0", found) == (everything, [])  # noqa: S104
    assert choose("::", found) == (everything, [])
    assert choose("192.168.1.5", found) == (["192.168.1.5"], [])
    assert choose(LOOPBACK, found) == ([LOOPBACK], [])
    assert choose("fd00::5", found) == (["fd00::5"], [5])
    assert choose("0.0.0.0", found[:1]) == ([], [])  # noqa: S104


@pytest.mark.usefixtures("indexes")
def test_an_interface_without_ipv4_is_used_with_ipv6() -> None:
    found = [interface("en5", "192.168.1.5"), interface("en6", "fe80::6%en6")]
    assert choose("::", found) == (["192.168.1.5", "fe80::6%en6"], [6])


# ---- Strangers -------------------------------------------------------------------------------------------


async def test_packets_that_do_not_speak_of_fleetd_are_not_parsed() -> None:
    parsed: list[bytes] = []

    class Parser:
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            parsed.append(data)

    gate = FloodFilter(Parser(), budget(), lambda: 0.0, lambda error: None)
    for data in (b"", b"\x00" * 12, b"printer._ipp._tcp.local", b"_FLEETD", packet(new_id())):
        gate.datagram_received(data, GROUP)
    assert len(parsed) == 1


def test_the_budget_of_parsed_bytes_holds_at_the_limit_and_one_past() -> None:
    bucket = budget()
    assert not bucket.take(limits.MDNS_BURST_BYTES + 1, 1000.0)
    assert bucket.take(limits.MDNS_BURST_BYTES, 1000.0)
    assert not bucket.take(1, 1000.0)
    assert not bucket.take(limits.MDNS_BYTES_PER_S + 1, 1001.0)
    assert bucket.take(limits.MDNS_BYTES_PER_S, 1001.0)


@given(st.binary(max_size=600))
def test_any_bytes_of_a_txt_record_can_be_read(text: bytes) -> None:
    found = mdns.read_strings(text)
    assert sum(len(key) + len(value) for key, value in found.items()) <= len(text)


def test_a_txt_record_is_read_as_it_is_written() -> None:
    words = {"id": "x" * 56, "name": "a=b", "pair": ""}
    described = ServiceInfo(SERVICE, f"x.{SERVICE}", 1, properties=words)
    assert mdns.read_strings(described.text + b"\x04id=y") == {
        key.encode(): value.encode() for key, value in words.items()
    }


async def test_a_packet_that_breaks_the_parser_breaks_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class FailingListener:
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            raise IndexError("no such label")

    now = 0.0
    gate = FloodFilter(FailingListener(), budget(), lambda: now, lambda error: None)
    for _ in range(100):
        gate.datagram_received(b"fleetd", GROUP)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("mdns.packet_dropped") == 1


async def test_hostile_packets_leave_a_machine_that_still_finds_its_friends() -> None:
    """Mutations of real packets, and records that claim what cannot be."""
    rng = random.Random(5)
    victim, friend = DiscoveringMachine("victim"), DiscoveringMachine("friend")
    async with running(victim):
        await victim.until(lambda: victim.discovery.state == RUNNING)
        for round_number in range(800):
            data = bytearray(packet(new_id(), name="n" * rng.randrange(200), hosts=("10.0.0.9", "fd00::9")))
            for _ in range(rng.randrange(1, 12)):
                data[rng.randrange(2, len(data))] = rng.randrange(256)
            victim.gate.bucket = budget()  # what is tested here is the parser behind it
            victim.gate.datagram_received(bytes(data[: rng.randrange(len(data) + 1)] + b"fleetd"), GROUP)
            victim.gate.datagram_received(bytes(data), GROUP)
            if round_number % 50 == 0:
                await asyncio.sleep(0)
        spoofs = [
            packet(victim.node_id, hosts=("10.6.6.6",)),
            packet("x" * 56, hosts=("224.0.0.1", "255.255.255.255")),
            packet("y" * 56, port=0),
            packet("z" * 56, v="9-1"),
            packet("0" * 56),
        ]
        for data in spoofs:
            victim.discovery.table.budget = discovered.budget()
            victim.gate.datagram_received(data, GROUP)
        refused = (victim.node_id, "x" * 56, "y" * 56, "z" * 56, "0" * 56)
        assert not [node_id for node_id in refused if node_id in victim.heard]
        assert len(victim.discovery.seen) <= limits.DISCOVERED_PEERS
        async with running(friend):
            # The flood has used up what is acted on; its share comes back within a second.
            await victim.meets(friend)
            await friend.meets(victim)


@contextlib.contextmanager
def sender() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
        yield sock


class CountingListener:
    """In front of zeroconf's listener: the bytes that it gets."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.bytes = 0

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.bytes += len(data)
        self._inner.datagram_received(data, addr)


async def flood(seconds: float, records_per_s: int) -> None:
    """Spoofed announcements, four records each, to the real port of a running machine."""
    victim, member = DiscoveringMachine("victim"), DiscoveringMachine("member")
    victim.members.add(member.node_id)
    process, loop = psutil.Process(), asyncio.get_running_loop()
    packets = [packet(new_id(), hosts=(f"10.0.{n >> 8}.{n & 255}",)) for n in range(int(records_per_s / 2))]
    async with running(victim), running(member):
        await victim.meets(member)
        parser = victim.gate.inner = CountingListener(victim.gate.inner)
        before, began, sent = process.memory_info().rss, loop.time(), 0
        with sender() as sock:
            while (elapsed := loop.time() - began) < seconds:
                while sent * 4 < elapsed * records_per_s:
                    sock.sendto(packets[sent % len(packets)], GROUP)
                    sent += 1
                await asyncio.sleep(0.002)
        grown = process.memory_info().rss - before
        assert grown < 20e6, f"{grown / 1e6:.1f} MB"
        # What is looked into at all is bounded, and with it what a flood can take of the loop's time.
        most = limits.MDNS_BURST_BYTES + (loop.time() - began) * limits.MDNS_BYTES_PER_S
        assert 0 < parser.bytes <= most
        assert member.node_id in victim.discovery.seen
        assert len(victim.discovery.seen) <= limits.DISCOVERED_PEERS
        took_s = loop.time() - began
        assert len(victim.heard) <= limits.CLAIMS_AT_ONCE + (took_s + 2) * limits.CLAIMS_PER_S


@pytest.mark.one_loop
async def test_a_flood_of_spoofed_announcements_fills_no_memory_and_is_hardly_parsed() -> None:
    await flood(2.0, 8_000)


@pytest.mark.long
@pytest.mark.one_loop
async def test_a_minute_of_a_hundred_thousand_spoofed_records() -> None:
    await flood(60.0, 1_700)
