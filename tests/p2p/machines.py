"""Machines with real keys and no files: number N is the same machine in every run."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetd.p2p.membership import keys


@dataclass(frozen=True)
class MachineKeys:
    """What the roster and pairing need of an keys."""

    key: Ed25519PrivateKey
    node_id: str
    certificate: bytes

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)


@functools.cache
def machine(number: int) -> MachineKeys:
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"machine %d" % number).digest())
    return MachineKeys(key, keys.node_id(key.public_key().public_bytes_raw()), keys.certificate_for(key))
