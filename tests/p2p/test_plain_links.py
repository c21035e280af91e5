"""Links that both owners have declared private carry what ranks send as it is; all others seal it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from test_tunnel import KEY, SECRET, TunnelEnds, read

from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.plain_links import PlainLinks
from fleetd.p2p.tunnel import LocalPort, Mouth, Tunnel
from fleetd.requests.ranks.ring_links import RingLinks
from fleetd.sealed.chunks import Role


def interface(name: str, *addresses: str, networks: tuple[str, ...]) -> Interface:
    return Interface(name, "thunderbolt", addresses, networks, 1500, True, True)


LO = interface("lo", "127.0.0.1", "::1", networks=("127.0.0.0/8", "::1/128"))
BRIDGE = interface("bridge0", "169.254.3.1", networks=("169.254.0.0/16",))
EN0 = interface("en0", "192.168.1.2", networks=("192.168.1.0/24",))


@contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as near, listener.accept()[0]:
            yield near


@pytest.mark.parametrize(
    ("declared", "covered"),
    [
        ((), False),
        (("lo",), True),
        (("127.0.0.0/8",), True),
        (("127.0.0.5/8",), True),
        (("en0", "lo"), True),
        (("bridge0",), False),
        (("10.0.0.0/8", "::1/128"), False),
        (("gone0",), False),
    ],
)
def test_a_connection_is_private_if_both_of_its_ends_are_on_a_declared_link(
    declared: tuple[str, ...], covered: bool
) -> None:
    links = PlainLinks(declared, lambda: [LO, BRIDGE, EN0])
    with connection() as sock:
        assert links.covers(sock) is covered


def test_addresses_of_the_sixth_version_count_too() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    with connection("::1") as sock:
        assert PlainLinks(("lo",), lambda: [LO]).covers(sock)
        assert not PlainLinks(("127.0.0.0/8",), lambda: [LO]).covers(sock)


def test_an_interface_is_no_way_to_machines_behind_a_router() -> None:
    far = interface("lo", "127.0.0.1", networks=("127.0.0.1/32",))
    with socket.create_server(("127.0.0.2", 0)) as listener:
        with socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as sock:
            assert not PlainLinks(("lo",), lambda: [far]).covers(sock)
            assert PlainLinks(("lo",), lambda: [LO]).covers(sock)


def test_what_is_no_connection_between_addresses_is_sealed() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert not PlainLinks(("lo", "0.0.0.0/1"), lambda: [LO]).covers(near)


def test_people_are_told_where_a_declared_link_leads_and_which_is_not_there() -> None:
    links = PlainLinks(("bridge0", "gone0", "10.0.0.0/8"), lambda: [BRIDGE, EN0])
    assert [links.leads_to(host) for host in ("169.254.9.9", "10.1.2.3", "192.168.1.3", "studio.local")] == [
        True,
        True,
        False,
        False,
    ]
    assert links.missing == ["gone0"]


@pytest.mark.parametrize(
    ("private", "plain"), [((True, True), True), ((True, False), False), ((False, True), False)]
)
def test_bytes_go_as_they_are_only_if_both_ends_say_that_the_link_is_private(
    private: tuple[bool, bool], plain: bool
) -> None:
    with ExitStack() as stack:
        ends = TunnelEnds(stack, private)
        stack.callback(ends.close)
        here, there = ends.connected()
        for source, target in ((here, there), (there, here)):
            source.sendall(SECRET)
            assert read(target, len(SECRET)) == SECRET
        assert (SECRET in bytes(ends.wire.seen)) is plain
        assert [tunnel.plain for tunnel in ends.tunnels] == [plain, plain]


@pytest.mark.parametrize("first", [0, 1])
def test_when_one_process_goes_the_other_one_hears_of_it_over_a_plain_link_too(first: int) -> None:
    with ExitStack() as stack:
        ends = TunnelEnds(stack, (True, True))
        stack.callback(ends.close)
        pair = ends.connected()
        # One that goes before it is looked at is nobody's.
        pair[first].sendall(b"1")
        assert pair[1 - first].recv(1) == b"1"
        pair[first].close()
        assert pair[1 - first].recv(1) == b""


@pytest.mark.parametrize(("role", "local"), [("connector", Mouth), ("acceptor", LocalPort)])
def test_an_end_that_says_nothing_of_the_link_ends_the_tunnel(
    role: Role, local: type[Mouth] | type[LocalPort]
) -> None:
    near, far = socket.socketpair()
    tunnel = Tunnel(near, KEY, role, local(), offer=1)
    far.close()
    tunnel.join(60)
    assert not any(thread.is_alive() for thread in tunnel._threads)
    assert tunnel.plain is None


class SaidTunnel:
    """A tunnel whose ends have said this of their link."""

    def __init__(self, plain: bool | None) -> None:
        self.plain = plain

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((), ""),
        ((None, True), ""),
        ((True, True), "plain"),
        ((False, False), "sealed"),
        ((True, False), "partly plain"),
    ],
)
def test_a_ring_says_how_its_bytes_travel(told: tuple[bool | None, ...], said: str) -> None:
    links = RingLinks(0, 2)
    try:
        links._tunnels[:] = [SaidTunnel(each) for each in told]  # type: ignore[misc]
        assert links.carried == said
    finally:
        links.close()
