"""A machine that has the files of some layers only loads these, and gives the bytes of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from model_parts import part_of
from tiny_architectures import FAMILIES, LONG, tiny, write

from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.stage_loading import LoadedStage, load_stage
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import ModelCorrupt
from fleetd.models import layer_files
from fleetd.models.memory_need import WORKING_BYTES

pytestmark = pytest.mark.usefixtures("cpu_installed")


def load(path: Path, first: int, last: int, **settings: Any) -> LoadedStage:
    given = WorkerSettings(name="tiny", path=str(path), **settings)
    return load_stage(given, "cpu", lambda _: None, first=first, last=last, head=False)


def run(loaded: LoadedStage) -> Any:
    stage = loaded.stage
    hidden = mx.random.normal((1, 6, stage.width), key=mx.random.key(1))
    tokens = mx.random.randint(0, 200, (1, 6), key=mx.random.key(2))
    return np.array(stage.run(hidden, stage.make_caches(), stage.inputs(tokens, 0)))


@pytest.mark.parametrize(
    "name",
    [
        *sorted(set(FAMILIES) - set(LONG)),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_any_family_is_loaded_from_the_files_of_its_layers(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "whole", name)
    model = tiny(name)
    sources, total = Stage.of(model).sources, len(model.layers)
    first = total // 2
    if min(sources[first:]) < first:
        pytest.skip("its later layers read what earlier ones keep")
    part = part_of(path, tmp_path, first, total)
    loaded = load(part, first, total)
    assert not {"norm", "lm_head"} & set(loaded.stage.weights)
    assert np.array_equal(run(loaded), run(load(path, first, total)))
    # As a group has it, whose part may be smaller than what is loaded.
    loaded.stage.part(total - 1, total)


def test_tensors_that_are_not_there_are_never_taken_for_zeros(tmp_path: Path) -> None:
    path = part_of(write(tmp_path / "whole", "llama"), tmp_path, 2, 4)
    with pytest.raises(ModelCorrupt, match=r"Layers 1 to 3 .* not in"):
        load(path, 1, 3)


@pytest.mark.parametrize("setting", ["auto", "int8"])
def test_a_part_is_held_as_the_whole_model_would_be(tmp_path: Path, setting: Any) -> None:
    path = write(tmp_path / "whole", "llama", bits=4)
    # Room for the part in f32, and not for the whole.
    room = {"max_memory_bytes": WORKING_BYTES + 1_500_000, "cpu_arithmetic": setting}
    part = part_of(path, tmp_path, 2, 4)
    assert load(part, 2, 4, **room).arithmetic == load(path, 2, 4, **room).arithmetic == "int8"


def test_ends_come_only_to_layers_that_need_them(tmp_path: Path) -> None:
    assert not layer_files.files_of(write(tmp_path / "llama", "llama")).ends_everywhere
    assert layer_files.files_of(write(tmp_path / "gemma3n", "gemma3n")).ends_everywhere
