"""Beginnings of texts, and the blocks that they fill: how a prompt is found before it is tokenized. Pure.

A link is a hash over a text from its start to a certain character (``plan.affinity.chain``). The text between
two links fills about so many blocks; a link stands for the last block that is filled whole when it ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fleetd.cache import block_names


def kept_as(digest: str, link: bytes) -> bytes:
    """Under which name a link lies on this machine: another model cuts the same text into other tokens."""
    return hashlib.sha256(b"text " + len(digest).to_bytes(4, "big") + digest.encode() + link).digest()


def filled_blocks(
    digest: str, links: Sequence[bytes], names: Sequence[bytes], filled: float
) -> list[tuple[bytes, bytes]]:
    """Pairs for the links that fill a block: the link's stored name, and that of the last block it fills.

    Args:
        names: of the blocks of the whole text.
        filled: how many blocks the text between two links fills.
    """
    found = []
    for number, link in enumerate(links, start=1):
        blocks = min(len(names), int(number * filled))
        if blocks:
            found.append((kept_as(digest, link), block_names.kept_as(names[blocks - 1], local_only=False)))
    return found
