"""Which machine has the beginning of a prompt in its prefix cache, and where a session ran last.

Pure. A conversation sends all earlier turns again with each new one. On the machine that computed them, only
the new turn costs time. The tables keep hashes under keys of this process, no text and no client's id;
nothing of them is told to another machine. A machine is named by its node and the start of its daemon: a new
start has lost the cache.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from itertools import takewhile

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


class _Texts:
    """The texts that one machine computed with one model, as a prefix cache keeps them: each of them whole,
    so what two have in common takes its room twice; the least recently used one goes first."""

    def __init__(self) -> None:
        self.blocks = 0
        # By their last block, least recently used first.
        self._texts: OrderedDict[bytes, list[bytes]] = OrderedDict()
        # How many texts have a block; all that have it begin alike.
        self._having: Counter[bytes] = Counter()

    def __contains__(self, link: bytes) -> bool:
        return link in self._having

    def add(self, links: list[bytes]) -> None:
        if links[-1] in self._having:
            at = len(links) - 1
            last = next(last for last, text in self._texts.items() if text[at : at + 1] == links[-1:])
            self._texts.move_to_end(last)
            return
        for link in links[:-1]:
            if link in self._texts:
                self._drop(link)  # this text goes on from there
        self._texts[links[-1]] = links
        self._having.update(links)
        self.blocks += len(links)

    def drop_oldest(self) -> None:
        self._drop(next(iter(self._texts)))

    def _drop(self, last: bytes) -> None:
        links = self._texts.pop(last)
        self.blocks -= len(links)
        for link in links:
            self._having[link] -= 1
            if not self._having[link]:
                del self._having[link]


class Affinity:
    """Prompts that machines computed lately. An estimate: a machine may have evicted them from its cache."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # By machine and model, least recently used first.
        self._seen: OrderedDict[tuple[str, str], _Texts] = OrderedDict()

    def links(self, text: str) -> list[bytes]:
        """The hashes of a text, for ``computed`` and ``cached_chars``."""
        return chain(text, self._key)

    def computed(self, machine: str, model: str, links: list[bytes], room_chars: int = 0) -> None:
        """A machine has computed a text.

        Args:
            room_chars: about how many characters of texts its prefix cache has room for; 0 if unknown.
        """
        room = room_chars // BLOCK_CHARS if room_chars else limits.AFFINITY_BLOCKS
        if not 0 < len(links) <= room:
            return  # a cache does not keep what is larger than itself
        seen = self._seen.setdefault((machine, model), _Texts())
        self._seen.move_to_end((machine, model))
        seen.add(links)
        while seen.blocks > room:
            seen.drop_oldest()
        while sum(each.blocks for each in self._seen.values()) > limits.AFFINITY_BLOCKS:
            oldest, theirs = next(iter(self._seen.items()))
            theirs.drop_oldest()
            if not theirs.blocks:
                del self._seen[oldest]

    def forget(self, machine: str, model: str) -> None:
        """The machine has lost what it computed with this model."""
        self._seen.pop((machine, model), None)

    def cached_chars(self, machine: str, model: str, links: list[bytes]) -> int:
        """Characters at the beginning of the text that the machine has computed before."""
        seen = self._seen.get((machine, model), ())
        return sum(BLOCK_CHARS for _ in takewhile(lambda link: link in seen, links))


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
