"""Calls of a node that come to nothing in unusual ways: none may end the node, or keep its place for ever."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from fleet_nodes import WITHIN_S, introduce, running, settings, until

from fleetd import limits
from fleetd.errors import PeerLost, PeerUnreachable
from fleetd.p2p.actions import Dial
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.node import Node
from fleetd.p2p.session import tls, transport
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello
from fleetd.p2p.session.transport import PeerConnection

# The first interface of this machine.
INDEX, NAME = socket.if_nameindex()[0]


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "."])
async def test_a_host_name_that_no_resolver_takes_is_an_unreachable_machine(host: str) -> None:
    with pytest.raises(PeerUnreachable, match="not a name"):
        await transport.open_socket((host, 8115))


@pytest.mark.parametrize("swallowed", [False, True])
async def test_a_name_with_several_addresses_is_called_at_each(
    swallowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``localhost`` is [::1] first on many systems, and a daemon may listen on 127.0.0.1 alone."""
    loop = asyncio.get_running_loop()
    connect = type(loop).sock_connect

    async def swallowing(self: Any, sock: socket.socket, target: Any) -> None:
        await (asyncio.Event().wait() if swallowed and target[1] == 1 else connect(self, sock, target))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = listener.getsockname()

        async def lookup(self: Any, host: str, port: int, **_: Any) -> list[Any]:
            # uvloop looks addresses up as well.
            places = [("127.0.0.1", 1), there] if host == "studio.local" else [(host, port)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

        monkeypatch.setattr(limits, "PEER_CONNECT_S", 2.0 if swallowed else limits.PEER_CONNECT_S)
        monkeypatch.setattr(type(loop), "getaddrinfo", lookup)
        monkeypatch.setattr(type(loop), "sock_connect", swallowing)
        with await transport.open_socket(("studio.local", there[1])) as sock:
            assert sock.getpeername() == there


@pytest.mark.parametrize(
    ("peername", "host"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("2001:db8::1", 5, 0, 0), "2001:db8::1"),
        (("fe80::1", 5, 0, INDEX), f"fe80::1%{NAME}"),
        ((f"fe80::1%{NAME}", 5, 0, INDEX), f"fe80::1%{NAME}"),
        (("fe80::1", 5, 0, 1 << 30), "fe80::1"),
        (None, ""),
    ],
)
async def test_where_a_machine_called_from_can_be_dialled(
    peername: tuple[Any, ...] | None, host: str
) -> None:
    """A link-local address, the only kind on a bare cable, needs its interface, which sockets name apart."""

    class NamedTransport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"peername": peername}.get(name, default)

    hello = Hello(PROTOCOL_VERSIONS, "a" * 56, "x", 1, "x", bytes(16), 1)
    connection = PeerConnection(None, hello, set())  # type: ignore[arg-type]  # nobody is told anything
    connection._transport = NamedTransport()
    assert connection.peer_host == host


async def test_a_call_that_is_given_up_before_it_began_can_be_made_again(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        await introduce(a, b)
        a.reached(b.identity.node_id, ("127.0.0.1", 1))
        peer = a.mesh.peers[b.identity.node_id]
        begun = set(a.dialer.under_way.values())
        assert peer.dialling
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)
        await asyncio.sleep(0)
        assert begun.isdisjoint(a.dialer.under_way.values())
        assert len(peer.dialling) == len(a.dialer.under_way)


class _Untold:
    """An owner that is told nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *told: None


async def test_a_call_that_is_given_up_as_its_handshake_ends_leaves_its_number_to_others(
    tmp_path: Path,
) -> None:
    """As the second one of two to one machine."""
    await _gives_up_as_the_handshake_ends("connect", tmp_path)


async def test_a_call_that_is_crowded_out_as_its_handshake_ends_leaves_its_number_to_others(
    tmp_path: Path,
) -> None:
    await _gives_up_as_the_handshake_ends("accept", tmp_path)


async def _gives_up_as_the_handshake_ends(cancelled: str, tmp_path: Path) -> None:
    """asyncio kept the number of the closed socket, and the next one that had it waited without end."""
    here, there = (Identity.load_or_create(tmp_path / name) for name in ("here", "there"))
    loop = asyncio.get_running_loop()

    def connection(me: Identity, other: Identity, dialled: Dial | None) -> PeerConnection:
        hello = Hello(PROTOCOL_VERSIONS, me.node_id, "x", 1, "x", bytes(16), 1)
        return PeerConnection(_Untold(), hello, {other.node_id}, dialled=dialled)

    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = listener.getsockname()
        calling = connection(here, there, Dial(address, there.node_id))
        called = connection(there, here, None)

        async def accepted() -> None:
            sock, _ = await loop.sock_accept(listener)
            with sock:  # as the peer port closes it
                await transport.accept(called, sock, tls.server_context(there, [here.certificate]))

        client = tls.client_context(here, [there.certificate])
        tasks = {
            "connect": asyncio.create_task(transport.connect(calling, address, client)),
            "accept": asyncio.create_task(accepted()),
        }
        connections = {"connect": calling, "accept": called}
        given_up, task, numbers = connections.pop(cancelled), tasks[cancelled], list[int]()
        made = given_up.connection_made

        def connection_made(shaken: asyncio.BaseTransport) -> None:
            made(shaken)
            numbers.append(shaken.get_extra_info("socket").fileno())
            task.cancel()

        given_up.connection_made = connection_made  # type: ignore[method-assign]
        await asyncio.wait([task])
        assert task.cancelled()
    (number,) = numbers
    async with asyncio.timeout(WITHIN_S):
        while _is_open(number):  # noqa: ASYNC110  (nothing tells that a descriptor is closed)
            await asyncio.sleep(0)
        with near, far, socket.socket(fileno=os.dup2(near.fileno(), number)) as reused:
            reused.setblocking(False)
            reading = asyncio.create_task(loop.sock_recv(reused, 1))
            await asyncio.sleep(0)
            far.send(b"x")
            assert await reading == b"x"
        for other in connections.values():
            other.give_up()
        await asyncio.wait(tasks.values())
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("static", [True, False])
async def test_a_machine_whose_session_is_lost_as_it_opens_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    """Both in one turn of the loop, as when it was busy: the call's task has not made its last step."""
    b = Node(settings(tmp_path, "b"))
    await b.open()
    address = ("127.0.0.1", b.port)
    a = Node(settings(tmp_path, "a", static=(address,) if static else ()))
    opened, sessions = a.opened, list[PeerConnection]()

    def opening(connection: PeerConnection) -> None:
        opened(connection)
        sessions.append(connection)
        if len(sessions) == 1:
            connection.abort(PeerLost("It broke."))

    monkeypatch.setattr(a, "opened", opening)
    async with running(a, b):
        a.port = 0  # not told to the other one, which would call
        for node, other in ((b, a), (a, b)):
            node.roster.admit(other.identity.certificate, other.name, True)
            await node.roster_changed()
        if not static:
            # As if the loop had stood still for so long in that turn.
            monkeypatch.setattr(limits, "DIAL_AGAIN_S", 0.0)
            a.reached(b.node_id, address)
        await until(a, lambda: len(sessions) == 2)
        assert sessions[1].initiator
        a.validate()
