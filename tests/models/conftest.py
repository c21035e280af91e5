"""A model folder installed the way downloads install it, and a store over an empty hub cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import make_folder

from fleetd.models import install
from fleetd.models.store import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")


@pytest.fixture
def installed(store: ModelStore) -> Path:
    """A model with a manifest, named "own"."""
    staged = make_folder(install.partial_folder(store.models_dir, "own"))
    return install.publish(
        staged, store.models_dir, "own", name="own", source="hub", report=lambda progress: None
    )
