"""The node id and the certificate of a public key.

The id is a hash of the key, so it cannot be chosen. The certificate contains the key and asserts nothing.

Functions import cryptography themselves: it stays in memory, and a daemon without peers neither makes nor
checks a certificate or a signature.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from typing import TYPE_CHECKING

from fleetd import limits
from fleetd.errors import IdentityRefused

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
ID_CHARS = 56
# DER of a bit string of 64 bytes; other encodings would give one machine several valid certificates.
_WHOLE_BYTES = b"\x03\x41\x00"
# DER of the start of an Ed25519 public key, whose 32 bytes follow (RFC 8410, section 4).
_ED25519_KEY = bytes.fromhex("302a300506032b6570032100")
_KEY_BYTES = 32
_GROUP_CHARS = 13
_SHORT_CHARS = 7
# Trust ends by unpairing, not by a date, which a wrong clock could reach first. The end date is that of
# RFC 5280, section 4.1.2.5, for a certificate without one.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

# ---- Node ids --------------------------------------------------------------------------------------------


def node_id(public_key: bytes) -> str:
    """The id of the machine with this raw Ed25519 key: 52 characters of SHA-256 in base32 and 4 check
    characters, one after each 13, as Syncthing lays out its device ids (lib/protocol/deviceid.go).

    Unlike there the check character is that of Luhn mod N proper, which doubles from the right, so that two
    swapped neighbours are detected at any position.
    """
    digest = base64.b32encode(hashlib.sha256(public_key).digest()).decode("ascii").rstrip("=").lower()
    groups = [digest[i : i + _GROUP_CHARS] for i in range(0, len(digest), _GROUP_CHARS)]
    return "".join(group + _check_character(group) for group in groups)


def parse_node_id(text: str) -> str:
    """Read an id as people write it: any case, with or without dashes and spaces.

    Raises:
        IdentityRefused: too short or long, a character that no id has, or a typing error.
    """
    found = "".join(text.replace("-", "").split()).lower()
    if len(found) != ID_CHARS:
        raise IdentityRefused(f"A node id has {ID_CHARS} characters; this one has {len(found)}.")
    if wrong := next((c for c in found if c not in ALPHABET), ""):
        raise IdentityRefused(f"A node id has letters and the digits 2 to 7; this one has {wrong!r}.")
    width = _GROUP_CHARS + 1
    for number, i in enumerate(range(0, ID_CHARS, width), 1):
        group = found[i : i + width]
        if _check_character(group[:-1]) != group[-1]:
            raise IdentityRefused(
                f"There is a typing error among characters {i + 1} to {i + width} of this node id "
                f"(part {number} of 4)."
            )
    return found


def short_id(node_id: str) -> str:
    """The first characters of an id, for display."""
    return node_id[:_SHORT_CHARS]


def display_id(node_id: str) -> str:
    """The whole id in groups, for comparison by eye."""
    return "-".join(node_id[i : i + _SHORT_CHARS] for i in range(0, len(node_id), _SHORT_CHARS))


def _check_character(group: str) -> str:
    size = len(ALPHABET)
    total, factor = 0, 2
    for character in reversed(group):
        addend = factor * ALPHABET.index(character)
        total += addend // size + addend % size
        factor = 3 - factor
    return ALPHABET[-total % size]


# ---- Certificates ----------------------------------------------------------------------------------------


def certificate_for(key: Ed25519PrivateKey) -> bytes:
    """The certificate of a key, DER; the same bytes every time."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    public = key.public_key().public_bytes_raw()
    name = _name(public)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(hashlib.sha256(public).digest()[:16]) | 1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        # Or a member's key could sign certificates that TLS takes for those of other machines.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    return built.public_bytes(serialization.Encoding.DER)


def _name(public_key: bytes) -> x509.Name:
    """The id as the name: TLS looks for a certificate's anchor by its name, and tries the first alone."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id(public_key))])


def key_within(certificate: bytes) -> bytes:
    """The raw key in a certificate (DER) that this machine made itself, read without any check; b"" if there
    is none. ``public_key_of`` is for the certificates of others."""
    _, found, rest = certificate.partition(_ED25519_KEY)
    return rest[:_KEY_BYTES] if found else b""


def public_key_of(certificate: bytes) -> bytes:
    """The raw key that a certificate (DER) carries, if it is one that this module could have made.

    Raises:
        IdentityRefused: too large, malformed, not Ed25519, an authority's, signed by another key, or with
            another name than its key's id, as that of another machine.
    """
    if len(certificate) > limits.CERTIFICATE_BYTES:
        raise IdentityRefused(
            f"A certificate of {len(certificate)} bytes is over the limit of {limits.CERTIFICATE_BYTES}."
        )
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.x509.oid import SignatureAlgorithmOID

    try:
        parsed = x509.load_der_x509_certificate(certificate)
        key = parsed.public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise IdentityRefused("The certificate's key is not an Ed25519 key.")
        if parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise IdentityRefused("The certificate is an authority's, and could vouch for others.")
        if parsed.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
            raise IdentityRefused("The certificate is not signed with Ed25519.")
        if parsed.issuer != parsed.subject:
            raise IdentityRefused("The certificate was not issued by its own machine.")
        if parsed.subject != _name(key.public_bytes_raw()):
            raise IdentityRefused("The certificate has another name than the machine of its key.")
        key.verify(parsed.signature, parsed.tbs_certificate_bytes)
        if not certificate.endswith(_WHOLE_BYTES + parsed.signature):
            raise IdentityRefused("The certificate's signature is written in an unusual way.")
    except InvalidSignature:
        raise IdentityRefused("The certificate is not signed by the key that it carries.") from None
    except x509.ExtensionNotFound:
        raise IdentityRefused("The certificate does not say that it is no authority's.") from None
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise IdentityRefused(f"The certificate cannot be read: {error}.") from None
    return key.public_bytes_raw()


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """True if ``signature`` is a signature of ``data`` by this key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
