"""Folders as publishers leave them: Python's own JSON, marks before it, old indices, odd names of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_files import Hub, git_sha1, make_snapshot, serving
from model_files import make_folder, write_weights
from msgspec import msgpack
from two_machines import copied

from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import hub_cache, install
from fleetd.models.copy.messages import check, digest_of, offer_of
from fleetd.models.heads import head_file
from fleetd.models.json_files import read_json
from fleetd.models.memory_need import WeightRules, needed_bytes
from fleetd.models.model_store import ModelStore
from fleetd.models.verify import verify
from fleetd.models.weights import INDEX_NAME, missing_weights, unused_files

MARK = b"\xef\xbb\xbf"


# ---- JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"time_step_limit": [0.0, Infinity]}',
        '{"low": -Infinity, "none": NaN, "note": "NaN, Infinity"}',
        '{"\\u00e9": "\\ud83d\\ude00", "none": NaN}',
        '{"plain": 1}',
    ],
)
@pytest.mark.parametrize("mark", [b"", MARK], ids=["", "marked"])
def test_what_python_reads_is_read_and_no_mark_is_a_part_of_it(
    tmp_path: Path, text: str, mark: bytes
) -> None:
    (tmp_path / "x.json").write_bytes(mark + text.encode())
    assert repr(read_json(tmp_path / "x.json", 1000)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        MARK,
        b"[NaN]",
        b"NaN",
        b'{"a": nan}',
        b'{"a": Infinite}',
        b'{"a": +Infinity}',
        b'{"a": NaN',
        b'{"a": "\xff", "b": NaN}',
        # Half of a character could be put into no answer.
        b'{"a": "\\ud83d", "b": NaN}',
        MARK + MARK + b"{}",
        b'{"a": NaN, "b": ' + b"[" * 100_000,
        b'{"a": NaN, "b": ' + b"9" * 100_000 + b"}",
        '{"a": NaN}'.encode("utf-16"),
    ],
)
def test_what_is_no_json_stays_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(ModelCorrupt, match=r"x\.json"):
        read_json(tmp_path / "x.json", 1 << 20)


def as_published(folder: Path) -> Path:
    """A sound model whose small files are written as some publishers write them."""
    for name, more in (
        ("config.json", '"time_step_limit": [0.0, Infinity], "x": -Infinity'),
        ("generation_config.json", '"temperature": NaN'),
        ("tokenizer_config.json", '"model_max_length": Infinity'),
        (INDEX_NAME, '"weight_map": {"a.weight": "model.safetensors"}, "metadata": {"x": NaN}'),
    ):
        file = folder / name
        own = json.loads(file.read_text()) if file.exists() else {}
        raw = json.dumps(own).removesuffix("}").encode() + (b", " if own else b"") + more.encode() + b"}"
        file.write_bytes(MARK + raw)
    return folder


def sound(folder: Path) -> Path:
    """A sound model with a file that every rule here concerns."""
    return as_published(make_folder(folder))


def snapshot_of(cache: Path, made: Path) -> Path:
    """The model as it lies in the hub's cache."""
    snapshot = make_snapshot(cache, "org/odd")
    for link in snapshot.iterdir():
        link.unlink()
    for file in made.iterdir():
        blob = snapshot.parent.parent / "blobs" / git_sha1(file.read_bytes())
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


# ---- Weights ---------------------------------------------------------------------------------------------

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def indexed(folder: Path, **files: str) -> Path:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    return folder


def with_weights(folder: Path, *files: str) -> Path:
    """The folder with these files of weights, a tensor in each, and no other."""
    make_folder(folder)
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(files):
        write_weights(folder / name, f"t{number}")
    return folder


