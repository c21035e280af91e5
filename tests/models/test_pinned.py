"""Models that stay loaded: what is remembered of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetd import limits
from fleetd.errors import InvalidValue
from fleetd.models.pinned import PinnedModels


def test_what_is_pinned_is_known_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "pinned-models.json"
    pinned = PinnedModels(file)
    assert pinned.names == frozenset()
    for name in ("b", "a", "b"):
        pinned.pin(name)
    assert pinned.names == PinnedModels(file).names == {"a", "b"}
    pinned.unpin("a")
    pinned.unpin("nobody")
    assert pinned.names == PinnedModels(file).names == {"b"}


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff", b'{"a": 1}', b"[" * 5000])
def test_a_damaged_file_pins_nothing_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "pinned-models.json"
    file.write_bytes(damage)
    pinned = PinnedModels(file)
    assert pinned.names == frozenset()
    pinned.pin("a")
    assert PinnedModels(file).names == {"a"}


def test_there_is_a_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PINNED_MODELS", 2)
    pinned = PinnedModels(tmp_path / "pinned-models.json")
    pinned.pin("a")
    pinned.pin("b")
    with pytest.raises(InvalidValue):
        pinned.pin("c")
    pinned.pin("a")
    assert pinned.names == {"a", "b"}
