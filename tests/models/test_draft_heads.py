"""A head is found by the names of its tensors, in the model's files or beside them, and needs memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import make_folder, write_weights

from fleetd.models import heads
from fleetd.models.folder import read_config, read_folder
from fleetd.models.heads import head_file
from fleetd.models.memory_need import WeightRules, needed_bytes


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "model.language_model.mtp.pre_fc_norm_hidden.weight",
        "model.layers.1.eh_proj.weight",
        "model.mtp_layers.0.input_proj.weight",
        "mtp.layers.0.eh_proj.weight",
        "language_model.mtp.layers.1.final_layernorm.weight",
    ],
)
def test_a_head_in_the_models_own_files_is_found_by_each_familys_names(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m")
    assert head_file(folder, read_config(folder)) == ""
    write_weights(folder / "model.safetensors", "a.weight", "b.weight", name, "more.of.another.length")
    assert head_file(folder, read_config(folder)) == "model.safetensors"


def test_a_layer_of_the_model_is_no_head(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", num_hidden_layers=2)
    write_weights(folder / "model.safetensors", "model.layers.1.eh_proj.weight", "mtp_other.fc.weight")
    assert head_file(folder, read_config(folder)) == ""


def test_a_head_beside_the_weights_goes_before_them_and_needs_memory_with_its_rows(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=2)
    rules = WeightRules("metal")
    before = needed_bytes(read_folder(folder, name="m", source="folder", revision=None), rules)
    write_weights(folder / "mtp.safetensors", "mtp.fc.weight", "mtp.norm.weight")
    assert head_file(folder, read_config(folder)) == "mtp.safetensors"
    after = needed_bytes(read_folder(folder, name="m", source="folder", revision=None), rules)
    # Two tensors of 64 numbers; keys and values of 2 heads of 8 numbers, in 16 bits.
    assert after - before == 2 * 64 * 4 + heads.ROWS * 2 * 2 * 8 * 2


def test_a_file_beside_the_weights_that_is_not_sound_needs_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    rules = WeightRules("metal")
    before = needed_bytes(read_folder(folder, name="m", source="folder", revision=None), rules)
    (folder / "mtp.safetensors").write_bytes(b"none")
    assert needed_bytes(read_folder(folder, name="m", source="folder", revision=None), rules) == before
