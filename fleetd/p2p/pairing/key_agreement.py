"""The key that two machines with the same code compute, and no machine between them can.

SPAKE2 gives both sides one key if they used the same code; a wrong guess reveals nothing about the right one.
The key is then bound to every earlier frame, the certificates first of all: a machine that changes one of
them gets another key. From it follow a proof for each direction that the sender has the key, the keys that
seal the rest of the exchange, and the phrase that people compare.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Literal

from fleetd.errors import PairingFailed
from fleetd.p2p.pairing import proquint

Role = Literal["joiner", "inviter"]
SPAKE_BYTES = 33
MAC_BYTES = 32
TAG_BYTES = 16
_DOMAIN = b"fleetd pairing 1 "
_NONCE_BYTES = 12


def transcript(frames: Iterable[bytes]) -> bytes:
    """A hash of frames and their order."""
    found = hashlib.sha256(_DOMAIN)
    for frame in frames:
        found.update(len(frame).to_bytes(4))
        found.update(frame)
    return found.digest()


class Pake:
    """One side's run of SPAKE2; the joiner is A."""

    def __init__(
        self,
        role: Role,
        secret: bytes,
        joiner_certificate: bytes,
        inviter_certificate: bytes,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        # Imported by the first pairing: its tables of numbers take memory and time.
        from spake2 import SPAKE2_A, SPAKE2_B

        side = SPAKE2_A if role == "joiner" else SPAKE2_B
        self._run = side(
            _DOMAIN + secret,
            idA=hashlib.sha256(joiner_certificate).digest(),
            idB=hashlib.sha256(inviter_certificate).digest(),
            entropy_f=random_bytes,
        )
        self.message: bytes = self._run.start()

    def finish(self, theirs: bytes) -> bytes:
        """The key. Raises PairingFailed for a message that no honest side sends."""
        from spake2 import SPAKEError
        from spake2.ed25519_basic import NotOnCurve

        try:
            found: bytes = self._run.finish(theirs)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            raise PairingFailed(
                f"The other side's part of the key is none: {error or type(error).__name__}."
            ) from None
        return found


class Keys:
    """The values that follow from the key and the transcript, for the side ``role``."""

    def __init__(self, role: Role, key: bytes, transcript: bytes) -> None:
        # Imported by the first pairing, as spake2: a daemon without peers needs neither.
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        def derive(purpose: bytes, size: int) -> bytes:
            return HKDF(hashes.SHA256(), size, salt=transcript, info=_DOMAIN + purpose).derive(key)

        other = "inviter" if role == "joiner" else "joiner"
        self._proven = {side: _DOMAIN + side.encode("ascii") + b" " + transcript for side in (role, other)}
        self._role, self._other = role, other
        self.confirmation = self._confirm(derive(b"confirm " + role.encode("ascii"), 32), transcript)
        self._expected = self._confirm(derive(b"confirm " + other.encode("ascii"), 32), transcript)
        self._seal = AESGCM(derive(b"seal " + role.encode("ascii"), 32))
        self._open = AESGCM(derive(b"seal " + other.encode("ascii"), 32))
        self._sealed = self._opened = 0
        #: Four bytes as two words, the same on both screens.
        self.phrase = proquint.encode(derive(b"phrase", 4))

    def confirms(self, mac: bytes) -> bool:
        """True if the other side has the same key."""
        return hmac.compare_digest(mac, self._expected)

    @property
    def to_sign(self) -> bytes:
        """The bytes that this side signs, to prove that it has the private key of its certificate."""
        return self._proven[self._role]

    @property
    def to_verify(self) -> bytes:
        return self._proven[self._other]

    def seal(self, body: bytes) -> bytes:
        nonce = self._sealed.to_bytes(_NONCE_BYTES)
        self._sealed += 1
        return self._seal.encrypt(nonce, body, None)

    def open(self, sealed: bytes) -> bytes:
        """Raises PairingFailed for a body that was changed, repeated or reordered."""
        from cryptography.exceptions import InvalidTag

        nonce = self._opened.to_bytes(_NONCE_BYTES)
        self._opened += 1
        try:
            return self._open.decrypt(nonce, sealed, None)
        except InvalidTag:
            raise PairingFailed("A message of the pairing was changed on the way.") from None

    @staticmethod
    def _confirm(key: bytes, transcript: bytes) -> bytes:
        return hmac.digest(key, transcript, "sha256")
