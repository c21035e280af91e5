"""Files of vectors, which a second run goes on with: what is in them is not computed again.

    OUT.jsonl            a line for each text: id, sha256, model, embedding
    OUT.npy              a float32 matrix, a row for each text
    OUT.npy.texts.jsonl  a line for each row: id, sha256, model

A run that was cut off leaves at most a torn end, which the next one removes. One that got no vector leaves no
new file.
"""

from __future__ import annotations

import array
import json
import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from fleetctl.exits import ClientError
from fleetctl.vectors.corpus import CorpusText

_FLOAT_BYTES = 4
# Of every line that is written here: a torn line of another program is never cut off.
_BEGINNING = b'{"id": '
# NumPy's format, version 1.0, its header padded to 128 bytes so that it can grow in place.
_NPY_MAGIC, _NPY_HEADER_BYTES = b"\x93NUMPY\x01\x00", 128


class VectorFile(ABC):
    """``done``: (id, sha256) of the texts whose vectors it has. ``model``: that made them; "" if none did."""

    def __init__(self) -> None:
        self.done: set[tuple[str, str]] = set()
        self.model = ""

    @abstractmethod
    def add(self, texts: Sequence[CorpusText], vectors: Sequence[bytes], model: str) -> None:
        """Write vectors, float32 little endian. They survive whatever happens to the program later."""

    @abstractmethod
    def close(self) -> None: ...

    def _knows(self, lines: Iterable[dict[str, Any]], name: str) -> None:
        for line in lines:
            try:
                self.done.add((str(line["id"]), str(line["sha256"])))
                model = str(line["model"])
            except KeyError as error:
                raise ClientError(
                    f"{name} is no file of `fleetctl embed`: a line has no {error}.",
                    hint="Name another file with -o.",
                ) from None
            if self.model not in ("", model):
                raise ClientError(f"{name} has vectors of {self.model} and of {model}.")
            self.model = model


def open_vectors(path: Path | None) -> VectorFile:
    """The file to write, with what it has already; None is stdout. Raises ClientError, OSError."""
    if path is None:
        return JsonLines(sys.stdout)
    if path.suffix == ".npy":
        return NpyMatrix(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLines.at(path)
    raise ClientError(f"{path} is neither a .jsonl nor a .npy file.", hint="Name the form by the ending.")


def numbers(vector: bytes) -> array.array[float]:
    """A vector's numbers."""
    found = array.array("f", vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found


class JsonLines(VectorFile):
    def __init__(self, out: IO[str]) -> None:
        super().__init__()
        self._out = out
        # The file, if this run made it.
        self._made: Path | None = None

    @classmethod
    def at(cls, path: Path) -> JsonLines:
        found = cls(sys.stdout)
        found._made = None if path.exists() else path
        # Line by line: vectors of a corpus together may be more than the memory.
        found._knows(_whole_lines(path), str(path))
        found._out = path.open("a", encoding="utf-8")
        return found

    def add(self, texts: Sequence[CorpusText], vectors: Sequence[bytes], model: str) -> None:
        for text, vector in zip(texts, vectors, strict=True):
            about = json.dumps({"id": text.id, "sha256": text.sha256, "model": model})
            # Nine digits are a float32.
            told = ",".join(f"{number:.9g}" for number in numbers(vector))
            self._out.write(f'{about[:-1]}, "embedding": [{told}]}}\n')
        self._out.flush()

    def close(self) -> None:
        if self._out is not sys.stdout:
            self._out.close()
        _remove_empty(self._made)


class NpyMatrix(VectorFile):
    def __init__(self, path: Path) -> None:
        super().__init__()
        index = path.with_name(f"{path.name}.texts.jsonl")
        self._made = [file for file in (path, index) if not file.exists()]
        lines = list(_whole_lines(index))
        self._width = _npy_width(path) if path.exists() and path.stat().st_size else 0
        if lines and not self._width:
            raise ClientError(
                f"{index} is there, and {path} is not.", hint="Remove it, or name another file."
            )
        if self._width and not index.exists():
            raise ClientError(
                f"{path} is there, and {index} is not.",
                hint="Name another file: this one's rows are unknown.",
            )
        rows = (path.stat().st_size - _NPY_HEADER_BYTES) // (_FLOAT_BYTES * self._width) if self._width else 0
        self._rows = min(rows, len(lines))
        self._knows(lines[: self._rows], str(index))
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._index = _cut(index, self._rows)
        if self._width:
            self._file.truncate(_NPY_HEADER_BYTES + self._rows * self._width * _FLOAT_BYTES)
            self._write_header()

    def add(self, texts: Sequence[CorpusText], vectors: Sequence[bytes], model: str) -> None:
        if not texts:
            return
        width = len(vectors[0]) // _FLOAT_BYTES
        if self._width not in (0, width):
            raise ClientError(f"The file has vectors of {self._width} numbers; these have {width}.")
        if not self._width:
            self._width = width
            self._write_header()
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"".join(vectors))
        self._rows += len(vectors)
        self._write_header()
        self._file.flush()
        for text in texts:
            self._index.write(json.dumps({"id": text.id, "sha256": text.sha256, "model": model}) + "\n")
        self._index.flush()

    def _write_header(self) -> None:
        about = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self._rows}, {self._width}), }}"
        room = _NPY_HEADER_BYTES - len(_NPY_MAGIC) - 2
        self._file.seek(0)
        self._file.write(_NPY_MAGIC + struct.pack("<H", room) + about.ljust(room - 1).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
        self._index.close()
        _remove_empty(*self._made)


def _remove_empty(*made: Path | None) -> None:
    """Remove the files of these in which there is nothing."""
    for file in made:
        if file is not None and not file.stat().st_size:
            file.unlink()


def _npy_width(path: Path) -> int:
    """Numbers in a row. Raises ClientError for a file that another program wrote."""
    import ast

    with path.open("rb") as file:
        head = file.read(_NPY_HEADER_BYTES)
    try:
        about = ast.literal_eval(head[10:].decode("ascii").strip())
        if head[:8] == _NPY_MAGIC and about["descr"] == "<f4" and not about["fortran_order"]:
            return int(about["shape"][1])
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
        pass
    raise ClientError(f"{path} is no matrix of `fleetctl embed`.", hint="Name another file with -o.")


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines; a torn last line is cut off. Raises ClientError."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                break
            try:
                found = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise ClientError(
                    f"{path}:{number} is no line of `fleetctl embed`.", hint="Name another file with -o."
                )
            whole += len(line)
            yield found
        file.truncate(whole)


def _cut(path: Path, lines: int) -> IO[str]:
    """The file, open at its end, with its first lines alone."""
    file = path.open("a+", encoding="utf-8")
    file.seek(0)
    for _ in range(lines):
        file.readline()
    file.truncate(file.tell())
    file.seek(0, os.SEEK_END)
    return file
