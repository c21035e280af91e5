"""A process that installs a model is killed between any two steps, and the next start puts it right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from model_files import make_folder

from fleetd.models import install, manifest
from fleetd.models.model_store import ModelStore


class Killed(BaseException):
    """The process ends here; nothing that it had planned happens."""


@contextmanager
def killed_before(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The step of a name in a folder that is the ``step``-th is never made. Yields those that were made."""
    made: list[str] = []

    def stepping(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(made) >= step:
                raise Killed
            made.append(name)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, names in ((Path, ("rename", "unlink", "replace")), (shutil, ("rmtree",))):
            for name in names:
                patch.setattr(owner, name, stepping(name, getattr(owner, name)))
        try:
            yield made
        except Killed:
            pass


def staged(store: ModelStore, **config: Any) -> Path:
    folder = install.partial_folder(store.models_dir, "own")
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder, **config)
    (folder / ".revision").write_text("a" * 40)
    return folder


def publish(store: ModelStore, folder: Path) -> None:
    install.publish(folder, store.models_dir, "own", name="own", source="hub", report=lambda progress: None)


def left(store: ModelStore) -> list[str]:
    return sorted(entry.name for entry in (store.models_dir / install.PARTIAL).iterdir())


@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replaces"])
def test_killed_between_any_two_steps_a_model_is_there_or_goes_on(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    for step in range(20):
        shutil.rmtree(store.models_dir, ignore_errors=True)
        if replaces:
            publish(store, staged(store, vocab_size=1))
        coming = staged(store, vocab_size=2)
        with killed_before(step, monkeypatch) as made:
            publish(store, coming)
        store.sweep()
        found = store.installed()
        if found:
            [model] = found
            store.verify(model, full=True)
            assert model.config["vocab_size"] in ({1, 2} if replaces else {2})
        else:
            assert not replaces, f"the only copy is lost after {made}"
        if not found or found[0].config["vocab_size"] == 1:
            # What has arrived has not arrived in vain.
            assert left(store) == ["own"]
            publish(store, coming)
        assert store.resolve("own").config["vocab_size"] == 2
        store.sweep()
        assert left(store) == []
        if len(made) < step:
            return
    raise AssertionError("it takes more steps than were tried")


def test_killed_between_any_two_steps_of_removal_nothing_half_is_found(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(20):
        shutil.rmtree(store.models_dir, ignore_errors=True)
        publish(store, staged(store))
        with killed_before(step, monkeypatch) as made:
            store.remove("own")
        for model in store.installed():
            store.verify(model, full=True)
        store.sweep()
        assert left(store) == []
        if len(made) < step:
            assert store.installed() == []
            return
    raise AssertionError("it takes more steps than were tried")


def test_what_is_being_installed_now_is_left_alone(store: ModelStore) -> None:
    coming = staged(store)
    (coming / ".revision").unlink()
    with install.locked(store.models_dir, "own", lambda progress: None):
        assert store.sweep() == []
        assert left(store) == ["own"]
    store.sweep()
    assert left(store) == []


def test_what_earlier_versions_left_is_put_right_too(store: ModelStore) -> None:
    partial = store.models_dir / install.PARTIAL
    publish(store, staged(store))
    (store.models_dir / "own").rename(partial / "own.old")
    make_folder(partial / "gone.removed")
    make_folder(partial / "half.imported")
    make_folder(partial / "theirs.old")
    download = make_folder(partial / "name.old")
    (download / ".revision").write_text("b" * 40)
    assert store.sweep() == ["own", "theirs"]
    assert left(store) == ["name.old"]
    assert [model.name for model in store.installed()] == ["own", "theirs"]


def test_a_copy_of_what_is_there_is_deleted_and_never_takes_its_place(store: ModelStore) -> None:
    publish(store, staged(store, vocab_size=2))
    partial = store.models_dir / install.PARTIAL
    make_folder(partial / "own.old", vocab_size=1)
    make_folder(partial / "own~old", vocab_size=1)
    (store.models_dir / "linked").symlink_to("nowhere")
    make_folder(partial / "linked~old")
    assert store.sweep() == []
    assert left(store) == []
    assert store.resolve("own").config["vocab_size"] == 2
    assert os.readlink(store.models_dir / "linked") == "nowhere"


def test_a_download_whose_name_looks_like_what_was_moved_aside(store: ModelStore) -> None:
    """It was killed as it got its manifest; it never becomes another model."""
    folder = make_folder(store.models_dir / install.PARTIAL / "org--m.old")
    manifest.save(manifest.Manifest("org/m.old", "hub", {}), folder / manifest.FILE_NAME)
    assert store.sweep() == []
    assert store.installed() == []


def test_there_is_nothing_to_sweep(store: ModelStore) -> None:
    assert store.sweep() == []
    assert not store.models_dir.exists()
