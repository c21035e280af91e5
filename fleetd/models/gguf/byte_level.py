"""Byte-level BPE (``tokenizer.ggml.model`` = gpt2) as a fast tokenizer.

Families differ in how they cut text into words before the merges apply; ``tokenizer.ggml.pre`` names the cut.
A wrong cut gives plausible text and wrong tokens, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
# Words that end where a capital begins.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}"
)


class Cut(msgspec.Struct, frozen=True):
    """How text becomes words."""

    # The pattern of a word; None for GPT-2's.
    pattern: str | None = None
    # True if each digit is a word.
    digits: bool = False
    # True if text is brought to NFC first.
    composed: bool = False
    # True if a word that is a token needs no merges.
    whole_words: bool = False
    # True if a text begins with the bos token unless the file says otherwise.
    starts: bool = False


_LLAMA_BPE = Cut(_LLAMA3, whole_words=True, starts=True)
CUTS: dict[str, Cut] = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": Cut(digits=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": Cut(_LLAMA3),
    "smaug-bpe": Cut(_LLAMA3),
    "chatglm-bpe": Cut(_LLAMA3),
    "glm4": Cut(_LLAMA3),
    "qwen2": Cut(_QWEN2, composed=True),
    "deepseek-r1-qwen": Cut(_QWEN2),
    "qwen35": Cut(_QWEN35, composed=True),
    "tekken": Cut(_TEKKEN, whole_words=True, starts=True),
    "gpt-4o": Cut(_GPT4O),
}


def build(tokens: Sequence[str], merges: Sequence[str], cut: Cut) -> Any:
    """A ``tokenizers.Tokenizer`` for the vocabulary; added tokens come later.

    Raises:
        ValueError: vocabulary and merges do not fit each other.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise ValueError(f"the merge {merge!r} is not a pair")
        pairs.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        fast = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=cut.whole_words))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge outside the vocabulary
        raise ValueError(f"vocabulary and merges do not fit each other ({error})") from None
    steps: list[Any] = []
    if cut.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.composed:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    return fast
