"""What strangers try at the peer port, each test named after the attack. The node is real, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from fleet_nodes import introduce, running, settings, together, until

from fleetd import limits
from fleetd.errors import IdentityRefused
from fleetd.p2p import tickets
from fleetd.p2p.membership.identity import Identity, node_id
from fleetd.p2p.node import Node
from fleetd.p2p.session import tls
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello, encode

PATIENCE_S = 60.0


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Node]:
    """A node that is paired with one other machine, which is off."""
    node, friend = Node(settings(tmp_path, "victim")), Identity.load_or_create(tmp_path / "friend")
    async with running(node):
        node.roster.admit(friend.certificate, "friend", True)
        await node.roster_changed()
        yield node


async def knock(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", node.port)


async def heard_until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that the node says before it closes, which it has to."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except (ConnectionResetError, ssl.SSLError):
        return b""


@contextlib.asynccontextmanager
async def tls_client(node: Node, context: ssl.SSLContext) -> AsyncIterator[bytes]:
    """What a TLS client gets to read from the node before it is thrown out; raises if the handshake fails."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", node.port, ssl=context, server_hostname="fleetd", ssl_handshake_timeout=PATIENCE_S
    )
    try:
        hello = Hello(PROTOCOL_VERSIONS, "a" * 56, "x", 1, "x", bytes(16), 1)
        writer.write(encode(hello))
        yield await heard_until_closed(reader)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


def anonymous(minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = minimum
    context.set_alpn_protocols([tls.ALPN])
    return context


async def refused(node: Node, context: ssl.SSLContext) -> bool:
    """Whether the node says nothing at all to this client."""
    try:
        async with tls_client(node, context) as heard:
            return heard == b""
    except (ssl.SSLError, ConnectionError):
        return True


# ---- who gets in -----------------------------------------------------------------------------------------


async def test_a_member_gets_in(victim: Node, tmp_path: Path) -> None:
    """What the others are measured against: the same client with the right key hears a hello."""
    friend = Identity.load_or_create(tmp_path / "friend")
    context = anonymous()
    context.load_cert_chain(friend.certificate_file, friend.key_file)
    async with tls_client(victim, context) as heard:
        assert victim.identity.node_id.encode() in heard


async def test_downgrade_to_tls_1_2_is_refused(victim: Node, tmp_path: Path) -> None:
    friend = Identity.load_or_create(tmp_path / "friend")
    context = anonymous(ssl.TLSVersion.TLSv1_2)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(friend.certificate_file, friend.key_file)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with tls_client(victim, context):
            pass


async def test_a_client_without_certificate_is_refused_before_any_frame(victim: Node) -> None:
    assert await refused(victim, anonymous())


async def test_an_unknown_certificate_is_refused_before_any_frame(victim: Node, tmp_path: Path) -> None:
    stranger = Identity.load_or_create(tmp_path / "stranger")
    context = anonymous()
    context.load_cert_chain(stranger.certificate_file, stranger.key_file)
    assert await refused(victim, context)


async def test_a_certificate_minted_by_a_member_for_a_friend_is_refused(victim: Node, tmp_path: Path) -> None:
    """A paired machine may vouch for others in the roster only, not by signing certificates."""
    friend = Identity.load_or_create(tmp_path / "friend")
    issuer = x509.load_der_x509_certificate(friend.certificate)
    key = Ed25519PrivateKey.generate()
    minted = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "minted")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(friend.key, None)
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "minted.pem").write_bytes(minted.public_bytes(pem) + issuer.public_bytes(pem))
    (tmp_path / "minted.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = anonymous()
    context.load_cert_chain(tmp_path / "minted.pem", tmp_path / "minted.key")
    assert await refused(victim, context)


async def test_attack_a_machine_that_bears_the_name_of_another_does_not_keep_that_one_out(
    victim: Node, tmp_path: Path
) -> None:
    """TLS looks for the anchor of a certificate by its name, and takes the first of that name."""
    friend = Identity.load_or_create(tmp_path / "friend")
    name = x509.load_der_x509_certificate(friend.certificate).subject
    key = Ed25519PrivateKey.generate()
    # The anchors are in the order of the ids.
    while node_id(key.public_key().public_bytes_raw()) > friend.node_id:
        key = Ed25519PrivateKey.generate()
    mimic = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    with contextlib.suppress(IdentityRefused):
        victim.roster.admit(mimic.public_bytes(serialization.Encoding.DER), "mimic", True)
        await victim.roster_changed()
    context = anonymous()
    context.load_cert_chain(friend.certificate_file, friend.key_file)
    async with tls_client(victim, context) as heard:
        assert victim.identity.node_id.encode() in heard


async def test_another_protocol_on_the_same_key_is_refused(victim: Node, tmp_path: Path) -> None:
    friend = Identity.load_or_create(tmp_path / "friend")
    context = anonymous()
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(friend.certificate_file, friend.key_file)
    assert await refused(victim, context)


async def test_a_member_that_calls_itself_another_is_thrown_out(victim: Node, tmp_path: Path) -> None:
    """`tls_client` says hello with an id that is not its key's."""
    friend = Identity.load_or_create(tmp_path / "friend")
    context = anonymous()
    context.load_cert_chain(friend.certificate_file, friend.key_file)
    async with tls_client(victim, context):
        assert victim.connection(friend.node_id) is None
        assert victim.connection("a" * 56) is None


async def test_a_clock_that_is_years_off_splits_no_fleet(tmp_path: Path) -> None:
    """Certificates of the identity are dated 1970 to 9999; one with any other dates would do as well."""
    context = tls.server_context(Identity.load_or_create(tmp_path / "me"), [])
    assert context.verify_flags & 0x200000


async def test_no_session_can_be_resumed_without_its_certificate(tmp_path: Path) -> None:
    assert tls.server_context(Identity.load_or_create(tmp_path / "me"), []).num_tickets == 0


# ---- what is not TLS -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 64,
        b"SSH-2.0-x\r\n",
        b"FLT2" + bytes(32),
        b"\x15\x03\x03",
        b"FLP1",
    ],
    ids=["http", "zeros", "ssh", "other magic", "not a hello", "pairing without a window"],
)
async def test_what_is_neither_tls_nor_ticket_nor_pairing_is_closed_unread(
    victim: Node, first: bytes
) -> None:
    reader, writer = await knock(victim)
    with contextlib.closing(writer):
        writer.write(first.ljust(4, b"\x00"))
        assert await heard_until_closed(reader) == b""


