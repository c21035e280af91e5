"""The stored index of transformers: the import makes it once, and takes it from the disk afterwards."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from fleetd.startup import import_index

_INIT = """
from .utils.import_utils import define_import_structure
index = define_import_structure("models", prefix="models")
"""
_UTILS = """
calls = []
def define_import_structure(module_path, prefix=None):
    calls.append((module_path, prefix))
    return {frozenset({"torch"}): {"a": {"A", "B"}}, frozenset(): {"b": {"C"}}}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of another name that does as transformers does."""
    root = tmp_path / "lib" / "indexed"
    (root / "utils").mkdir(parents=True)
    (root / "__init__.py").write_text(_INIT)
    (root / "utils" / "__init__.py").write_text("")
    (root / "utils" / "import_utils.py").write_text(_UTILS)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(import_index, "_LIBRARY", "indexed")
    monkeypatch.setattr(import_index, "_MODULE", "indexed.utils.import_utils")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    return root


def imported(cache: Path) -> tuple[Any, list[Any]]:
    """The index that the library got, and how often it was made."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "indexed"]:
        del sys.modules[name]
    before = list(sys.meta_path)
    with import_index.stored(cache):
        found = importlib.import_module("indexed")
    assert sys.meta_path == before
    return found.index, sys.modules["indexed.utils.import_utils"].calls


def test_the_second_import_takes_it_from_the_disk(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made, calls = imported(cache)
    assert calls == [("models", "models")]
    assert imported(cache) == (made, [])
    # Written anew, by an update perhaps: made anew.
    os.utime(library / "__init__.py", ns=(1, 1))
    assert imported(cache) == (made, calls)
    (file,) = (cache / "imports").iterdir()
    file.write_bytes(file.read_bytes().replace(b'"C"', b'"D"'))
    assert imported(cache) == (made, calls)


def test_without_that_function_the_import_is_the_usual_one(library: Path, tmp_path: Path) -> None:
    (library / "__init__.py").write_text("index = calls = None\nfrom .utils import import_utils\n")
    (library / "utils" / "import_utils.py").write_text("calls = []\n")
    assert imported(tmp_path / "cache") == (None, [])
    assert not (tmp_path / "cache").exists()


def test_transformers_has_it_and_its_index_survives_the_disk(tmp_path: Path) -> None:
    where = str(Path(import_utils.__file__).parent.parent / "models" / "llama")
    made = import_utils.define_import_structure(where)
    assert any("LlamaConfig" in names for modules in made.values() for names in modules.values())
    finder = import_index._Finder({})
    finder._instead_of(import_utils.define_import_structure)(where)
    again = import_index._Finder(finder.found)._instead_of(lambda *_: {})
    assert again(where) == made
