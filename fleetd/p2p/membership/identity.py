"""The identity of this machine: an Ed25519 key in a file, valid for as long as the file exists.

A damaged key is an error and is never replaced by a new one: every other machine would keep the old id as a
peer that is always unreachable.

    FOLDER/key.pem    the identity; a reader of this file can pose as this machine
    FOLDER/cert.pem   follows from the key, made again when it is missing
    FOLDER/epoch      number of the last start, to tell a restarted machine from its earlier run

A daemon without peers needs its id and both files for TLS, and signs nothing. So the id comes from the
certificate, and the first signature imports cryptography, which stays in memory.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fleetd.errors import FleetError, IdentityRefused
from fleetd.p2p.membership import key_files
from fleetd.p2p.membership.keys import (
    display_id,
    key_within,
    node_id,
    parse_node_id,
    public_key_of,
    short_id,
    verify,
)
from fleetd.process.observe import get_logger
from fleetd.storage import durable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Identity", "display_id", "node_id", "parse_node_id", "public_key_of", "short_id", "verify"]

log = get_logger("fleetd.p2p")


class Identity:
    """This machine's key, with its node id and certificate (DER)."""

    def __init__(self, folder: Path, pair: key_files.KeyPair) -> None:
        self.folder = folder
        self.certificate = pair.certificate
        self.node_id = node_id(key_within(pair.certificate))
        self._key_pem = pair.key_pem

    @property
    def key_file(self) -> Path:
        return self.folder / key_files.KEY_NAME

    @property
    def certificate_file(self) -> Path:
        return self.folder / key_files.CERTIFICATE_NAME

    @cached_property
    def key(self) -> Ed25519PrivateKey:
        return key_files.parse_key(self.key_file, self._key_pem)

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
        return cls(folder, key_files.load(folder) or key_files.load_or_create(folder))

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
