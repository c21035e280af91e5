"""Prompts of an exact length in tokens, each run its own, so that no prefix cache has seen one before."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

_WORDS = """
river market engine window letter copper garden signal harbour winter ledger bridge orchard lantern
thread valley anchor pepper canvas mirror cellar meadow compass barrel kettle ribbon saddle timber
carried measured promised repaired remembered answered gathered painted followed borrowed counted
the a every no one another her their some quiet narrow early distant ordinary heavy bright
""".split()  # noqa: SIM905 - sixty quoted words are harder to read

# Eight beginnings that a small model goes on from for a while, of different lengths.
OPENINGS = (
    "The history of the lighthouse begins with",
    "Once upon a time, in a small village between two rivers, there lived a clockmaker who",
    "To bake a good loaf of bread at home, first",
    "The three most important inventions of the nineteenth century were",
    "My grandmother used to tell a story about the winter when the lake froze. She said that",
    "A computer program is a list of instructions. Each instruction",
    "Dear Sir, I am writing to you about the garden wall that",
    "The moon moves around the Earth because",
)


def prose(seed: int, words: int) -> str:
    """Sentences without sense; the same seed gives the same text."""
    chance = random.Random(seed)
    said: list[str] = []
    while len(said) < words:
        sentence = chance.choices(_WORDS, k=chance.randint(6, 14))
        said += [sentence[0].capitalize(), *sentence[1:-1], f"{sentence[-1]}."]
    return " ".join(said)


def tokens(model: Path, seed: int, count: int) -> list[int]:
    """Exactly ``count`` token ids of prose."""
    ids: list[int] = _tokenizer(model).encode(prose(seed, count), add_special_tokens=False).ids
    if len(ids) < count:
        raise ValueError(f"{count} words gave only {len(ids)} tokens")
    return ids[:count]


def text(model: Path, seed: int, count: int) -> str:
    """Text of about ``count`` tokens; decoding and encoding again may shift it by one or two."""
    decoded: str = _tokenizer(model).decode(tokens(model, seed, count))
    return decoded


def encoded(model: Path, words: str) -> list[int]:
    ids: list[int] = _tokenizer(model).encode(words, add_special_tokens=False).ids
    return ids


@cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))
