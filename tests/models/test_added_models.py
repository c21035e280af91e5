"""A folder or file elsewhere on the machine gets a name; LM Studio's and Ollama's models are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_files import COMMIT, make_snapshot
from model_files import gguf_bytes, make_folder, tiny_llama

from fleetd.errors import FleetError, InvalidValue, ModelError, ModelNotFound, ModelRefused
from fleetd.models import added, other_stores
from fleetd.models.model_store import ModelStore
from fleetd.models.other_stores import FoundFile
from fleetd.models.pull import process


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An account in which no other program has kept models."""
    folder = tmp_path / "account"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return folder


def listed(store: ModelStore) -> dict[str, str]:
    return {folder.name: folder.source for folder in store.installed()}


# ---- Folders ---------------------------------------------------------------------------------------------


def test_an_added_folder_is_a_model_like_any_other(store: ModelStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "disk" / "My Model")
    assert store.name_for(folder, "") == "My-Model"
    store.add(folder, "my-model")
    assert listed(store) == {"my-model": "added"}
    found = store.resolve("my-model")
    assert found.path == folder
    # Its path means the same model: one engine, one entry, one digest.
    assert store.resolve(str(folder)).name == "my-model"
    assert store.digest(found) == store.digest(store.resolve(str(folder)))
    store.verify(found)
    assert store.add(folder, "my-model").name == "my-model"


