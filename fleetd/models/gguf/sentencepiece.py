"""SentencePiece BPE (``tokenizer.ggml.model`` = llama) as a fast tokenizer.

The file holds pieces with scores; SentencePiece joins the two neighbours whose union has the highest score.
A list of merges gives the same joins: all ways to split a piece into two pieces, in the order of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetd import limits

NORMAL, UNKNOWN, BYTE = 1, 2, 6
_SPACE = "▁"


def build(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, leading_space: bool
) -> Any:
    """A ``tokenizers.Tokenizer`` for the vocabulary; added tokens come later.

    Args:
        leading_space: True if a text is read as if a space came before it.

    Raises:
        ValueError: the pieces are not a vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    has_bytes = sum(kind == BYTE for kind in types) == 256
    fast = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if leading_space else []
    fast.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leading_space else steps)
    return fast


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    known = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in known.items():
        if len(token) > limits.GGUF_PIECE_CHARS:
            raise ValueError(f"a piece has {len(token)} characters")
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in known and right in known:
                found.append((-scores[index], known[left], known[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]
