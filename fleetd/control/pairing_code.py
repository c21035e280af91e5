"""The form of a pairing code, ``42-lusab-babad``: what `fleetctl join` and the daemon both check first."""

from __future__ import annotations

import re

from fleetd.errors import PairingFailed

_SHAPE = re.compile(r"([0-9]{2})([a-z]{10})")
_SEPARATORS = re.compile(r"[\s\-_.,:]+")


def code_parts(text: str) -> tuple[str, str]:
    """The nameplate and the ten letters of a code as people type it. Raises PairingFailed."""
    found = _SHAPE.fullmatch(_SEPARATORS.sub("", text).lower())
    if found is None:
        raise PairingFailed(
            "This is not a pairing code; one looks like 42-lusab-babad.",
            hint="Type it as the other machine shows it.",
        )
    return found[1], found[2]
