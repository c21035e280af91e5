"""A machine that has the files of some layers only loads these, and gives the bytes of the whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_architectures import FAMILIES, LONG, tiny, write

from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.stage_loading import LoadedStage, load_stage
from fleetd.engine.settings import WorkerSettings
from fleetd.models import layer_files

pytestmark = pytest.mark.usefixtures("cpu_installed")


def part_of(whole: Path, root: Path, first: int, last: int) -> Path:
    """A folder with the files of layers [first, last), as a copy from another machine leaves them."""
    place = root / layer_files.PARTS / f"{first}-{last}"
    place.mkdir(parents=True)
    shutil.copy(whole / "config.json", place)
    found = layer_files.files_of(whole)
    names = [layer_files.TABLE_NAME, *(layer_files.name_of(layer) for layer in range(first, last))]
    if found.ends_everywhere:
        names.append(layer_files.ENDS_NAME)
    buffer = memoryview(bytearray(1000))
    for name in names:
        (place / name).write_bytes(b"".join(bytes(each) for each in found.files[name].pieces(0, buffer)))
    return place


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
