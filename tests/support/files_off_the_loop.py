"""A loop on which no file of a folder is looked at: a disk that hangs would hold up everything else there."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def files_off_the_loop(folder: Path) -> Iterator[None]:
    """Meanwhile a look at a file of the folder, from a thread that runs a loop, raises AssertionError."""

    def guarded(look: Callable[..., Any]) -> Callable[..., Any]:
        def looks(path: Any = ".", *given: Any, **named: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(os.fspath(path)).is_relative_to(folder):
                assert not _on_a_loop(), f"{path} is looked at on the loop"
            return look(path, *given, **named)

        return looks

    with (
        mock.patch.object(os, "stat", guarded(os.stat)),
        mock.patch.object(os, "scandir", guarded(os.scandir)),
        mock.patch.object(os, "listdir", guarded(os.listdir)),
        mock.patch.object(os, "open", guarded(os.open)),
        mock.patch.object(io, "open", guarded(io.open)),
    ):
        yield


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
