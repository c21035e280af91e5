"""The files of this machine's key and certificate, in its identity's folder. Everything here blocks."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fleetd import limits
from fleetd.errors import IdentityRefused
from fleetd.p2p.membership.keys import certificate_for, key_within
from fleetd.storage import durable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_NAME = "key.pem"
CERTIFICATE_NAME = "cert.pem"
# X509_V_FLAG_NO_CHECK_TIME; the ssl module has no name for it. A wrong clock must not split a fleet.
NO_CHECK_TIME = 0x200000
# X509_V_FLAG_CHECK_SS_SIGNATURE: check a trusted certificate's own signature, too.
_CHECK_OWN_SIGNATURE = 0x4000


class KeyPair(NamedTuple):
    """``key_pem``: the content of the key's file. ``certificate``: DER."""

    key_pem: bytes
    certificate: bytes


def load(folder: Path) -> KeyPair | None:
    """The key and the certificate if both files are there, whole and of one key; else None.

    The ssl module finds that out, without cryptography: TLS between both files and the certificate succeeds.

    Raises:
        Forbidden: a file is a link or another user's.
        ConfigError: a file cannot be read.
    """
    key_pem = durable.read(folder / KEY_NAME, limits.CERTIFICATE_BYTES)
    text = durable.read(folder / CERTIFICATE_NAME, 2 * limits.CERTIFICATE_BYTES)
    if key_pem is None or text is None:
        return None
    try:
        certificate = ssl.PEM_cert_to_DER_cert(text.decode("ascii"))
        if _pem(certificate) != text or not key_within(certificate):
            return None
        _try_tls(folder, certificate)
    except (ValueError, OSError):  # ssl.SSLError is an OSError
        return None
    return KeyPair(key_pem, certificate)


def load_or_create(folder: Path) -> KeyPair:
    """The key and its certificate; makes what is missing, on the disk when this returns.

    Raises:
        IdentityRefused: the key is damaged, or gone although it was there.
        Forbidden: a file is a link or another user's.
        DiskFull, ConfigError: a file cannot be written.
    """
    durable.private_folder(folder)
    path, certificate_file = folder / KEY_NAME, folder / CERTIFICATE_NAME
    written = durable.read(path, limits.CERTIFICATE_BYTES)
    if written is None:
        if certificate_file.exists():
            raise IdentityRefused(
                f"The key {path} is missing, but its certificate is there.", hint=_mend(folder)
            )
        # If another process is faster, its key is used.
        durable.create(path, _new_key())
        written = durable.read(path, limits.CERTIFICATE_BYTES) or b""
    certificate = certificate_for(parse_key(path, written))
    text = _pem(certificate)
    if durable.read(certificate_file, 2 * limits.CERTIFICATE_BYTES) != text:
        durable.replace(certificate_file, text)
    return KeyPair(written, certificate)


def parse_key(path: Path, written: bytes) -> Ed25519PrivateKey:
    """The key that the file ``path`` holds as ``written``. Raises IdentityRefused for a damaged one."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(written, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityRefused(f"The key {path} is damaged.", hint=_mend(path.parent))
    return key


def _try_tls(folder: Path, certificate: bytes) -> None:
    """Shake hands between a server with both files and a client that trusts this certificate alone.

    Raises OSError or ValueError if the key does not fit the certificate, or the certificate's signature is
    not by its own key.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A password, or OpenSSL asks the terminal for that of an encrypted key.
    server.load_cert_chain(folder / CERTIFICATE_NAME, folder / KEY_NAME, password="")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags(NO_CHECK_TIME | _CHECK_OWN_SIGNATURE)
    client.load_verify_locations(cadata=certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (asks, answers):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    asks.do_handshake()
    if asks.getpeercert(binary_form=True) != certificate:
        raise ValueError("the file holds more than the certificate")


def _new_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem(certificate: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(certificate).encode("ascii")


def _mend(folder: Path) -> str:
    return (
        f"Restore it from a backup; or delete {folder}, and pair this machine again as a new one "
        "after `fleetctl unpair` of the old one elsewhere."
    )
