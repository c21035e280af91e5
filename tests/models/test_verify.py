"""Poisoned and damaged model folders: each is refused with the file's name before anything loads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hub_files import make_snapshot
from model_files import make_folder, write_weights

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import manifest
from fleetd.models.model_store import ModelStore
from fleetd.models.verify import verify


def test_sound_folder_passes(tmp_path: Path) -> None:
    verify(make_folder(tmp_path / "m"))


# ---- Code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "modeling_x.py",
        "sub/evil.PY",
        "native.so",
        "pytorch_model.bin",
        "x.pt",
        "x.pth",
        "x.ckpt",
        "x.pkl",
        "w.npz",
    ],
)
def test_code_or_pickle_in_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(ModelRefused, match=Path(name).name):
        verify(folder)


def test_a_drafter_may_name_its_publishers_code_which_is_never_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "d", dflash_config={}, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    verify(folder)
    (folder / "dflash.py").write_text("")
    with pytest.raises(ModelRefused, match="code"):
        verify(folder)


@pytest.mark.parametrize(
    "file",
    # The last two are the first two to a file system that does not tell capitals apart.
    ["config.json", "tokenizer_config.json", "processor_config.json", "Config.JSON", "Tokenizer_Config.json"],
)
@pytest.mark.parametrize(
    "poison",
    [
        {"auto_map": {"AutoModel": "modeling.Evil"}},
        {"model_file": "evil.py"},
        {"trust_remote_code": True},
        {"text_config": {"auto_map": {}}},
        {"layers": [{"model_file": "evil.py"}]},
    ],
    ids=lambda poison: next(iter(poison)),
)
def test_config_that_names_code_is_refused(tmp_path: Path, file: str, poison: dict[str, Any]) -> None:
    folder = make_folder(tmp_path / "m")
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | poison))
    with pytest.raises(ModelRefused, match=file):
        verify(folder)


def test_trust_remote_code_false_is_harmless(tmp_path: Path) -> None:
    verify(make_folder(tmp_path / "m", trust_remote_code=False))


@pytest.mark.parametrize("model_type", ["os.path", "../evil", "", None, 3, "a" * 65])
def test_model_type_that_would_import_something_else_is_corrupt(tmp_path: Path, model_type: Any) -> None:
    with pytest.raises(ModelCorrupt, match="model_type"):
        verify(make_folder(tmp_path / "m", model_type=model_type))


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "vocab.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelRefused, match=r"vocab\.json"):
        verify(folder)


def test_folder_named_like_a_cache_does_not_open_the_way_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "snapshots" / "m")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "vocab.json").symlink_to("../../blobs/../secret.json")
    with pytest.raises(ModelRefused, match=r"vocab\.json"):
        verify(folder)


def test_link_to_nothing_in_a_circle_or_to_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    link = folder / "vocab.json"
    link.symlink_to("missing")
    with pytest.raises(ModelCorrupt, match=r"vocab\.json"):
        verify(folder)
    link.unlink()
    link.symlink_to("vocab.json")
    with pytest.raises(ModelCorrupt, match=r"vocab\.json"):
        verify(folder)
    link.unlink()
    (folder / "loop").symlink_to(".")
    with pytest.raises(ModelRefused, match="loop"):
        verify(folder)


def test_pipe_in_the_folder_is_refused_not_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    os.mkfifo(folder / "special_tokens_map.json")
    with pytest.raises(ModelRefused, match="special_tokens_map"):
        verify(folder)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "m")
    monkeypatch.setattr(limits, "MODEL_FILES", 4)
    verify(folder)
    (folder / "one-more.txt").touch()
    with pytest.raises(ModelRefused, match="4 files"):
        verify(folder)


# ---- Inconsistency ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 100_000, b'{"model_type": "llama", "hidden_size": -1}'],
)
def test_config_that_is_no_config_is_corrupt(tmp_path: Path, content: bytes) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        verify(folder)


@pytest.mark.parametrize(
    "poison",
    [
        {"vocab_size": 1 << 40},
        {"num_hidden_layers": True},
        {"text_config": {"hidden_size": 0.5}},
        {"n_layer": 10**9},
        {"n_layers": 5000},
        {"decoder": {"num_blocks": 10**9}},
        {"text_config": {"num_local_experts": 10**9}},
        {"quantization": {"bits": 4096}},
        {"quantization": {"model.layers.0": {"bits": 0}}},
    ],
    ids=str,
)
def test_insane_numbers_in_config_are_corrupt(tmp_path: Path, poison: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        verify(make_folder(tmp_path / "m", **poison))


def test_config_over_the_limit_is_corrupt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    raw = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(raw + b" " * (limits.MODEL_CONFIG_BYTES - len(raw)))
    verify(folder)
    (folder / "config.json").write_bytes(raw + b" " * (limits.MODEL_CONFIG_BYTES - len(raw) + 1))
    with pytest.raises(ModelCorrupt, match="limit"):
        verify(folder)


def sharded(folder: Path, mapping: dict[str, str]) -> Path:
    make_folder(folder)
    (folder / "model.safetensors").unlink()
    write_weights(folder / "model-00001-of-00002.safetensors", "a")
    write_weights(folder / "model-00002-of-00002.safetensors", "b")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shards_and_their_index(tmp_path: Path) -> None:
    verify(sharded(tmp_path / "sound", {"a": ONE, "b": TWO}))
    # mlx-lm reads both, whatever the index says.
    verify(sharded(tmp_path / "other", {"a": ONE, "b": ONE, "c": TWO}))
    with pytest.raises(ModelCorrupt, match="model-00003"):
        verify(sharded(tmp_path / "missing", {"a": ONE, "b": "model-00003-of-00003.safetensors"}))
    with pytest.raises(ModelCorrupt, match="weight_map"):
        verify(sharded(tmp_path / "empty", {}))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "model.bin"])
def test_index_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelRefused, match="plain file name"):
        verify(sharded(tmp_path / "m", {"a": name}))


def test_one_tensor_in_two_shards_is_corrupt(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {"a": ONE, "b": TWO})
    write_weights(folder / TWO, "a", "b")
    with pytest.raises(ModelCorrupt, match="'a' is in"):
        verify(folder)


def test_attack_a_damaged_file_in_capitals_is_corrupt(tmp_path: Path) -> None:
    """A file system that does not tell capitals apart gives it to whoever opens mtp.safetensors."""
    folder = make_folder(tmp_path / "m")
    (folder / "mtp.SAFETENSORS").write_bytes(b"noise")
    with pytest.raises(ModelCorrupt, match=r"mtp\.SAFETENSORS"):
        verify(folder)


def test_no_weights_are_corrupt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match="no weights"):
        verify(folder)


# ---- Damage after installation ---------------------------------------------------------------------------


def flip_bit(file: Path, *, keep_stat: bool = False) -> None:
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-5, 2)
        byte = stream.read(1)[0]
        stream.seek(-5, 2)
        stream.write(bytes([byte ^ 4]))
    if keep_stat:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_truncated_weights_are_named(installed: Path) -> None:
    verify(installed)
    file = installed / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors") as caught:
        verify(installed)
    assert "pull" in caught.value.hint


@pytest.mark.parametrize("keep_stat", [False, True])
def test_one_flipped_bit_is_named(installed: Path, keep_stat: bool) -> None:
    flip_bit(installed / "model.safetensors", keep_stat=keep_stat)
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors has changed"):
        verify(installed)


def test_large_model_is_hashed_again_when_its_stat_changed_or_when_asked(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MODEL_REHASH_BYTES", 10)
    flip_bit(installed / "model.safetensors", keep_stat=True)
    verify(installed)  # what a large model costs to know is not paid at every load
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        verify(installed, full=True)
    (installed / "model.safetensors").touch()
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        verify(installed)


def test_missing_changed_or_added_parts_are_named(installed: Path) -> None:
    (installed / "chat_template.jinja").write_text("{{ evil }}")
    with pytest.raises(ModelCorrupt, match=r"chat_template\.jinja"):
        verify(installed)
    (installed / "chat_template.jinja").unlink()
    (installed / "notes.md").write_text("a note of the user's own does no harm")
    verify(installed)
    (installed / "tokenizer.json").unlink()
    with pytest.raises(ModelCorrupt, match=r"tokenizer\.json is missing"):
        verify(installed)


def test_a_head_that_drafts_may_be_laid_beside_an_installed_model(installed: Path) -> None:
    write_weights(installed / "mtp.safetensors", "mtp.fc.weight")
    verify(installed)
    (installed / "mtp2.safetensors").write_bytes((installed / "mtp.safetensors").read_bytes())
    with pytest.raises(ModelCorrupt, match="mtp2"):
        verify(installed)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"name":"own","source":"hub","files":{"../x.json":{}}}'])
def test_damaged_manifest_is_named(installed: Path, content: bytes) -> None:
    (installed / manifest.FILE_NAME).write_bytes(content)
    with pytest.raises(ModelCorrupt, match=manifest.FILE_NAME):
        verify(installed)


def test_manifest_cannot_reach_outside_the_folder(installed: Path) -> None:
    known = manifest.load(installed / manifest.FILE_NAME)
    assert known is not None
    files = known.files | {"../../secret.json": known.files["config.json"]}
    manifest.save(manifest.Manifest("own", "hub", files), installed / manifest.FILE_NAME)
    with pytest.raises(ModelCorrupt, match="secret"):
        verify(installed)


def test_hub_cache_blobs_are_checked_against_their_names(store: ModelStore, tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "hub", "org/name")
    verify(snapshot, full=True)
    folder = store.resolve("org/name")
    store.verify(folder, full=True)
    flip_bit((snapshot / "model.safetensors").resolve())
    verify(snapshot)  # structure is sound, and nothing was recorded
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        verify(snapshot, full=True)


def test_hub_cache_model_that_changed_since_it_was_recorded_is_named(
    store: ModelStore, tmp_path: Path
) -> None:
    snapshot = make_snapshot(tmp_path / "hub", "org/name")
    folder = store.resolve("org/name")
    store.digest(folder)
    store.verify(folder)
    flip_bit((snapshot / "model.safetensors").resolve())
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        store.verify(folder)
    before = {file.name for file in snapshot.iterdir()}
    assert before == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
