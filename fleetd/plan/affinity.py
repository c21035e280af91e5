"""Which machine has the beginning of a prompt in its prefix cache, and where a session ran last.

Pure. A conversation sends all earlier turns again with each new one. On the machine that computed them, only
the new turn costs time. The tables keep hashes under keys of this process, no text and no client's id;
nothing of them is told to another machine. A machine is named by its node and the start of its daemon: a new
start has lost the cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from fleetd import limits

# Short enough that little of a match is lost at its end, long enough that a long prompt makes few blocks.
BLOCK_CHARS = 512


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

    def computed(self, machine: str, model: str, links: list[bytes]) -> None:
        for link in links:
            self._seen[machine, model, link] = None
            self._seen.move_to_end((machine, model, link))
        while len(self._seen) > limits.AFFINITY_BLOCKS:
            self._seen.popitem(last=False)

    def forget(self, machine: str, model: str) -> None:
        """The machine has lost what it computed with this model."""
        for entry in [entry for entry in self._seen if entry[:2] == (machine, model)]:
            del self._seen[entry]

    def cached_chars(self, machine: str, model: str, links: list[bytes]) -> int:
        """Characters at the beginning of the text that the machine has computed before."""
        for count, link in enumerate(links):
            if (machine, model, link) not in self._seen:
                return count * BLOCK_CHARS
        return len(links) * BLOCK_CHARS


class SessionPlaces:
    """The machine on which each session's last request ran, by model. Sessions are named by their clients."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._places: OrderedDict[bytes, str] = OrderedDict()

    def ran(self, session: str, model: str, machine: str) -> None:
        if not session:
            return
        named = self._named(session, model)
        self._places[named] = machine
        self._places.move_to_end(named)
        if len(self._places) > limits.SESSIONS:
            self._places.popitem(last=False)

    def last(self, session: str, model: str) -> str:
        """The machine; "" for a session that is not known."""
        return self._places.get(self._named(session, model), "") if session else ""

    def _named(self, session: str, model: str) -> bytes:
        data = f"{len(model)} {model} {session}".encode(errors="surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=16).digest()
