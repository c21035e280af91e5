"""How a worker reports its errors."""

from __future__ import annotations

import errno

import pytest

from fleetd.engine.failures import over_files, typed
from fleetd.errors import EngineError, ModelCorrupt, OutOfMemory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 1048576 bytes."),
        RuntimeError("[metal::malloc] no"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_no_memory_is_said_as_such(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)), over_files("The model cannot be built"):
        raise error
    found = typed(error, f"m could not be loaded: {error}")
    assert type(found) is OutOfMemory
    assert found.message.startswith("m could not be loaded")
    assert "memory" in found.message
    assert ": (" not in found.message
    assert capfd.readouterr().err == ""


def test_others_stay_what_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    known = ModelCorrupt("no")
    assert typed(known, "it failed") is known
    assert type(typed(RuntimeError("what?"), "it failed")) is EngineError
    assert "RuntimeError: what?" in capfd.readouterr().err
