"""Kernels that a GPU's driver and MLX compile stay in the home's cache folder."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from fleetd.engine import worker

VARIABLES = ("MLX_PTX_CACHE_DIR", "CUDA_CACHE_PATH")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Set first, so that what a test leaves is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_they_lie_in_the_cache_folder_by_the_version_that_compiled_them(tmp_path: Path) -> None:
    worker.keep_kernels(str(tmp_path))
    kernels = tmp_path / "kernels"
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(kernels / importlib.metadata.version("mlx"))
    assert os.environ["CUDA_CACHE_PATH"] == str(kernels / "driver")


def test_a_place_that_the_owner_has_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/elsewhere")
    worker.keep_kernels(str(tmp_path))
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/elsewhere"


def test_a_worker_that_keeps_nothing_leaves_the_libraries_their_places() -> None:
    worker.keep_kernels("")
    assert not set(VARIABLES) & set(os.environ)
