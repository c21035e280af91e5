"""Image encoders in models' folders, of each family: found, quantised, torn, or left out."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
import seeing_gemma
import seeing_model
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config
from safetensors.numpy import save_file
from seer import Seer

from fleetd.engine.vision.image_file import read_image
from fleetd.engine.vision.reader_files import read_image_reader
from fleetd.errors import ModelUnsupported
from fleetd.models.folder import read_folder

pytestmark = pytest.mark.usefixtures("on_cpu")
# Weights without which there is no encoder, by the family's tiny model.
NEEDED: dict[ModuleType, list[str]] = {
    seeing_model: ["vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"],
    seeing_gemma: [
        "vision_tower.post_layernorm.bias",
        "multi_modal_projector.mm_input_projection_weight",
    ],
}


@pytest.fixture(scope="module", params=NEEDED, ids=lambda family: family.__name__)
def family(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


@pytest.fixture(scope="module")
def seer(family: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.on_cpu(family.write, tmp_path_factory.mktemp("seer") / "seer")


def vocab(seer: Seer) -> int:
    return int(seer.config["text_config"]["vocab_size"])


def test_a_folder_says_whether_its_model_reads_images(family: ModuleType, seer: Seer, tmp_path: Path) -> None:
    def found(path: Path) -> bool:
        return read_folder(path, name="m", source="folder", revision=None).shape.images

    assert found(seer.path)
    bare = family.write(tmp_path / "bare", vision=False)
    assert not found(bare)
    assert read_image_reader(bare, load_config(bare)) is None


def test_quantised_weights_are_read_as_they_lie_there(family: ModuleType, seer: Seer, tmp_path: Path) -> None:
    path = family.write(tmp_path / "packed")
    reader = read_image_reader(path, seer.config)
    assert reader is not None
    nn.quantize(reader, group_size=32, bits=8, class_predicate=lambda name, _: name.endswith("q_proj"))
    weights = {f"model.{name}": array for name, array in tree_flatten(reader.parameters())}
    mx.save_safetensors(str(path / "model-vision.safetensors"), weights)
    save_file(family.text_weights(vocab(seer)), path / "model.safetensors")
    again = read_image_reader(path, seer.config | {"quantization": {"group_size": 32, "bits": 8}})
    assert again is not None
    patches = seer.reader.patches(read_image(seeing_model.picture(1), "image"))
    assert mx.allclose(again(patches), reader(patches), atol=1e-5)


@pytest.mark.parametrize("number", [0, 1], ids=["encoder", "projector"])
def test_weights_that_are_missing_are_named(
    family: ModuleType, seer: Seer, tmp_path: Path, number: int
) -> None:
    lack = NEEDED[family][number]
    path = family.write(tmp_path / "torn")
    every = family.text_weights(vocab(seer)) | family.vision_weights()
    left = {name: each for name, each in every.items() if name.replace(".vision_model.", ".") != lack}
    assert len(left) == len(every) - 1
    save_file(left, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=lack):
        read_image_reader(path, seer.config)
