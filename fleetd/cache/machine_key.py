"""The key under which this machine seals blocks: one small file. Deleting it deletes all blocks.

It is used for nothing else, so it can be thrown away at any time: what is left of the blocks then is noise.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from pathlib import Path

from fleetd.errors import ConfigError
from fleetd.storage import durable

KEY_BYTES = 32


class MachineKey:
    """``secret``: 32 random bytes. ``id``: equal for equal keys, and tells nothing of them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._names = self._derived(b"names", b"")
        self.id = self._derived(b"id", b"").hex()[:16]

    def __repr__(self) -> str:
        return f"MachineKey({self.id})"

    def file_name(self, name: bytes) -> str:
        """What the block of this name is called on the disk: 64 hexadecimal digits."""
        return hmac.digest(self._names, name, "sha256").hex()

    def block_key(self, salt: bytes, name: bytes) -> bytes:
        """The key of one file. ``salt`` is random and new for every file, so no key is used twice; the block
        of another name does not open with it."""
        return self._derived(b"block" + name, salt)

    def _derived(self, purpose: bytes, salt: bytes) -> bytes:
        return hkdf_sha256(self._secret, salt, b"fleetd kv 1 " + purpose)

    @classmethod
    def load_or_create(cls, path: Path) -> MachineKey:
        """The key in this file, or a new one. A damaged one is replaced: blocks can be computed again.

        Raises:
            Forbidden: the file is a link, or another user's.
            DiskFull, ConfigError: it cannot be read or written.
        """
        found = durable.read(path, KEY_BYTES)
        if found is not None and len(found) != KEY_BYTES:
            durable.replace(path, secrets.token_bytes(KEY_BYTES))
        elif found is None:
            durable.private_folder(path.parent)
            # If another process is faster, its key is used.
            durable.create(path, secrets.token_bytes(KEY_BYTES))
        if found is None or len(found) != KEY_BYTES:
            found = durable.read(path, KEY_BYTES) or b""
            if len(found) != KEY_BYTES:
                raise ConfigError(f"The key {path} was thrown away again at once.")
        return cls(found[:KEY_BYTES])


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of output, ``KEY_BYTES``.

    Not cryptography's: every daemon derives its keys at the start, and that library stays in its memory.
    """
    drawn = hmac.digest(salt or bytes(KEY_BYTES), secret, "sha256")
    return hmac.digest(drawn, info + b"\x01", "sha256")


def discard(path: Path) -> None:
    """Throw the key away; gone from the disk when this returns. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()
        durable.sync_folder(path.parent)
