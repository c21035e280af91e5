"""``python -m eval.head_texts FOLDER``: texts that a model reads, with its hidden states, to fit a head to.

    sources of pinned packages ──► docstrings, and functions, as answers to a question ──► FOLDER/0000.npz, …

To read a text costs a model much less than to write one: all of its tokens are computed in one pass. What the
next token would be is what the model says, so a text need not be its own. Each file is checked against the
digest that its package was installed with. A run that was cut off goes on after its last piece.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import inspect
import random
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.harness.daemon import MODEL, fetch_model
from bench.harness.loaded_model import load_as_worker
from eval import head_answers
from eval.head_answers import Answers
from eval.head_prompts import KINDS, Kind

# Packages that the daemon needs itself, so their versions and digests are in uv.lock.
PACKAGES = ("numpy", "aiohttp", "mlx-lm", "huggingface-hub", "Jinja2")
# Texts of a piece, and tokens of each with its question: what is longer is cut off.
ROWS, TOKENS = 16, 256
# Characters of a text that is taken: shorter ones are mostly question.
LEAST = 300
_ASKED: dict[Kind, str] = {
    "text": "What does `{name}` do?",
    "code": "Write a Python function for this: {first}",
}


class Read(msgspec.Struct, frozen=True):
    """A text as an answer to a question."""

    kind: Kind
    question: str
    text: str


def texts(packages: tuple[str, ...] = PACKAGES, seed: int = 13) -> list[Read]:
    """All texts of the packages, all different; prose and code in turns, in an order by chance.

    Raises:
        RuntimeError: a file is not the one that was installed.
    """
    found = dict.fromkeys(read for package in packages for file in _sources(package) for read in _read(file))
    of_kind = [[read for read in found if read.kind == kind] for kind in KINDS]
    chance = random.Random(seed)
    for reads in of_kind:
        chance.shuffle(reads)
    return [read for both in zip(*of_kind, strict=False) for read in both]


def _sources(package: str) -> Iterator[str]:
    """The text of each Python file of a package, without its tests."""
    for file in sorted(metadata.files(package) or (), key=str):
        if file.suffix == ".py" and file.hash is not None and not {"test", "tests"} & set(file.parts):
            content = Path(str(file.locate())).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, content).digest())
            if digest.rstrip(b"=").decode() != file.hash.value:
                raise RuntimeError(f"{package}: {file} is not what was installed")
            yield content.decode()


def _read(source: str) -> Iterator[Read]:
    """The docstrings of a source, and the functions that have one."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            said = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(said) >= LEAST:
                yield Read("text", _ASKED["text"].format(name=node.name), said)
            # Without its docstring, which would be most of it.
            first, docstring, end = node.lineno - 1, node.body[0], node.end_lineno
            kept = lines[first : docstring.lineno - 1] + lines[docstring.end_lineno : end]
            written = textwrap.dedent("\n".join(kept))
            if said and not isinstance(node, ast.ClassDef) and len(written) >= LEAST:
                question = _ASKED["code"].format(first=said.splitlines()[0])
                yield Read("code", question, f"```python\n{written}\n```")


def encoded(tokenizer: Any, read: Read) -> list[int]:
    """Question and text in the model's chat form, up to ``TOKENS`` tokens."""
    message = [{"role": "user", "content": read.question}]
    asked: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    said: list[int] = tokenizer.encode(read.text, add_special_tokens=False)
    return [*asked, *said, tokenizer.eos_token_id][:TOKENS]


def piece(model: Any, tokenizer: Any, reads: list[Read]) -> Answers:
    """What the model gives for some texts. The beginning that all of them have counts as prompt."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    rows = [encoded(tokenizer, read) for read in reads]
    tokens = np.full((len(rows), TOKENS), tokenizer.eos_token_id, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    same = (tokens == tokens[0]).all(0)
    # A row at a time: what a row gives is then the same beside any others.
    hidden = [model.model(mx.array(row[None, :-1]), cache=make_prompt_cache(model)) for row in tokens]
    return Answers(
        tuple(read.kind for read in reads),
        max(int(np.argmin(same)), 1),
        tokens,
        np.array(mx.concatenate(hidden).astype(mx.float16)),
        np.array([len(ids) for ids in rows], np.int32),
    )


def pieces_of(folder: Path, tokens: int) -> list[Path]:
    """The first pieces that are in a folder, of about so many tokens; none for 0."""
    return sorted(folder.glob("*.npz"))[: _count(tokens)]


def _count(tokens: int) -> int:
    return -(-tokens // (ROWS * TOKENS))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.head_texts", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of texts, about")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    begun, reads = time.monotonic(), texts()
    wanted = range(min(_count(args.tokens), len(reads) // ROWS))
    missing = [number for number in wanted if not head_answers.file_of(args.folder, number).exists()]
    if not missing:
        return 0
    fetch_model()
    loaded = load_as_worker(MODEL.resolve())
    for number in missing:
        part = reads[number * ROWS : (number + 1) * ROWS]
        head_answers.write(args.folder, number, piece(loaded.model, loaded.tokenizer, part))
        print(f"{time.monotonic() - begun:.0f} s: piece {number + 1} of {len(wanted)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
