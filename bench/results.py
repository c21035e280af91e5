"""Results are kept beside the page: measuring one family, on any checkout, leaves the others as they were."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.figures import Result

_KIND = dict[str, Result]


def load(path: Path) -> dict[str, Result]:
    """Family → result; empty where nothing is kept, or where another version kept it in another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KIND)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def save(path: Path, results: dict[str, Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    fresh.replace(path)


def kept(old: Result | None, new: Result) -> Result:
    """The newer of two results for one family, except that a quick look, or one that was cut short, never
    replaces a whole measurement."""
    whole = old is not None and not (old.quick or old.cut)
    return old if old is not None and whole and (new.quick or new.cut) else new
