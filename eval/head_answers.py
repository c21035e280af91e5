"""``python -m eval.head_answers FOLDER``: a model's own answers, with its hidden states, to fit a head to.

    prompts ──► batches of prompts of one length ──► answers by chance ──► FOLDER/0000.npz, 0001.npz, …

Each batch is a piece with a seed of its own. So a run that was cut off goes on after its last piece, and
gives what it would have given. What a seed gives depends on the processor's instructions, as sums do.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.harness.daemon import MODEL, fetch_model
from bench.harness.loaded_model import load_as_worker
from eval import head_prompts
from eval.head_prompts import Kind, Prompt

# Answers at once, and the tokens of each.
BATCH, TOKENS = 32, 144
# Of the rows of a batch, in turns. Held-out answers are greedy, as most are that are drafted for.
TEMPERATURES = (0.3, 0.7)
# Which pieces are of held-out prompts. They come first.
HELD_PIECES = 1000
# Times that each prompt is answered at most, each time by another chance.
ROUNDS = 8


class Piece(msgspec.Struct, frozen=True):
    """A batch to be answered."""

    number: int
    kinds: tuple[Kind, ...]
    # Token ids of the prompts: (rows, tokens).
    prompts: tuple[tuple[int, ...], ...]
    held_out: bool


class Answers(msgspec.Struct, frozen=True):
    """An answered batch of B prompts; L tokens each, prompt and answer, and D numbers a hidden state."""

    kinds: tuple[Kind, ...]
    # Tokens of each prompt.
    prompt_tokens: int
    # int32 (B, L).
    tokens: npt.NDArray[np.int32]
    # The model's output behind its last norm, for all tokens but the last: float16 (B, L - 1, D).
    hidden: npt.NDArray[np.float16]
    # Tokens of each row until its answer ended: (B,).
    lengths: npt.NDArray[np.int32]


def pieces(tokenizer: Any) -> list[Piece]:
    """What is answered, in this order: the held-out prompts, then the others, several times."""
    held = _batches(tokenizer, head_prompts.held_out(), size=BATCH)
    others = _batches(tokenizer, head_prompts.training(), size=BATCH)
    others = [rows for rows in others if len(rows) >= BATCH // 2]
    rounds = []
    for seed in range(ROUNDS):
        shuffled = list(others)
        random.Random(11 + seed).shuffle(shuffled)
        rounds += shuffled
    return [
        Piece(number, tuple(kind for kind, _ in rows), tuple(ids for _, ids in rows), held_out)
        for first, batches, held_out in ((HELD_PIECES, held, True), (0, rounds, False))
        for number, rows in enumerate(batches, first)
    ]


def held_out(folder: Path) -> list[Path]:
    """The pieces of held-out prompts that are in a folder."""
    return [file for file in sorted(folder.glob("*.npz")) if int(file.stem) >= HELD_PIECES]


def pieces_of(folder: Path, tokens: int) -> list[Path]:
    """The first other pieces that are in a folder, up to about so many tokens of answers."""
    found, total = [], 0
    for file in sorted(folder.glob("*.npz")):
        if total < tokens and int(file.stem) < HELD_PIECES:
            found.append(file)
            total += len(read(file).kinds) * TOKENS
    return found


def read(file: Path) -> Answers:
    """A piece that was written."""
    with np.load(file) as arrays:
        fields: dict[str, Any] = {name: arrays[name] for name in Answers.__struct_fields__}
    kinds: Any = tuple(str(kind) for kind in fields.pop("kinds"))
    prompt_tokens = int(fields.pop("prompt_tokens"))
    return Answers(**fields, kinds=kinds, prompt_tokens=prompt_tokens)


def answer(model: Any, piece: Piece, ends: Sequence[int]) -> Answers:
    """Greedy answers if the piece is held out, else by chance, with the piece's number for a seed."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    mx.random.seed(piece.number)
    rows = len(piece.prompts)
    warmth = mx.array([[TEMPERATURES[row % len(TEMPERATURES)]] for row in range(rows)])
    cache, new = make_prompt_cache(model), mx.array(piece.prompts)
    tokens, hidden = [new], []
    for _ in range(TOKENS):
        hidden.append(model.model(new, cache=cache))
        logits = model.model.embed_tokens.as_linear(hidden[-1][:, -1])
        chosen = mx.argmax(logits, -1) if piece.held_out else mx.random.categorical(logits / warmth)
        new = chosen[:, None].astype(mx.int32)
        tokens.append(new)
        mx.eval(new, hidden[-1], [layer.state for layer in cache])
    found = np.array(mx.concatenate(tokens, 1), dtype=np.int32)
    prompt = len(piece.prompts[0])
    return Answers(
        piece.kinds,
        prompt,
        found,
        np.array(mx.concatenate(hidden, 1).astype(mx.float16)),
        _lengths(found, prompt, ends),
    )


def write(folder: Path, number: int, answers: Answers) -> None:
    """A piece, whole or not at all."""
    unfinished = folder / f"{_name(number)}.part"
    with unfinished.open("wb") as file:
        np.savez(file, **{field: getattr(answers, field) for field in Answers.__struct_fields__})
    os.replace(unfinished, folder / _name(number))


def _name(number: int) -> str:
    return f"{number:04}.npz"


def _batches(
    tokenizer: Any, prompts: Iterable[Prompt], size: int
) -> list[list[tuple[Kind, tuple[int, ...]]]]:
    """Prompts of one length together, so that nothing is padded."""
    by_length: dict[int, list[tuple[Kind, tuple[int, ...]]]] = {}
    for prompt in prompts:
        message = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        by_length.setdefault(len(ids), []).append((prompt.kind, tuple(ids)))
    return [rows[begin : begin + size] for rows in by_length.values() for begin in range(0, len(rows), size)]


def _lengths(tokens: npt.NDArray[np.int32], prompt: int, ends: Sequence[int]) -> npt.NDArray[np.int32]:
    """Tokens of each row up to, and with, the first one after the prompt that ends an answer."""
    ended = np.isin(tokens[:, prompt:], list(ends))
    first = np.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1])
    lengths: npt.NDArray[np.int32] = (prompt + first).astype(np.int32)
    return lengths


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.head_answers", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of answers, about")
    args = parser.parse_args()
    fetch_model()
    loaded = load_as_worker(MODEL.resolve())
    args.folder.mkdir(parents=True, exist_ok=True)
    begun, total = time.monotonic(), 0
    for piece in pieces(loaded.tokenizer):
        if not piece.held_out and total >= args.tokens:
            break
        if not (args.folder / _name(piece.number)).exists():
            ends = loaded.tokenizer.eos_token_ids
            write(args.folder, piece.number, answer(loaded.model, piece, ends))
        total += 0 if piece.held_out else len(piece.prompts) * TOKENS
        print(f"{time.monotonic() - begun:.0f} s: {total} tokens", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