WHOLE: dict[str, Callable[[Path], Path]] = {
    "one file": lambda at: with_weights(at, "model.safetensors"),
    "one file and the index of the shards it was made of": lambda at: indexed(
        with_weights(at, "model.safetensors"), t0=ONE, t1=TWO
    ),
    "shards and their index": lambda at: indexed(with_weights(at, ONE, TWO), t0=ONE, t1=TWO),
    "shards without an index": lambda at: with_weights(at, ONE, TWO),
    "shards and the index of others": lambda at: indexed(
        with_weights(at, ONE, TWO),
        t0="model-00001-of-00003.safetensors",
        x="model-00003-of-00003.safetensors",
    ),
    "shards that were cut elsewhere than the index says": lambda at: indexed(
        with_weights(at, ONE, TWO), t0=TWO, t1=ONE, gone=ONE
    ),
    "odd names": lambda at: indexed(
        with_weights(at, "model-a.safetensors", "model_b.safetensors"),
        t0="model-a.safetensors",
        t1="model_b.safetensors",
    ),
    "odd names without an index": lambda at: with_weights(at, "model-a.safetensors", "modelb.safetensors"),
    "weights of another program beside them": lambda at: with_weights(
        at, "model.safetensors", "consolidated.safetensors"
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_weights_that_mlx_lm_reads_whole_are_whole(tmp_path: Path, kind: str) -> None:
    folder = WHOLE[kind](tmp_path / "m")
    verify(folder)
    assert missing_weights(folder) == ""
    assert hub_cache.is_complete(folder)


@pytest.mark.parametrize(
    ("files", "index", "missing"),
    [
        ([ONE], {}, TWO),
        ([TWO], {}, ONE),
        ([ONE], {"t0": ONE, "t1": TWO}, TWO),
        (["model-a.safetensors"], {"a": "model-a.safetensors", "b": "model-b.safetensors"}, "model-b"),
        ([ONE, TWO], {"a": ONE, "b": "model-extra.safetensors"}, "model-extra"),
        (["model.safetensors", ONE], {}, TWO),
    ],
)
def test_a_file_of_weights_that_lacks_is_named(
    tmp_path: Path, files: list[str], index: dict[str, str], missing: str
) -> None:
    folder = with_weights(tmp_path / "m", *files)
    if index:
        indexed(folder, **index)
    with pytest.raises(ModelCorrupt, match=f"{missing}.*is missing"):
        verify(folder)
    assert not hub_cache.is_complete(folder)


def test_two_sets_of_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "m", "model.safetensors")
    for shard in (ONE, TWO):
        write_weights(folder / shard, "t0" if shard == ONE else "t1")
    with pytest.raises(ModelCorrupt, match=r"'t0' is in .* and in .*keep one of them"):
        verify(folder)


def test_weights_by_names_that_mlx_lm_does_not_read_say_what_to_do(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    with_weights(store.models_dir / "odd", "weights.00.safetensors")
    with pytest.raises(ModelCorrupt, match=r"no weights.*weights\.00\.safetensors.*name the files"):
        store.resolve("odd")
    with_weights(store.models_dir / "adapter", "adapters.safetensors")
    with pytest.raises(ModelCorrupt, match=r"Only an adapter.*mlx_lm\.fuse"):
        store.resolve("adapter")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "model.bin", 3])
def test_attack_an_index_names_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    folder = indexed(make_folder(tmp_path / "m"), a=name)
    with pytest.raises(ModelRefused, match="plain file name"):
        verify(folder)
    assert not hub_cache.is_complete(folder)


def test_adapters_beside_the_weights_are_said(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert unused_files(folder) == []
    write_weights(folder / "adapters.safetensors", "lora_a")
    write_weights(folder / "adapter_model.safetensors", "lora_b")
    assert unused_files(folder) == ["adapter_model.safetensors", "adapters.safetensors"]


# ---- Every way a model comes -----------------------------------------------------------------------------


def odd(folder: Path) -> Path:
    """Everything at once: odd JSON, the index of other weights, an adapter."""
    as_published(make_folder(folder))
    (folder / INDEX_NAME).write_bytes(MARK + b'{"weight_map": {"x": "model-00001-of-00009.safetensors"}}')
    return folder


def test_such_a_folder_is_taken_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "account"))
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    odd(store.models_dir / "own")
    odd(tmp_path / "account" / ".lmstudio" / "models" / "pub" / "studio")
    store.add(odd(tmp_path / "elsewhere"), "mine")
    snapshot_of(tmp_path / "hub", odd(tmp_path / "made"))
    found = store.installed()
    assert [model.name for model in found] == ["mine", "org/odd", "own", "pub/studio"]
    for model in found:
        assert store.resolve(model.name) == model
        store.verify(model, full=True)
        assert model.config["time_step_limit"] == [0.0, float("inf")]
    assert len({str(store.digest(model)) for model in found}) == 1
    assert store.unlisted() == []


