"""The prefix cache: KV of earlier prompts and answers, in RAM, found by the tokens they were computed from.

mlx-lm's trie does the searching. What is added here is what keeps two requests apart: an entry is stored
under a namespace that names how its numbers came about (a dense plan today; a sparse or foreign plan never
shares it), every fetch copies, and one prompt token is always left to compute, because its logits are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

DENSE = "dense"


@dataclass(slots=True)
class Hit:
    """A private copy of the KV of ``tokens`` leading prompt tokens; ``cache`` is None where tokens is 0."""

    tokens: int
    cache: list[Any] | None


@dataclass(slots=True)
class PrefixCache:
    """Bounded by bytes and by entries; least recently stored goes first."""

    max_bytes: int
    max_entries: int = 64
    queries: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)
    _lru: LRUPromptCache = field(init=False)

    def __post_init__(self) -> None:
        self._lru = LRUPromptCache(max_size=self.max_entries, max_bytes=self.max_bytes)

    def fetch(self, prompt: list[int], namespace: str = DENSE) -> Hit:
        """The longest stored prefix of ``prompt`` short of its last token."""
        self.queries += 1
        head = prompt[:-1]
        if not head:
            return Hit(0, None)
        cache, rest = self._lru.fetch_nearest_cache(namespace, head)
        tokens = len(head) - len(rest)
        if cache is None or tokens == 0:
            return Hit(0, None)
        self.hits += 1
        return Hit(tokens, cache)

    def store(self, tokens: list[int], cache: list[Any], namespace: str = DENSE) -> None:
        """Keep ``cache``, which holds exactly the KV of ``tokens``. The caller must not write to it again."""
        if tokens and sum(layer.nbytes for layer in cache) <= self.max_bytes:
            self._lru.insert_cache(namespace, list(tokens), cache)

    def trim(self, max_bytes: int) -> None:
        """Drop entries until at most ``max_bytes`` remain: running requests come first."""
        self._lru.trim_to(n_bytes=max(0, max_bytes))

    @property
    def nbytes(self) -> int:
        return int(self._lru.nbytes)

    def __len__(self) -> int:
        return len(self._lru)
