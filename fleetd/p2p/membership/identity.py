"""The identity of this machine: an Ed25519 key in a file, valid for as long as the file exists.

A damaged key is an error and is never replaced by a new one: every other machine would keep the old id as a
peer that is always unreachable.

    FOLDER/key.pem    the identity; a reader of this file can pose as this machine
    FOLDER/cert.pem   follows from the key, made again when it is missing
    FOLDER/epoch      number of the last start, to tell a restarted machine from its earlier run
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetd import limits
from fleetd.errors import FleetError, IdentityRefused
from fleetd.home import durable
from fleetd.observe import get_logger
from fleetd.p2p.membership.keys import (
    certificate_for,
    display_id,
    node_id,
    parse_node_id,
    public_key_of,
    short_id,
    verify,
)

__all__ = ["Identity", "display_id", "node_id", "parse_node_id", "public_key_of", "short_id", "verify"]

log = get_logger("fleetd.p2p")


@dataclass(frozen=True, slots=True)
class Identity:
    """This machine's key, with its node id and certificate."""

    folder: Path
    key: Ed25519PrivateKey
    node_id: str
    certificate: bytes

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate_file(self) -> Path:
        return self.folder / "cert.pem"

    def __repr__(self) -> str:
        return f"Identity({short_id(self.node_id)})"

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    @classmethod
    def load_or_create(cls, folder: Path) -> Identity:
        """Load the identity in ``folder``, or create one if there is none. Blocks.

        Raises:
            IdentityRefused: the key is damaged, or gone although it was there.
            Forbidden: a file is a link or another user's.
            DiskFull, ConfigError: a file cannot be written.
        """
        durable.private_folder(folder)
        path = folder / "key.pem"
        written = durable.read(path, limits.CERTIFICATE_BYTES)
        if written is None:
            if (folder / "cert.pem").exists():
                raise IdentityRefused(
                    f"The key {path} is missing, but its certificate is there.", hint=_mend(folder)
                )
            # If another process is faster, its key is used.
            durable.create(path, _pem(Ed25519PrivateKey.generate()))
            written = durable.read(path, limits.CERTIFICATE_BYTES) or b""
        key = _parse_key(path, written)
        certificate = certificate_for(key)
        made = cls(folder, key, node_id(key.public_key().public_bytes_raw()), certificate)
        text = x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM)
        if durable.read(made.certificate_file, 2 * limits.CERTIFICATE_BYTES) != text:
            durable.replace(made.certificate_file, text)
        return made

    def next_epoch(self) -> int:
        """The number of this start, greater than that of every earlier start. Blocks.

        The file guards against a clock that is set back, the clock against a file that cannot be written;
        only both faults together could repeat a number.
        """
        path = self.folder / "epoch"
        before = 0
        try:
            before = _parse_epoch(durable.read(path, _EPOCH_CHARS))
        except FleetError as error:
            log.warning("identity.epoch", error=str(error), note="starts are counted by the clock")
        epoch = max(before, time.time_ns() // 1_000_000) + 1
        try:
            durable.replace(path, b"%d\n" % epoch)
        except FleetError as error:
            log.warning("identity.epoch", error=str(error), note="starts are counted by the clock")
        return epoch


_EPOCH_CHARS = 32
_EPOCH_MAX = (1 << 62) - 1


def _parse_epoch(written: bytes | None) -> int:
    if written is None:
        return 0
    try:
        found = int(written.decode("ascii"))
    except ValueError:
        found = -1
    if not 0 <= found < _EPOCH_MAX:
        raise IdentityRefused("The file that counts the starts of this machine is damaged.")
    return found


def _parse_key(path: Path, written: bytes) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(written, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityRefused(f"The key {path} is damaged.", hint=_mend(path.parent))
    return key


def _mend(folder: Path) -> str:
    return (
        f"Restore it from a backup; or delete {folder}, and pair this machine again as a new one "
        "after `fleetctl unpair` of the old one elsewhere."
    )


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
