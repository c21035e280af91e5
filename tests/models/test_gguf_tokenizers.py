"""A file's tokenizer against the algorithm it describes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.gguf import tokenizer as gguf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = [
    "▁the",
    "▁th",
    "he",
    "th",
    "in",
    "▁in",
    "ing",
    "▁ot",
    "other",
    "▁other",
    "her",
    "er",
    "▁a",
    "an",
    "▁an",
    "and",
    "▁and",
    "▁s",
    "st",
    "▁st",
]
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz,.é"]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(PIECES) + len(LETTERS))]
    scores = [*[0.0] * 259, *[-float(at) for at in range(len(PIECES))], *[-1000.0] * len(LETTERS)]
    tokens += ["<|user|>", "<|end|>", "<end_of_turn>", "  "]
    found: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*kinds, CONTROL, CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.scores": [*scores, *[-1000.0] * 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def fast(found: dict[str, Any]) -> Any:
    return Fast.from_str(gguf_tokenizer.build(found, "x.gguf").tokenizer_json)


def joined(text: str, found: dict[str, Any]) -> list[str]:
    """SentencePiece: join the neighbours whose union has the highest score, the leftmost first."""
    known = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        candidates = [(-known[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not candidates:
            return parts
        _, at = min(candidates)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def test_pieces_are_joined_by_their_scores() -> None:
    found = metadata()
    made, draw = fast(found), random.Random(2)
    for _ in range(200):
        text = " ".join("".join(draw.choices("therianso", k=draw.randint(1, 9))) for _ in range(3))
        assert made.encode(text).tokens == ["<s>", *joined(" " + text, found)]


def test_a_leading_space_is_added_unless_the_file_says_otherwise() -> None:
    assert fast(metadata()).encode("an").tokens == ["<s>", "▁an"]
    assert fast(metadata(add_space_prefix=False)).encode("an").tokens == ["<s>", "an"]
    assert fast(metadata(add_bos_token=False)).encode("an").tokens == ["▁an"]


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("text", ["the other", "a 北京 🙂 é", "x\ny\tz", "", "the end"])
def test_text_survives_pieces_and_bytes(text: str, leading: bool) -> None:
    made = fast(metadata(add_space_prefix=leading, add_bos_token=False))
    assert made.decode(made.encode(text).ids) == text


def test_user_defined_pieces_are_matched_before_any_joining() -> None:
    assert fast(metadata(add_space_prefix=False)).encode("a  b").tokens == ["<s>", "a", "  ", "b"]


def test_control_tokens_of_phi_swallow_the_line_that_follows() -> None:
    found = metadata(add_space_prefix=False) | {"general.architecture": "phi3"}
    user, end, an = (fast(found).token_to_id(token) for token in ("<|user|>", "<|end|>", "an"))
    assert fast(found).encode("<|user|>\nan<|end|>\n").ids == [1, user, an, end]
    plain = metadata(add_space_prefix=False)
    assert fast(plain).encode("<|user|>\n").tokens == ["<s>", "<|user|>", "<0x0A>"]


def test_answers_end_where_the_family_ends_them() -> None:
    found = metadata()
    tokens = found["tokenizer.ggml.tokens"]
    ends = {tokens[index] for index in gguf_tokenizer.build(found, "x.gguf").eos_token_ids}
    assert ends == {"</s>", "<|end|>", "<end_of_turn>"}
    # gpt-oss ends a message with <|end|> and goes on; these two end the answer.
    tokens[tokens.index("  ")], tokens[tokens.index("<|user|>")] = "<|return|>", "<|call|>"
    ends = {tokens[index] for index in gguf_tokenizer.build(found, "x.gguf").eos_token_ids}
    assert ends == {"</s>", "<end_of_turn>", "<|return|>", "<|call|>"}


@pytest.mark.parametrize(
    "change",
    [
        {"scores": []},
        {"scores": [0.0]},
        {"tokens": ["a" * (limits.GGUF_PIECE_CHARS + 1)], "token_type": [NORMAL], "scores": [0.0]},
        {"unknown_token_id": 1 << 40},
    ],
    ids=["no scores", "one score", "a piece without end", "unknown outside"],
)
def test_impossible_pieces_are_corrupt(change: dict[str, Any]) -> None:
    found = metadata(**change)
    if "tokens" in change:
        for key in ("bos", "eos", "unknown"):
            del found[f"tokenizer.ggml.{key}_token_id"]
    with pytest.raises(ModelCorrupt, match=r"x\.gguf"):
        gguf_tokenizer.build(found, "x.gguf")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "HelloWorld's x1234", ["Hello", "World's", "Ġx", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("qwen35", "a\u0301b 12", ["áb", "Ġ", "1", "2"]),
        ("qwen2", "it's 12", ["it", "'s", "Ġ", "1", "2"]),
        ("llama-bpe", "it's 1234", ["it", "'s", "Ġ", "123", "4"]),
        ("chatglm-bpe", "it's 1234", ["it", "'s", "Ġ", "123", "4"]),
        ("dbrx", "it's 1234", ["it", "'s", "Ġ", "123", "4"]),
        ("glm4", "it's 1234", ["it", "'s", "Ġ", "123", "4"]),
        ("smollm", "it's 1234", ["it", "'s", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", "it's 1234", ["it", "'s", "Ġ1234"]),
    ],
)
def test_text_is_cut_as_the_family_cuts_it(pre: str, text: str, words: list[str]) -> None:
    from model_files import byte_alphabet

    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*byte_alphabet(), "th"],
        "tokenizer.ggml.merges": ["t h"],
    }
    made = fast(found)
    composed = made.normalizer.normalize_str(text) if made.normalizer is not None else text
    cut = [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str(composed)]
    assert cut == [word if word.isascii() or "Ġ" in word else "".join(_as_bytes(word)) for word in words]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_a_word_that_is_a_token_needs_no_merges_in_the_families_that_say_so(pre: str, whole: bool) -> None:
    from model_files import byte_alphabet

    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*byte_alphabet(), "th", "the"],
        "tokenizer.ggml.merges": ["t h"],
    }
    assert fast(found).encode("the").tokens == (["the"] if whole else ["th", "e"])


def _as_bytes(word: str) -> list[str]:
    from model_files import byte_alphabet

    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = [*plain, *(byte for byte in range(256) if byte not in plain)]
    table = dict(zip(order, byte_alphabet(), strict=True))
    return [table[byte] for byte in word.encode()]
