"""Finished parts of a long measurement, for another try on the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from bench import staleness
from bench.harness.child import ROOT

FOLDER = ROOT / ".cache" / "bench"
T = TypeVar("T")


class KeptParts(Generic[T]):
    """Measures each part once, until ``clear``.

    Args:
        name: of the measurement, with whatever else its parts depend on.
        code: what it measures, as git's pathspecs. While that has changes that are not committed, nothing is
            kept, because nothing says which changes they were.
        kind: what a part is; msgspec writes it.
    """

    def __init__(
        self, name: str, code: Sequence[str], kind: type[T], folder: Path = FOLDER, root: Path = ROOT
    ) -> None:
        version = staleness.version(root, code)
        self._file = folder / f"{name}-{version}.json" if version else None
        self._type = dict[str, kind]  # type: ignore[valid-type]
        self._parts = self._read()

    def measured(self, part: str, measure: Callable[[], T]) -> T:
        """The part, measured now if that was not done before."""
        if part not in self._parts:
            self._parts[part] = measure()
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                fresh = self._file.with_suffix(".new")
                fresh.write_bytes(msgspec.json.encode(self._parts))
                fresh.replace(self._file)
        return self._parts[part]

    def clear(self) -> None:
        """The measurement is complete: the next one begins anew."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _read(self) -> dict[str, T]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=self._type)
        except msgspec.DecodeError:  # another version's
            return {}
