"""TLS between paired machines: version 1.3, certificates on both sides, trust in the roster's members only.

The trust anchors are the members' self-signed certificates. There is no authority, no name check and no date
check: a key is trusted until its machine is unpaired. A context cannot lose an anchor, so every change of the
roster makes new contexts.
"""

from __future__ import annotations

import ssl
from collections.abc import Container, Iterable, Sequence

import msgspec

from fleetd.errors import IdentityRefused, NotPaired
from fleetd.p2p.membership.identity import Identity, node_id, public_key_of
from fleetd.p2p.membership.key_files import NO_CHECK_TIME

ALPN = "fleetd"


class TlsContexts(msgspec.Struct, frozen=True):
    """The contexts of both roles, for one state of the roster."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def make(cls, me: Identity, trusted: Sequence[bytes]) -> TlsContexts:
        """``trusted``: certificates, DER. Raises OSError if the key file cannot be read."""
        return cls(server_context(me, trusted), client_context(me, trusted))


def server_context(me: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    """``trusted``: certificates, DER."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, me, trusted)
    # Resumption would skip the certificate check that unpairing relies on.
    context.num_tickets = 0
    return context


def client_context(me: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    """``trusted``: certificates, DER."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, me, trusted)
    context.check_hostname = False  # a machine is known by its key; names are not verified
    return context


def _context(protocol: int, me: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags(NO_CHECK_TIME)
    context.set_alpn_protocols([ALPN])
    context.load_cert_chain(me.certificate_file, me.key_file)
    if anchors := b"".join(trusted):
        context.load_verify_locations(cadata=anchors)
    return context


def pinned(connection: ssl.SSLObject | ssl.SSLSocket, members: Container[str]) -> str:
    """The node id of the other side of a finished handshake.

    The chain check has already refused unknown certificates. This compares the key itself, so that neither
    the text of a certificate nor one that a member signed for another machine can replace it.

    Raises:
        NotPaired: no certificate, another protocol, or not the key of a member.
    """
    if connection.selected_alpn_protocol() != ALPN:
        raise NotPaired("The other side does not speak fleetd's protocol.")
    certificate = connection.getpeercert(binary_form=True)
    if not certificate:
        raise NotPaired("The other side showed no certificate.")
    try:
        found = node_id(public_key_of(certificate))
    except IdentityRefused as error:
        raise NotPaired(f"The other side's certificate is refused: {error.message}") from error
    if found not in members:
        raise NotPaired(f"The machine {found[:7]} is not paired with this one.")
    return found
