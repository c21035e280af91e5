"""What libraries raise over a publisher's files is a typed error, and does not end the worker untold."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chain_model
import pytest

from fleetd.engine.failures import over_files
from fleetd.engine.load import loading
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import FleetError, ModelCorrupt, ModelUnsupported, OutOfMemory

pytestmark = pytest.mark.usefixtures("cpu_installed")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The chain model with other values in one of its files."""
    path = chain_model.build(tmp_path_factory.mktemp("odd") / "odd")
    written = {file: (path / file).read_text() for file in ("config.json", "tokenizer.json")}

    def change(file: str, **values: Any) -> Path:
        for name, text in written.items():
            changed = {**json.loads(text), **values} if name == file else json.loads(text)
            (path / name).write_text(json.dumps(changed))
        return path

    return change


@pytest.mark.parametrize(
    ("file", "values", "error"),
    [
        # mlx-lm's code for it calls sys.exit.
        ("config.json", {"model_type": "olmo"}, ModelUnsupported),
        ("config.json", {"model_type": "abacus"}, ModelUnsupported),
        ("config.json", {"rope_scaling": 3}, ModelCorrupt),
        ("config.json", {"rope_theta": "x"}, ModelCorrupt),
        ("config.json", {"quantization": {"group_size": "x"}}, ModelCorrupt),
        ("tokenizer.json", {"model": nested(900)}, ModelCorrupt),
        ("tokenizer.json", {"decoder": {"type": "x"}}, ModelCorrupt),
    ],
    ids=str,
)
def test_files_that_no_library_can_use_are_said_so(
    write: Callable[..., Path], file: str, values: dict[str, Any], error: type[FleetError]
) -> None:
    settings = WorkerSettings(name="odd", path=str(write(file, **values)), speculation="off")
    with pytest.raises(error) as raised:
        loading.load(settings, "cpu", lambda _: None)
    assert len(raised.value.message) < 2000


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (AttributeError("'int' object has no attribute 'get'"), ModelCorrupt),
        (OverflowError("int too large to convert to float"), ModelCorrupt),
        (RecursionError("maximum recursion depth exceeded"), ModelCorrupt),
        (ZeroDivisionError("division by zero"), ModelCorrupt),
        (Exception("data did not match any variant"), ModelCorrupt),
        (OSError("Can't load the tokenizer"), ModelCorrupt),
        (ValueError("x" * 1_000_000), ModelCorrupt),
        (ModuleNotFoundError("No module named 'hf_olmo'"), ModelUnsupported),
        (NotImplementedError("rope"), ModelUnsupported),
        (SystemExit(1), ModelUnsupported),
        # The files' fault is none of these.
        (OSError(errno.EIO, "Input/output error"), OSError),
        (MemoryError(), MemoryError),
        (RuntimeError("Unable to allocate"), RuntimeError),
        (OutOfMemory("It needs 9 GB."), OutOfMemory),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_kind_of_error_has_its_type(raised: BaseException, error: type[BaseException]) -> None:
    with pytest.raises(error) as seen, over_files("The model cannot be built", RuntimeError):
        raise raised
    assert type(seen.value) is error
    if error in (ModelCorrupt, ModelUnsupported):
        assert len(str(seen.value)) < 2000