async def test_a_guessed_ticket_opens_nothing(victim: Node) -> None:
    with victim.bulk.expect() as expected:
        for _ in range(20):
            reader, writer = await knock(victim)
            with contextlib.closing(writer):
                writer.write(tickets.preface(os.urandom(tickets.TICKET_BYTES)))
                assert await heard_until_closed(reader) == b""
        assert not expected.taken


async def test_a_replayed_ticket_opens_nothing(victim: Node) -> None:
    with victim.bulk.expect() as expected:
        _, first = await knock(victim)
        with contextlib.closing(first):
            first.write(tickets.preface(expected.ticket))
            (await expected.socket()).close()
            reader, second = await knock(victim)
            with contextlib.closing(second):
                second.write(tickets.preface(expected.ticket))
                assert await heard_until_closed(reader) == b""


# ---- floods ----------------------------------------------------------------------------------------------


async def test_slow_loris_is_dropped(victim: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that says nothing, and one that stops in the middle of a hello."""
    monkeypatch.setattr(limits, "PEER_HANDSHAKE_S", 0.3)
    for begin in (b"", b"\x16\x03\x01", b"FL"):
        reader, writer = await knock(victim)
        with contextlib.closing(writer):
            writer.write(begin)
            assert await heard_until_closed(reader) == b""


async def test_idle_strangers_cannot_keep_a_member_out(
    victim: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sockets than there may be unknown ones, all silent; the oldest give way."""
    monkeypatch.setattr(limits, "PEER_HANDSHAKE_S", 100.0)  # none of them goes for being slow
    held = [await knock(victim) for _ in range(limits.PEER_SOCKETS_UNKNOWN + 8)]
    friend = Node(settings(tmp_path, "friend"))
    try:
        async with running(friend):
            friend.roster.admit(victim.identity.certificate, "victim", True)
            await friend.roster_changed()
            friend.reached(victim.identity.node_id, ("127.0.0.1", victim.port))
            await until(friend, lambda: friend.mesh.peers[victim.identity.node_id].usable)
    finally:
        for _, writer in held:
            writer.close()


async def test_one_address_cannot_hold_all_places(victim: Node) -> None:
    held = [await knock(victim) for _ in range(limits.PEER_SOCKETS_PER_ADDRESS + 1)]
    try:
        assert await heard_until_closed(held[0][0]) == b""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await held[1][0].read()
    finally:
        for _, writer in held:
            writer.close()


async def test_connections_that_are_reset_at_once_do_no_harm(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))

    def flood() -> None:
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", a.port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with running(a, b):
        await asyncio.to_thread(flood)
        await introduce(a, b)
        await together([a, b])
