"""What a copy believes, in which order things come, and when it ends; all of it is in test_lan_copy.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
from model_files import make_folder, write_weights

from fleetd.errors import ModelRefused
from fleetd.models import install, manifest
from fleetd.models.copy import messages, receive, send
from fleetd.models.copy.messages import CopyNeed, CopyOffer, OfferedFile, SendOrder, digest_of
from fleetd.models.model_store import ModelStore


def offer_of_files(folder: Path) -> CopyOffer:
    files = [
        OfferedFile(file.name, file.stat().st_size, blake3.blake3(file.read_bytes()).hexdigest())
        for file in sorted(folder.iterdir())
    ]
    return CopyOffer("folder", None, files)


class HonestSender:
    """The receiving end of a machine that sends what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = b""
        self.asked: list[str] = []
        self.taken = 0

    @contextlib.contextmanager
    def connect(self, needs: list[CopyNeed]) -> Iterator[Any]:
        self.asked = [need.file for need in needs]
        self._left = b"".join((self._folder / need.file).read_bytes()[need.offset :] for need in needs)
        yield self

    def receive_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        self.taken += count
        return count


def test_attack_a_manifest_by_another_spelling_is_no_file_of_a_model(tmp_path: Path) -> None:
    """Where case does not count, it would stand for what was written here."""
    folder = make_folder(tmp_path / "m")
    (folder / "Fleetd-Manifest.JSON").write_text("{}")
    assert not manifest.is_part("Fleetd-Manifest.JSON")
    offer = offer_of_files(folder)
    with pytest.raises(ModelRefused, match="not the name of a model's data file"):
        messages.check(offer, digest_of(offer))
    order = SendOrder(str(folder), b"", [CopyNeed("Fleetd-Manifest.JSON", 0)])
    with pytest.raises(ModelRefused):
        send.send(order, None, lambda progress: None)  # type: ignore[arg-type]


def test_attack_a_folder_elsewhere_says_that_its_files_are_another_models(
    store: ModelStore, tmp_path: Path
) -> None:
    """A digest is what other machines know a model by, and rows are shared under it."""
    folder = make_folder(tmp_path / "theirs")
    store.add(folder, "mine")
    found = store.resolve("mine")
    lies = {
        file.name: manifest.FileRecord(stat.st_size, stat.st_mtime_ns, stat.st_ino, "0" * 64)
        for file in manifest.part_files(folder)
        if (stat := file.stat())
    }
    manifest.save(manifest.Manifest("mine", "hub", lies), folder / manifest.FILE_NAME)
    assert store.known_digest(found) == ""
    honest = make_folder(tmp_path / "honest")
    assert store.digest(found).hex == store.digest(store.resolve(str(honest))).hex
    assert store.known_digest(found) == store.digest(found).hex


def test_everything_large_waits_until_the_small_files_are_sound(tmp_path: Path) -> None:
    there = make_folder(tmp_path / "there", auto_map={"AutoModel": "evil.Model"})
    write_weights(there / "adapters.safetensors", "lora_a")
    offer, wire = offer_of_files(there), HonestSender(there)
    models_dir = tmp_path / "models"
    with pytest.raises(ModelRefused, match="auto_map"):
        receive.receive(offer, digest_of(offer), "own", models_dir, wire.connect, lambda progress: None)
    large = [file for file in offer.files if file.name.endswith(".safetensors")]
    assert len(large) == 2
    assert set(wire.asked[-2:]) == {file.name for file in large}
    assert wire.taken == sum(file.size_bytes for file in offer.files if file not in large)
    assert not list((models_dir / install.PARTIAL).iterdir())


def test_a_file_that_grows_is_sent_as_far_as_it_reached(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    size = file.stat().st_size

    class Growing:
        sent = 0
        finished = False

        def send(self, chunk: memoryview) -> None:
            self.sent += len(chunk)
            assert self.sent <= size
            with file.open("ab") as more:
                more.write(bytes(len(chunk)))

        def finish(self) -> None:
            self.finished = True

    sender = Growing()
    order = SendOrder(str(folder), b"", [CopyNeed(file.name, 5)])
    send.send(order, sender, lambda progress: None)  # type: ignore[arg-type]
    assert (sender.sent, sender.finished) == (size - 5, True)


def test_all_of_a_model_is_on_the_disk_before_it_has_its_name(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = make_folder(install.partial_folder(store.models_dir, "own"))
    done: list[str] = []
    monkeypatch.setattr(install, "sync_file", lambda path: done.append(path.name))
    monkeypatch.setattr(install, "sync_folder", lambda path: done.append(path.name))
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    install.publish(staged, store.models_dir, "own", name="own", source="hub", report=lambda progress: None)
    names = [file.name for file in manifest.part_files(store.models_dir / "own")]
    assert sorted(done[: len(names)]) == names
    assert done[len(names) :] == ["own", "rename own", store.models_dir.name]
    assert json.loads((store.models_dir / "own" / manifest.FILE_NAME).read_text())["name"] == "own"
