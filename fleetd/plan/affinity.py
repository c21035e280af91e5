"""Which machine has the beginning of a prompt in its prefix cache.

Pure. A conversation sends all earlier turns again with each new one. On the machine that computed them, only
the new turn costs time. The table keeps a chain of hashes of each prompt's blocks, no text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

# Short enough that little of a match is lost at its end, long enough that a long prompt makes few blocks.
BLOCK_CHARS = 512
# Blocks remembered, over all machines and models.
REMEMBERED_BLOCKS = 65_536


def chain(text: str, key: bytes) -> list[bytes]:
    """One hash for each growing beginning of a text; equal up to two texts' first difference.

    Args:
        key: random per process, so that hashes say nothing outside it.
    """
    found: list[bytes] = []
    link = key
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS].encode(errors="surrogatepass")
        link = hashlib.blake2b(block, key=link, digest_size=16).digest()
        found.append(link)
    return found


class Affinity:
    """Prompts that machines computed lately. An estimate: a machine may have evicted them from its cache."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()

    def links(self, text: str) -> list[bytes]:
        """The hashes of a text, for ``computed`` and ``cached_chars``."""
        return chain(text, self._key)

    def computed(self, node_id: str, model: str, links: list[bytes]) -> None:
        for link in links:
            self._seen[node_id, model, link] = None
            self._seen.move_to_end((node_id, model, link))
        while len(self._seen) > REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)

    def cached_chars(self, node_id: str, model: str, links: list[bytes]) -> int:
        """Characters at the beginning of the text that the machine has computed before."""
        for count, link in enumerate(links):
            if (node_id, model, link) not in self._seen:
                return count * BLOCK_CHARS
        return len(links) * BLOCK_CHARS
