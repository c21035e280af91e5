"""The code that people carry from one machine to the other, and the window during which it is valid.

``42-lusab-babad``: a nameplate, which the inviting machine announces so that it can be found, and 32 secret
bits. So few bits suffice because the network traffic does not allow a search: each guess needs an answer from
the window, and the window gives three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fleetd import limits
from fleetd.control.pairing_code import code_parts
from fleetd.errors import PairingClosed, PairingFailed
from fleetd.p2p.pairing import proquint

SECRET_BYTES = 4
_NAMEPLATES = 100

WindowState = Literal["open", "used", "exhausted", "expired", "closed"]


@dataclass(frozen=True, slots=True)
class PairingCode:
    """``nameplate`` is public, ``secret`` is not."""

    nameplate: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, random_bytes: Callable[[int], bytes]) -> PairingCode:
        return cls(f"{int.from_bytes(random_bytes(4)) % _NAMEPLATES:02}", random_bytes(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> PairingCode:
        """Read a code as people type it. Raises PairingFailed."""
        nameplate, letters = code_parts(text)
        try:
            return cls(nameplate, proquint.decode(letters))
        except ValueError as error:
            raise PairingFailed(
                f"No pairing code has the word {str(error)!r} in it.",
                hint="Type it as the other machine shows it; consonants and vowels take turns.",
            ) from None

    def __str__(self) -> str:
        return f"{self.nameplate}-{proquint.encode(self.secret)}"


class PairingWindow:
    """The bounds on trying a code, in number and in time, over all connections together."""

    def __init__(self, code: PairingCode, now: float) -> None:
        self.code = code
        self.tries_left = limits.PAIRING_TRIES
        self.expires = now + limits.PAIRING_WINDOW_S
        self._used = False
        self._closed = False

    def state(self, now: float) -> WindowState:
        """``exhausted``: no try is left, but the last one may still be in progress."""
        if self._used:
            return "used"
        if self._closed:
            return "closed"
        if now >= self.expires:
            return "expired"
        return "open" if self.tries_left else "exhausted"

    def take_try(self, now: float) -> None:
        """Count a try before its guess is answered. Raises PairingClosed."""
        if self.state(now) != "open":
            raise self._refusal(now)
        self.tries_left -= 1

    def use(self, now: float) -> None:
        """The code was right; use it up. Raises PairingClosed if the window is no longer open."""
        if self.state(now) not in ("open", "exhausted"):
            raise self._refusal(now)
        self._used = True

    def close(self) -> None:
        self._closed = True

    def _refusal(self, now: float) -> PairingClosed:
        reason = {
            "used": "This pairing code has been used; each is good for one machine.",
            "closed": "The pairing window was closed.",
            "expired": f"The pairing code expired after {limits.PAIRING_WINDOW_S / 60:.0f} minutes.",
            "exhausted": f"The pairing code was tried {limits.PAIRING_TRIES} times.",
        }
        return PairingClosed(reason[self.state(now)], hint="Get a new code with `fleetctl pair`.")
