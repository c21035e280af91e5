"""Which machine has read the beginning of a prompt before, and so need not read it again.

Pure. A conversation sends everything again with each turn; sent to the machine that has it in its prefix
cache, only the new part costs. What is kept here is a chain of hashes of the prompt's blocks, no text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

# Short enough that little of a hit is lost at its end, long enough that a long prompt makes few.
BLOCK_CHARS = 512
# Conversations remembered, over all machines and models.
REMEMBERED_BLOCKS = 65_536


def chain(text: str, key: bytes) -> list[bytes]:
    """Hashes of growing beginnings of a text; equal up to where two texts differ. ``key``: this process's."""
    found: list[bytes] = []
    link = key
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS].encode(errors="surrogatepass")
        link = hashlib.blake2b(block, key=link, digest_size=16).digest()
        found.append(link)
    return found


class Affinity:
    """Who computed what lately. A machine's own cache may have let go of it: this is a guess for prices."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()

    def computed(self, node_id: str, model: str, links: list[bytes]) -> None:
        for link in links:
            self._seen[node_id, model, link] = None
            self._seen.move_to_end((node_id, model, link))
        while len(self._seen) > REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)

    def cached_chars(self, node_id: str, model: str, links: list[bytes]) -> int:
        """How much of the beginning that machine has computed before."""
        for count, link in enumerate(links):
            if (node_id, model, link) not in self._seen:
                return count * BLOCK_CHARS
        return len(links) * BLOCK_CHARS
