"""Which folder a name means, what is listed, what may be removed, and what a digest depends on."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_files import COMMIT, make_snapshot
from mlx_lm import tool_parsers
from model_files import CONFIG, make_folder

from fleetd.errors import InvalidValue, ModelCorrupt, ModelNotFound
from fleetd.limits import GIB, MIB
from fleetd.models import catalog, digest, hub_cache, manifest, weights
from fleetd.models.model_store import ModelStore

# ---- Catalog ---------------------------------------------------------------------------------------------


def test_catalog_serves_every_tier_and_names_nothing_twice() -> None:
    for tier in ("tiny", "small", "standard", "large"):
        assert [e for e in catalog.entries() if e.tier == tier and "chat" in e.roles], tier
    compressors = {e.name for e in catalog.entries() if "compressor" in e.roles and e.memory_bytes <= 2 * GIB}
    assert {"qwen3-0.6b", "qwen3-1.7b", catalog.DEFAULT_MODEL} <= compressors
    names = [name.lower() for e in catalog.entries() for name in (e.name, *e.aliases, e.hub_id or "")]
    given = [name for name in names if name]
    assert len(given) == len(set(given))
    for entry in catalog.entries():
        assert (entry.hub_id is None) == (entry.name in catalog.wheels())
        limit = catalog.TIER_MEMORY_BYTES.get(entry.tier)
        assert limit is None or entry.memory_bytes < limit
        assert 0 < entry.download_bytes < entry.memory_bytes
        assert {*entry.recommended} <= {*entry.roles}


MODEL_TABLE = """
[[models]]
name = "one"
model_type = "llama"
roles = ["chat"]
tier = "tiny"
memory_gib = 1.5
download_gb = 1.25
context_tokens = 8192
note = "a model"
"""


def test_a_model_is_added_by_a_table_of_the_file() -> None:
    [entry] = catalog.parse(f"{MODEL_TABLE}\n[wheels]\n".encode()).models
    assert (entry.name, entry.memory_bytes, entry.source) == ("one", 1536 * MIB, "embedded")
    assert (entry.download_bytes, entry.recommended) == (1_250_000_000, ())
    assert (entry.hub_id, entry.aliases, entry.tools, entry.checked) == (None, (), "", "")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (f"{MODEL_TABLE}thinks = true\n[wheels]", "thinks"),
        (f"{MODEL_TABLE.replace('tiny', 'huge')}\n[wheels]", "huge"),
        (f"{MODEL_TABLE.replace('note', '#')}\n[wheels]", "note"),
        (f'{MODEL_TABLE}\n[wheels.one]\nfile = "one.gguf"', "file"),
        (f"{MODEL_TABLE}\n[wheels]\n[wheel]", "wheel"),
    ],
)
def test_a_key_or_value_that_the_catalog_does_not_have_is_refused_by_name(table: str, named: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=named):
        catalog.parse(table.encode())


def test_every_way_to_write_tool_calls_in_the_catalog_is_known() -> None:
    parsers = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}
    # Those of fleetd/engine/answer/tool_formats.py.
    parsers |= {"llama3", "harmony", "deepseek_v32"}
    assert {entry.tools for entry in catalog.entries() if entry.tools} <= parsers


def test_a_draft_of_the_catalog_is_a_smaller_model_that_drafts() -> None:
    for entry in catalog.entries():
        if entry.draft:
            draft = catalog.find(entry.draft)
            assert draft is not None
            assert "draft" in draft.roles or draft.memory_bytes * 4 < entry.memory_bytes, entry.name
            assert draft.memory_bytes < entry.memory_bytes
            assert draft.tools == entry.tools or entry.tools == "qwen3_coder", entry.name


@pytest.mark.parametrize(
    ("memory_bytes", "tier"),
    [
        (8 * GIB, "tiny"),
        (16 * GIB, "tiny"),
        (16 * GIB + 1, "small"),
        (96 * GIB, "standard"),
        (512 * GIB, "large"),
    ],
)
def test_tiers(memory_bytes: int, tier: str) -> None:
    assert catalog.tier_of(memory_bytes) == tier


def test_aliases_hub_ids_and_letter_case_mean_the_entry() -> None:
    for name in ("qwen3-0.6b", "Qwen3-0.6B", "mlx-community/Qwen3-0.6B-4bit"):
        entry = catalog.find(name)
        assert entry is not None
        assert entry.name == "qwen3-0.6b"
    assert catalog.find("qwen3") is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("smolm2-135m", "smollm2-135m"),
        ("qwen3-0.6", "qwen3-0.6b"),
        ("mlx-community/Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
    ],
)
def test_nearest_names(typed: str, meant: str) -> None:
    assert meant in catalog.nearest(typed)


def test_a_name_like_no_other_has_no_nearest() -> None:
    assert catalog.nearest("mine") == []


# ---- Resolution ------------------------------------------------------------------------------------------


def test_order_is_models_folder_before_hub_cache(store: ModelStore, tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "hub", "mlx-community/Qwen3-0.6B-4bit")
    found = store.resolve("qwen3-0.6b")
    assert (found.path, found.source, found.revision, found.name) == (snapshot, "hub", COMMIT, "qwen3-0.6b")
    assert store.resolve("mlx-community/Qwen3-0.6B-4bit") == found
    own = make_folder(store.models_dir / "qwen3-0.6b")
    assert store.resolve("mlx-community/Qwen3-0.6B-4bit").path == own
    assert store.resolve("mlx-community/Qwen3-0.6B-4bit").name == "qwen3-0.6b"


def test_every_place_a_folder_may_lie(store: ModelStore, tmp_path: Path) -> None:
    make_folder(store.models_dir / "mine")
    make_folder(store.models_dir / "org" / "nested")
    outside = make_folder(tmp_path / "elsewhere")
    assert store.resolve("mine").source == "folder"
    assert store.resolve("org/nested").name == "org/nested"
    assert store.resolve(str(outside)).path == outside
    assert store.resolve(str(outside)).name == str(outside)
    assert store.resolve(str(store.models_dir / "mine")) == store.resolve("mine")
    assert [model.name for model in store.installed()] == ["mine", "org/nested"]
    for model in store.installed():
        assert store.resolve(model.name) == model


def test_facts_of_a_folder(store: ModelStore, installed: Path) -> None:
    found = store.resolve("own")
    assert found.architecture == "llama"
    assert found.context_tokens == 128
    assert found.weights_bytes == (installed / "model.safetensors").stat().st_size
    assert found.source == "hub"


def test_unknown_name_offers_the_nearest_and_known_name_says_pull(store: ModelStore) -> None:
    make_folder(store.models_dir / "my-model")
    with pytest.raises(ModelNotFound) as caught:
        store.resolve("my-modle")
    assert "my-model" in caught.value.hint
    with pytest.raises(ModelNotFound, match="pull qwen3-8b"):
        store.resolve("qwen3-8b")
    with pytest.raises(ModelNotFound):
        store.resolve("zzzzzz")
    assert store.needs_pull("qwen3-8b")
    assert store.needs_pull("any-org/any-model")
    assert not store.needs_pull("my-model")
    assert not store.needs_pull("zzzzzz")
    assert not store.needs_pull("../zzz")


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "a/../b",
        "..",
        ".",
        "a/b/c",
        ".hidden",
        "a/.hidden",
        "-rf",
        "a\x00b",
        "a b",
        "",
        "a" * 201,
        "a//b",
        "a--b/c",
        "a/",
    ],
)
def test_path_traversal_in_a_name_is_refused(store: ModelStore, tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "secret")
    make_folder(store.models_dir / ".hidden")
    with pytest.raises(InvalidValue):
        store.resolve(name)
    with pytest.raises(InvalidValue):
        store.remove(name)


def test_a_path_without_a_model_is_no_broken_model(store: ModelStore, tmp_path: Path) -> None:
    """Nobody can pull it again, which is what a broken one is told to be."""
    for path, why in ((tmp_path, "no model in"), (tmp_path / "nothing", "no folder")):
        with pytest.raises(ModelNotFound, match=why) as caught:
            store.resolve(str(path))
        assert caught.value.hint == "Give a folder that holds config.json and *.safetensors."


def test_manifest_cannot_lend_a_folder_another_name(store: ModelStore, installed: Path) -> None:
    known = manifest.load(installed / manifest.FILE_NAME)
    assert known is not None
    manifest.save(manifest.Manifest("smollm2-135m", "embedded", known.files), installed / manifest.FILE_NAME)
    assert [model.name for model in store.installed()] == ["own"]


def test_folder_that_cannot_be_read_is_left_out_of_the_list(store: ModelStore, installed: Path) -> None:
    (make_folder(store.models_dir / "broken") / "config.json").write_text("{")
    assert [model.name for model in store.installed()] == ["own"]
    with pytest.raises(ModelCorrupt):
        store.resolve("broken")


# ---- Hub cache -------------------------------------------------------------------------------------------


def test_a_drafter_in_the_hub_cache_needs_no_tokenizer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    assert not hub_cache.is_complete(folder)
    for more in ({"dflash_config": {}}, {"model_type": "gemma4_assistant"}):
        (folder / "config.json").write_text(json.dumps(CONFIG | more))
        assert hub_cache.is_complete(folder)


def test_hub_cache_location() -> None:
    home = Path.home()
    assert hub_cache.location({}) == home / ".cache/huggingface/hub"
    assert hub_cache.location({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_cache.location({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/hub")
    assert hub_cache.location({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")


def test_incomplete_snapshot_is_not_used(store: ModelStore, tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "hub", "org/name")
    assert [model.name for model in store.installed()] == ["org/name"]
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(ModelNotFound, match="pull org/name"):
        store.resolve("org/name")
    assert store.installed() == []
    assert store.needs_pull("org/name")


def test_shards_without_all_their_files_are_incomplete(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path, "org/name")
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    assert not hub_cache.is_complete(snapshot)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / weights.INDEX_NAME).write_text(json.dumps(index))
    assert not hub_cache.is_complete(snapshot)
    shutil.copy(snapshot / "model-00001-of-00002.safetensors", snapshot / "model-00002-of-00002.safetensors")
    assert hub_cache.is_complete(snapshot)


def test_main_of_the_cache_wins_over_a_newer_snapshot_and_may_not_leave_it(tmp_path: Path) -> None:
    main = make_snapshot(tmp_path, "org/name", "a" * 40)
    other = make_snapshot(tmp_path, "org/name", "b" * 40, main=False)
    os.utime(main, (1, 1))
    assert hub_cache.snapshot(tmp_path, "org/name") == main
    assert hub_cache.snapshot(tmp_path, "org/name", "b" * 40) == other
    (tmp_path / "models--org--name/refs/main").write_text("../../elsewhere")
    assert hub_cache.snapshot(tmp_path, "org/name") == other


# ---- Removing --------------------------------------------------------------------------------------------


def test_remove_deletes_only_what_lies_in_the_models_folder(
    store: ModelStore, installed: Path, tmp_path: Path
) -> None:
    store.remove("own")
    assert not installed.exists()
    assert list((store.models_dir / ".partial").iterdir()) == []
    snapshot = make_snapshot(tmp_path / "hub", "org/name")
    with pytest.raises(InvalidValue, match="hf cache rm"):
        store.remove("org/name")
    outside = make_folder(tmp_path / "elsewhere")
    with pytest.raises(InvalidValue, match="yourself"):
        store.remove(str(outside))
    (store.models_dir / "linked").symlink_to(outside)
    store.remove("linked")
    assert not (store.models_dir / "linked").is_symlink()
    assert snapshot.exists()
    assert (outside / "config.json").exists()


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_model_can_be_removed(store: ModelStore, installed: Path, content: str) -> None:
    (installed / "config.json").write_text(content)
    store.remove("own")
    assert not installed.exists()


# ---- Digest ----------------------------------------------------------------------------------------------


def test_digest_depends_on_content_alone(store: ModelStore, installed: Path, tmp_path: Path) -> None:
    first = store.digest(store.resolve("own"))
    copy = tmp_path / "another-name"
    shutil.copytree(installed, copy)
    (copy / manifest.FILE_NAME).unlink()
    (copy / "notes.md").write_text("x")
    os.utime(copy / "model.safetensors", (1, 1))
    assert store.digest(store.resolve(str(copy))) == first
    assert len(str(first)) == 64

    (copy / "tokenizer.json").write_text('{"a": 1}')
    changed = store.digest(store.resolve(str(copy)))
    assert (changed.weights, changed.config) == (first.weights, first.config)
    assert changed.tokenizer != first.tokenizer
    assert changed.hex != first.hex
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert store.digest(store.resolve(str(copy))).config != first.config


def test_digest_hashes_only_what_changed(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.resolve(str(make_folder(tmp_path / "m")))
    hashed: list[str] = []
    real = manifest.hash_file

    def spy(path: Path, progress: Any) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(manifest, "hash_file", spy)
    first = store.digest(folder)
    assert len(hashed) == 4
    hashed.clear()
    assert store.digest(folder) == first
    assert hashed == []
    (folder.path / "tokenizer.json").touch()
    assert store.digest(folder) == first
    assert hashed == ["tokenizer.json"]


def test_installed_model_needs_no_hashing_for_its_digest(
    store: ModelStore, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "hash_file", lambda path, progress: pytest.fail(f"hashed {path}"))
    store.digest(store.resolve("own"))


def test_damaged_digest_cache_is_made_again(store: ModelStore, tmp_path: Path) -> None:
    folder = store.resolve(str(make_folder(tmp_path / "m")))
    first = store.digest(folder)
    store.record_path(folder).write_text("{")
    assert store.digest(folder) == first


def test_a_digest_is_remembered_only_while_no_file_has_changed(
    store: ModelStore, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.resolve(str(make_folder(tmp_path / "m")))
    record = store.record_path(folder)
    assert digest.remembered(folder.path, record) == ""
    whole = str(store.digest(folder))
    own = str(store.digest(store.resolve("own")))
    monkeypatch.setattr(manifest, "hash_file", lambda path, progress: pytest.fail(f"hashed {path}"))
    assert digest.remembered(folder.path, record) == whole
    assert digest.remembered(installed, None) == own
    (folder.path / "tokenizer.json").touch()
    assert digest.remembered(folder.path, record) == ""
    record.write_text("{")
    assert digest.remembered(folder.path, record) == ""


def test_two_threads_may_save_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a model is verified while its files are hashed in the background."""
    record, both = tmp_path / "records" / "one.json", threading.Barrier(2, timeout=30)
    flush = os.fsync

    def together(fd: int) -> None:
        both.wait()
        flush(fd)

    monkeypatch.setattr(manifest.os, "fsync", together)
    with ThreadPoolExecutor(2) as threads:
        saved = [
            threads.submit(manifest.save, manifest.Manifest(name, "hub", {}), record) for name in ("a", "b")
        ]
        assert [each.result() for each in saved] == [None, None]
    found = manifest.load(record)
    assert found is not None
    assert found.name in ("a", "b")
    assert list(record.parent.iterdir()) == [record]