def test_removing_an_added_folder_takes_only_the_name(store: ModelStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    store.add(folder, "one")
    store.digest(store.resolve("one"))
    store.remove("one")
    assert listed(store) == {}
    assert (folder / "config.json").is_file()
    store.add(folder, "two")
    store.remove(str(folder))
    assert listed(store) == {}


def test_an_added_folder_that_is_gone_says_so_and_can_be_removed(store: ModelStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "stick")
    store.add(folder, "away")
    shutil.rmtree(folder)
    assert listed(store) == {}
    with pytest.raises(ModelNotFound, match="was added from") as caught:
        store.resolve("away")
    assert "models remove away" in caught.value.hint
    with pytest.raises(InvalidValue, match="already"):
        store.name_for(make_folder(tmp_path / "other"), "away")
    store.remove("away")
    assert added.links(store.models_dir) == {}


def test_a_snapshot_of_a_cache_may_be_added(store: ModelStore, tmp_path: Path) -> None:
    """Its files are links into the cache's blobs, which only a snapshot may have."""
    snapshot = make_snapshot(tmp_path / "elsewhere", "org/model")
    store.add(snapshot, "cached")
    assert store.resolve("cached").path.name == COMMIT
    store.verify(store.resolve("cached"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3-4b", "catalog"),
        ("org/name", "hub"),
        ("org--name", "hub"),
        ("..", "not the name"),
        ("a/../../b", "not the name"),
        ("x" * 300, "not the name"),
    ],
)
def test_names_that_may_not_be_given(store: ModelStore, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        store.name_for(make_folder(tmp_path / "mine"), name)


def test_a_name_that_is_taken_is_refused(store: ModelStore, tmp_path: Path) -> None:
    make_folder(store.models_dir / "taken")
    with pytest.raises(InvalidValue, match="already"):
        store.name_for(make_folder(tmp_path / "mine"), "taken")
    with pytest.raises(InvalidValue, match="already"):
        store.add(tmp_path / "mine", "taken")


def test_what_is_in_the_models_folder_has_its_name(store: ModelStore) -> None:
    folder = make_folder(store.models_dir / "here")
    with pytest.raises(InvalidValue, match="'here' already"):
        store.add(folder, "there")


def test_a_folder_with_code_is_refused_and_gets_no_name(store: ModelStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    (folder / "modeling.py").write_text("")
    with pytest.raises(ModelRefused):
        store.add(folder, "mine")
    assert added.links(store.models_dir) == {}


def test_neither_a_path_nor_a_known_file(store: ModelStore) -> None:
    with pytest.raises(InvalidValue, match="neither"):
        store.locate("nothing:7b")
    with pytest.raises(ModelNotFound):
        store.add(Path("/no/such/folder"), "x")


# ---- Other programs --------------------------------------------------------------------------------------


def ollama_model(home: Path, name: str, tag: str, content: bytes, namespace: str = "library") -> Path:
    digest = f"{len(content):064x}"
    models = home / ".ollama" / "models"
    manifest = models / "manifests" / "registry.ollama.ai" / namespace / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{1:064x}"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = models / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob


async def test_a_file_of_ollama_is_imported_under_a_name(store: ModelStore, home: Path) -> None:
    content = gguf_bytes(*tiny_llama())
    blob = ollama_model(home, "tiny", "1b", content)
    assert [(file.name, file.program) for file in store.importable()] == [("tiny:1b", "Ollama")]
    place = store.locate("tiny:1b")
    assert isinstance(place, FoundFile)
    name = store.name_for(place, "")
    assert name == "tiny-1b"
    async for _ in store.pull(str(place.path)):
        pass
    assert store.add(place, name).source == "gguf"
    assert listed(store) == {"tiny-1b": "gguf"}
    assert store.importable() == []
    assert store.resolve(str(blob)).name == "tiny-1b"
    assert store.name_for(place, name) == name  # the same command again
    store.remove("tiny-1b")
    assert [entry.name for entry in store.models_dir.iterdir() if not entry.name.startswith(".")] == []
    assert blob.read_bytes() == content


def test_a_name_of_the_catalog_gets_its_program_in_front(store: ModelStore, home: Path) -> None:
    ollama_model(home, "qwen3", "4b", b"GGUF")
    assert store.name_for(store.locate("qwen3:4b"), "") == "ollama-qwen3-4b"


def test_a_folder_of_lm_studio_is_used_where_it_lies(store: ModelStore, home: Path) -> None:
    folder = make_folder(home / ".lmstudio" / "models" / "mlx-community" / "Own-4bit")
    (folder / "tokenizer.json").write_text("{}")
    before = sorted(folder.iterdir())
    assert listed(store) == {"mlx-community/Own-4bit": "lm-studio"}
    assert store.resolve("mlx-community/Own-4bit").path == folder
    assert not store.needs_pull("mlx-community/Own-4bit")
    with pytest.raises(InvalidValue, match="is not in"):
        store.remove("mlx-community/Own-4bit")
    assert sorted(folder.iterdir()) == before


def test_lm_studio_in_a_folder_of_the_users_choice(home: Path, tmp_path: Path) -> None:
    studio, chosen = tmp_path / "studio", tmp_path / "big disk"
    studio.mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{studio}\n")
    (studio / "settings.json").write_text(json.dumps({"downloadsFolder": str(chosen)}))
    folder = chosen / "org" / "model-GGUF"
    folder.mkdir(parents=True)
    for name in (
        "Model-Q4_K_M.gguf",
        "mmproj-Model.gguf",
        "Big-00001-of-00002.gguf",
        "Big-00002-of-00002.gguf",
    ):
        (folder / name).write_bytes(b"GGUF")
    names = [file.name for file in other_stores.gguf_files()]
    assert names == ["Big-00001-of-00002.gguf", "Model-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b'{"layers": 1}',
        b'{"layers": [1, {"mediaType": "application/vnd.ollama.image.model"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
        b"\xff" * 100,
    ],
)
def test_odd_manifests_of_ollama_are_passed_over(home: Path, manifest: bytes) -> None:
    ollama_model(home, "good", "latest", b"GGUF", namespace="someone")
    odd = home / ".ollama/models/manifests/registry.ollama.ai/library/odd/latest"
    odd.parent.mkdir(parents=True)
    odd.write_bytes(manifest)
    assert [file.name for file in other_stores.gguf_files()] == ["someone/good:latest"]


def of_ollama_elsewhere(home: Path, blob: Path) -> None:
    ollama_model(home, "odd", "latest", b"GGUF")
    [own] = (home / ".ollama" / "models" / "blobs").iterdir()
    own.unlink()
    own.symlink_to(blob)


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "a blob that is a device": lambda home, out: of_ollama_elsewhere(home, Path("/dev/zero")),
    "a blob that is no model": lambda home, out: of_ollama_elsewhere(home, out / "secret"),
    "a blob that is a folder": lambda home, out: of_ollama_elsewhere(home, out),
    "a blob that is a link to itself": lambda home, out: of_ollama_elsewhere(home, Path("sha256-0")),
    "manifests that are another's folder": lambda home, out: linked(
        home / ".ollama/models/manifests", str(out)
    ),
    "models that are another's folder": lambda home, out: linked(home / ".lmstudio/models", str(out)),
    "a model that is a folder of folders": lambda home, out: linked(
        home / ".lmstudio/models/pub/m", str(out)
    ),
    "weights elsewhere": lambda home, out: of_lm_studio(home, "model.safetensors", out / "secret"),
    "a tokenizer elsewhere": lambda home, out: of_lm_studio(home, "tokenizer.json", out / "secret"),
    "a GGUF file that is no model": lambda home, out: linked(
        home / ".lmstudio/models/pub/m/x.gguf", str(out / "secret")
    ),
}


def linked(link: Path, target: str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def of_lm_studio(home: Path, name: str, target: Path) -> None:
    folder = make_folder(home / ".lmstudio" / "models" / "pub" / "m")
    (folder / name).unlink()
    (folder / name).symlink_to(target)


@pytest.mark.parametrize("kind", LINKS)
def test_attack_links_out_of_other_programs_stores(
    store: ModelStore, home: Path, tmp_path: Path, kind: str
) -> None:
    """Whatever they lead to is read as a model or refused as none, and nothing of it is written anywhere."""
    out = tmp_path / "out"
    (out / "a" / "b" / "c").mkdir(parents=True)
    (out / "a" / "b" / "c" / "d").write_text("a secret " * 100_000)
    (out / "a" / "b" / "round").symlink_to(out)
    (out / "secret").write_text("a secret " * 100)
    LINKS[kind](home, out)
    for model in store.installed():
        with pytest.raises(ModelError):
            store.verify(model)
    for file in store.importable():
        with pytest.raises(FleetError):
            process.pull(str(file.path), store, lambda progress: None)
    kept = [file for file in store.models_dir.rglob("*") if file.is_file() and file.stat().st_size]
    assert not [file for file in kept if b"secret" in file.read_bytes()]