@pytest.mark.one_loop
async def test_such_a_folder_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as hub:
        serve_from(hub, odd(tmp_path / "made"), monkeypatch, tmp_path)
        store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
        async for _ in store.pull("org/odd"):
            pass
        store.verify(store.resolve("org/odd"), full=True)


def serve_from(hub: Hub, made: Path, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    hub.models["org/odd"] = {file.name: file.read_bytes() for file in made.iterdir()}
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(place / "hf-home"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.one_loop
async def test_such_a_folder_is_copied(tmp_path: Path, here: ModelStore) -> None:
    there = ModelStore(tmp_path / "far", hub_cache=tmp_path / "hub-far")
    staged = odd(install.partial_folder(there.models_dir, "own"))
    install.publish(staged, there.models_dir, "own", name="own", source="hub", report=lambda step: None)
    offer = offer_of(there, there.resolve("own"))
    check(offer, digest_of(offer))
    await copied(there, here)
    here.verify(here.resolve("own"), full=True)
    assert str(here.digest(here.resolve("own"))) == str(there.digest(there.resolve("own")))


# ---- Names -----------------------------------------------------------------------------------------------

ODD_NAMES = [
    "my model",
    "模型-é",
    "a+b@c#d",
    "quote'd",
    "e\u0301",
    "name:tag",
    "default",
    "QWEN3-0.6B",
    "org/my model",
    "org/a--b",
    "hf.co/x",
    "-dash",
    "a..b",
]


def test_every_model_that_is_listed_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "account"))
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    for name in [*ODD_NAMES, "good", "Good_2.5-x", "org/good", "a--b"]:
        make_folder(store.models_dir / name)
    make_folder(tmp_path / "account" / ".lmstudio" / "models" / "pub" / "my model")
    listed = store.installed()
    assert [model.name for model in listed] == ["a--b", "good", "Good_2.5-x", "org/good"]
    for model in listed:
        assert store.resolve(model.name) == model
    unlisted = {str(each.path.relative_to(tmp_path)): each.reason for each in store.unlisted()}
    studio = "account/.lmstudio/models/pub/my model"
    assert unlisted.keys() == {studio} | {f"models/{name}" for name in ODD_NAMES}
    assert "'my model' is not the name of a model." in unlisted["models/my model"]
    assert "means something else" in unlisted["models/default"]
    assert "gets nothing" in unlisted["models/QWEN3-0.6B"]


def test_a_folder_of_ones_own_that_cannot_be_read_is_not_listed_and_why_is_told(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    (make_folder(store.models_dir / "broken") / "model.safetensors").unlink()
    assert store.installed() == []
    assert [each.reason for each in store.unlisted()] == [
        f"{store.models_dir / 'broken'} holds no weights (model*.safetensors)."
    ]


@pytest.mark.parametrize("config", [{}, {"model_type": "roberta"}], ids=["", "roberta"])
@pytest.mark.parametrize("value", ["x", [], ["x"], {"a": 1}, 1.5, True, -1, 1 << 70, 10**400], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "text_config",
        "hidden_size",
        "pad_token_id",
        "max_position_embeddings",
        "n_ctx",
        "head_dim",
    ],
)
def test_attack_one_odd_config_keeps_no_other_model_from_being_listed(
    tmp_path: Path, key: str, value: object, config: dict[str, object]
) -> None:
    """Also in the caches of other programs, whose models nobody here has chosen."""
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    make_folder(store.models_dir / "sound")
    odd = make_folder(store.models_dir / "odd", **{**config, key: value})
    snapshot = make_snapshot(tmp_path / "hub", "org/odd")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_bytes((odd / "config.json").read_bytes())
    found = store.installed()
    assert "sound" in [folder.name for folder in found]
    for folder in found:
        msgpack.encode(folder.shape)
        head_file(folder.path, folder.config)
        needed_bytes(folder, WeightRules("cpu"))


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff", b"[" * 100_000, b'[{"a":' + b'{"a":' * 100_000])
@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json"])
def test_attack_an_odd_file_of_a_model_for_vectors_keeps_no_other_from_being_listed(
    tmp_path: Path, name: str, raw: bytes
) -> None:
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    make_folder(store.models_dir / "sound")
    (make_folder(store.models_dir / "odd", model_type="bert") / name).write_bytes(raw)
    shapes = {folder.name: folder.shape for folder in store.installed()}
    assert shapes.keys() == {"odd", "sound"}
