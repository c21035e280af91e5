"""Sixteen bits as five letters that can be read aloud: consonant, vowel, consonant, vowel, consonant.

"A Proposal for Proquints: Identifiers that are Readable, Spellable, and Pronounceable", D. S. Wilkerson,
arXiv 0901.4016.
"""

from __future__ import annotations

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aiou"
LETTERS = 5
# The highest bits come first; a consonant holds four, a vowel two.
_ALPHABETS = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)
_SHIFTS = (12, 10, 6, 4, 0)


def encode(data: bytes) -> str:
    """Each two bytes as one word, joined by dashes; ``data`` has an even length."""
    return "-".join(_word(int.from_bytes(data[i : i + 2])) for i in range(0, len(data), 2))


def decode(words: str) -> bytes:
    """Words with or without dashes. Raises ValueError with the first invalid word."""
    letters = words.replace("-", "")
    found = b""
    for i in range(0, len(letters), LETTERS):
        found += _number(letters[i : i + LETTERS]).to_bytes(2)
    return found


def _word(number: int) -> str:
    return "".join(
        alphabet[number >> shift & len(alphabet) - 1]
        for alphabet, shift in zip(_ALPHABETS, _SHIFTS, strict=True)
    )


def _number(word: str) -> int:
    if len(word) != LETTERS or any(c not in a for c, a in zip(word, _ALPHABETS, strict=True)):
        raise ValueError(word)
    return sum(
        alphabet.index(letter) << shift
        for letter, alphabet, shift in zip(word, _ALPHABETS, _SHIFTS, strict=True)
    )
