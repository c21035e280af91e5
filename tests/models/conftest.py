"""Stores with and without a model that was installed the way downloads install it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hub_files import COMMIT
from model_files import make_folder
from two_machines import SHARDS

from fleetd.models import install
from fleetd.models.copy.messages import CopyOffer, offer_of
from fleetd.models.model_store import ModelStore
from fleetd.models.safetensors_write import PlannedTensor, write_safetensors


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


@pytest.fixture
def there(tmp_path: Path) -> ModelStore:
    """A machine that has the model "own": two shards of 4 MiB and a bit."""
    store = ModelStore(tmp_path / "there", hub_cache=tmp_path / "hub-there")
    staged = make_folder(install.partial_folder(store.models_dir, "own"))
    (staged / "model.safetensors").unlink()
    rng = np.random.default_rng(7)
    for number, name in enumerate(SHARDS):
        values = rng.standard_normal((1 << 20) + 100).astype(np.float32)
        planned = PlannedTensor.whole(f"w{number}", "F32", values.shape, lambda values=values: values)
        write_safetensors(staged / name, [planned])
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    (staged / "model.safetensors.index.json").write_text(json.dumps(index))
    install.publish(
        staged, store.models_dir, "own", name="own", source="hub", revision=COMMIT, report=lambda step: None
    )
    return store


@pytest.fixture
def here(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "here", hub_cache=tmp_path / "hub-here")


@pytest.fixture
def offer(there: ModelStore) -> CopyOffer:
    return offer_of(there, there.resolve("own"))
