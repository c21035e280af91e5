"""What lies in the place of a model's file is a stranger's: a pipe or a device is never waited for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hub_files import make_snapshot
from model_files import make_folder

from fleetd.errors import FleetError, ModelCorrupt, ModelNotFound
from fleetd.models import (
    chat_templates,
    folder,
    hub_cache,
    manifest,
    opening,
    other_stores,
    safetensors_header,
)
from fleetd.models.copy.messages import CopyNeed, SendOrder
from fleetd.models.copy.send import send
from fleetd.models.gguf.conversion import read_plan
from fleetd.models.model_store import ModelStore


def ends(work: Callable[[], Any]) -> None:
    """It returns, or raises what callers expect."""
    done, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            with suppress(FleetError):
                work()
        except BaseException as error:
            failed.append(error)
        done.set()

    # A daemon: a test that fails must not hold the others.
    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60), "it waits for another program to open the other end"
    assert failed == []


def replaced(file: Path) -> Path:
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(file)
    return file


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe"))[1],
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "file")

    def refused() -> None:
        with pytest.raises(OSError, match="file"):
            opening.read_regular(tmp_path / "file", 10)

    ends(refused)


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("file")
        with pytest.raises(OSError, match="file"):
            opening.open_regular(Path("file"))


def test_a_file_is_read_up_to_its_bound_and_a_byte_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    (tmp_path / "link").symlink_to("file")
    assert [opening.read_regular(tmp_path / "link", most) for most in (2, 3, 4, 5)] == [
        b"abc",
        b"abcd",
        b"abcd",
        b"abcd",
    ]
    with pytest.raises(OSError, match="link"):
        opening.open_regular(tmp_path / "link", follow=False)


def in_store(work: Callable[[ModelStore, Path], Any], *files: str) -> Callable[[Path], None]:
    """Work with a store one of whose models, and a folder elsewhere, has pipes instead of ``files``."""

    def run(place: Path) -> None:
        store = ModelStore(place / "models", hub_cache=place / "hub")
        elsewhere = make_folder(place / "elsewhere")
        own = make_folder(store.models_dir / "own")
        for file in files:
            replaced(own / file)
            replaced(elsewhere / file)
        ends(lambda: work(store, elsewhere))

    return run


def in_folder(work: Callable[[Path], Any], *files: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        path = make_folder(place / "m")
        for file in files:
            replaced(path / file)
        ends(lambda: work(path))

    return run


def of_snapshot(place: Path) -> None:
    make_snapshot(place / "hub", "org/m")
    replaced(place / "hub" / "models--org--m" / "refs" / "main")
    ends(lambda: hub_cache.snapshot(place / "hub", "org/m"))
    ends(lambda: ModelStore(place / "models", hub_cache=place / "hub").installed())


def of_a_record(place: Path) -> None:
    store = ModelStore(place / "models", hub_cache=place / "hub")
    found = read(make_folder(place / "m"))
    replaced(store.record_path(found))
    ends(lambda: store.known_digest(found))
    ends(lambda: store.verify(found, full=True))


def of_lm_studio(place: Path) -> None:
    environment = {"HOME": str(place)}
    replaced(place / ".lmstudio-home-pointer")
    replaced(place / ".lmstudio" / "settings.json")
    found = make_folder(place / ".lmstudio" / "models" / "pub" / "m")
    replaced(found / "model.safetensors.index.json")
    replaced(found.parent / "n" / "x.gguf")
    ends(lambda: list(other_stores.lm_studio_models(environment)))
    ends(lambda: other_stores.gguf_files(environment))


def of_ollama(place: Path) -> None:
    replaced(place / ".ollama/models/manifests/registry/library/m/latest")
    ends(lambda: other_stores.gguf_files({"HOME": str(place)}))


def of_a_copy(place: Path) -> None:
    path = make_folder(place / "m")
    replaced(path / "model.safetensors")
    order = SendOrder(folder=str(path), key=b"", needs=[CopyNeed("model.safetensors", 0)])
    ends(lambda: send(order, None, lambda progress: None))  # type: ignore[arg-type]


def read(path: Path) -> folder.ModelFolder:
    return folder.read_folder(path, name="m", source="folder", revision=None)


def hashed(store: ModelStore, path: Path) -> None:
    store.digest(read(path))


WAYS: dict[str, Callable[[Path], None]] = {
    "config": in_folder(read, "config.json"),
    "template": in_folder(chat_templates.read_templates, "chat_template.jinja", "tokenizer_config.json"),
    "weights": in_folder(
        lambda path: safetensors_header.read_header(path / "model.safetensors"), "model.safetensors"
    ),
    "hash": in_folder(lambda path: manifest.hash_file(path / "model.safetensors"), "model.safetensors"),
    "manifest": in_folder(lambda path: manifest.load(path / manifest.FILE_NAME), manifest.FILE_NAME),
    "is it GGUF": in_folder(lambda path: folder.is_gguf(path / "blob"), "blob"),
    "GGUF": in_folder(lambda path: read_plan(path / "x.gguf"), "x.gguf"),
    "by path": in_store(lambda store, path: store.resolve(str(path)), "config.json"),
    "by name": in_store(lambda store, path: store.resolve("own"), "config.json", manifest.FILE_NAME),
    "listed": in_store(
        lambda store, path: store.installed(), "config.json", "tokenizer_config.json", manifest.FILE_NAME
    ),
    "verified": in_store(lambda store, path: store.verify(read(path)), "tokenizer.json"),
    "digest": in_store(hashed, "tokenizer.json"),
    "added": in_store(lambda store, path: store.add(path, "mine"), "config.json"),
    "imported": in_store(lambda store, path: store.needs_pull(str(path / "x.gguf")), "x.gguf"),
    "the hub's cache": of_snapshot,
    "a record": of_a_record,
    "LM Studio": of_lm_studio,
    "Ollama": of_ollama,
    "a copy": of_a_copy,
}


@pytest.mark.parametrize("way", WAYS)
def test_attack_a_pipe_in_the_place_of_a_models_file_is_not_waited_for(tmp_path: Path, way: str) -> None:
    WAYS[way](tmp_path)


def test_what_cannot_be_read_is_corrupt_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_folder(tmp_path / "m")
    config = replaced(path / "config.json")
    with pytest.raises(ModelCorrupt, match=r"config\.json in .* cannot be read: it is not a regular file"):
        read(path)
    with pytest.raises(ModelCorrupt, match="cannot be read"):
        manifest.hash_file(config)
    store = ModelStore(tmp_path / "models", hub_cache=tmp_path / "hub")
    with pytest.raises(ModelNotFound, match=r"There is no file .*x\.gguf"):
        store.resolve(str(replaced(tmp_path / "x.gguf")))

    def fails(*args: Any) -> None:
        raise OSError(5, "Input/output error", "the disk")

    sound = read(make_folder(tmp_path / "sound"))
    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(ModelCorrupt, match="the disk cannot be read: Input/output error"):
        store.verify(sound)
