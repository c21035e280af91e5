"""Texts of files and of lines, each with a name by which its vector is found again."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fleetctl.exits import ClientError
from fleetctl.text_files import decoded, read_text
from fleetd import limits


@dataclass(frozen=True, slots=True)
class CorpusText:
    """``id``: the file's path, with the number of the line if lines are texts."""

    id: str
    text: str

    @property
    def sha256(self) -> str:
        """The text's hash, in hex: a text that has changed has another vector."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_corpus(files: Sequence[str], *, lines: bool) -> list[CorpusText]:
    """The texts that are not blank, in order; ``-`` is stdin. Raises ClientError, OSError."""
    found = [text for file in files for text in (_lines(file) if lines else _whole(file))]
    return [text for text in found if text.text.strip()]


def _whole(file: str) -> Iterator[CorpusText]:
    yield CorpusText("stdin" if file == "-" else file, read_text(file))


def _lines(file: str) -> Iterator[CorpusText]:
    name = "stdin" if file == "-" else file
    if file == "-":
        yield from _each(sys.stdin.buffer, name)
        return
    with Path(file).open("rb") as opened:
        yield from _each(opened, name)


def _each(file: BinaryIO, name: str) -> Iterator[CorpusText]:
    number = 0
    while raw := file.readline(limits.VECTOR_TEXT_CHARS + 1):
        number += 1
        if len(raw) > limits.VECTOR_TEXT_CHARS:
            raise ClientError(
                f"{name}:{number} is longer than {limits.VECTOR_TEXT_CHARS} bytes, the most of one text.",
                hint="Is the file made of lines? Without --lines it is one text.",
            )
        yield CorpusText(f"{name}:{number}", decoded(raw, f"{name}:{number}").rstrip("\r\n"))
