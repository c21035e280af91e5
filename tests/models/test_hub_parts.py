"""Single layers of a model from the hub: what is asked of it, what arrives, what stays, what is refused."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_files import COMMIT, Hub, git_sha1, serving
from hub_outlines import outline
from huggingface_hub import constants
from model_files import make_folder, write_weights
from sharing import write

from fleetd.errors import DiskFull, DownloadFailed, ModelCorrupt, ModelNotFound, ModelUnsupported
from fleetd.models import hub_parts, install, layer_files, parts
from fleetd.models.hub_parts import HubPartOrder
from fleetd.models.model_store import ModelStore
from fleetd.models.pull import hub_part, ranges
from fleetd.models.pull.ranges import WantedBytes
from fleetd.models.pull_lines import PullProgress
from fleetd.models.safetensors_header import read_header
from fleetd.models.verify import verify

HUB_ID, LAYERS = "org/layered", 4
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# The work is another process's.
pytestmark = pytest.mark.one_loop


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A model whose layers lie in two files, the second layer in both."""
    folder = make_folder(tmp_path / "remote", num_hidden_layers=LAYERS)
    (folder / "model.safetensors").unlink()
    write_weights(folder / SHARDS[0], "embed.weight", "layers.1.b", "layers.0.b", "layers.0.a")
    write_weights(folder / SHARDS[1], "layers.3.a", "layers.1.a", "layers.2.a", "norm.weight")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, remote: Path) -> Iterator[Hub]:
    with serving() as server:
        server.models[HUB_ID] = {file.name: file.read_bytes() for file in remote.iterdir()}
        # Of the process that brings layers, and of this one, which has read its own when it was imported.
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


async def brought(store: ModelStore, order: HubPartOrder) -> list[PullProgress]:
    """The process's steps, in this process: to import the hub's library takes seconds."""
    steps: list[PullProgress] = []
    await asyncio.to_thread(hub_part.pull_part, order, store.models_dir, steps.append)
    return steps


async def outlined(store: ModelStore) -> HubPartOrder:
    """The order of all that this machine's own answers need, without layers; what is listed is here."""
    order = store.outline_order(HUB_ID)
    assert order is not None
    await brought(store, order)
    found = hub_parts.read(store.in_part(HUB_ID).path)
    return msgspec.structs.replace(order, commit=COMMIT, digest=found.listing.digest)


def of_layers(order: HubPartOrder, first: int, last: int, *, own: bool = False) -> HubPartOrder:
    return msgspec.structs.replace(order, first=first, last=last, own=own)


def place(store: ModelStore) -> Path:
    (found,) = parts.all_of(store.models_dir)
    return found


def asked_of_weights(hub: Hub) -> list[tuple[str, str]]:
    return [(name, wanted) for name, wanted in hub.asked if name in SHARDS]


def contents(path: Path) -> dict[str, bytes]:
    buffer = memoryview(bytearray(64))
    return {
        name: b"".join(bytes(piece) for piece in content.pieces(0, buffer))
        for name, content in layer_files.files_of(path).files.items()
    }


async def test_an_outline_is_no_model_and_knows_the_whole_one(
    store: ModelStore, hub: Hub, remote: Path
) -> None:
    order = await outlined(store)
    folder = store.in_part(HUB_ID)
    assert (folder.name, folder.source, folder.revision) == (HUB_ID, "part", COMMIT)
    assert folder.weights_bytes == 8 * 256
    assert str(store.digest(folder)) == order.digest
    assert store.installed() == []
    assert [each.name for each in store.answerable()] == [HUB_ID]
    with pytest.raises(ModelNotFound):
        store.resolve(HUB_ID)
    # Headers of weights alone.
    assert not list(folder.path.glob("*.safetensors"))
    assert hub_parts.read(folder.path).layers == LAYERS
    assert (folder.path / "tokenizer.json").read_bytes() == (remote / "tokenizer.json").read_bytes()


async def test_layers_are_those_that_a_machine_with_the_files_gives(
    store: ModelStore, hub: Hub, remote: Path
) -> None:
    order = await outlined(store)
    hub.asked.clear()
    hub.given.clear()
    await brought(store, of_layers(order, 0, 2, own=True))
    path, expected = place(store), contents(remote)
    here = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    assert here == {
        name: expected[name]
        for name in (layer_files.name_of(0), layer_files.name_of(1), layer_files.ENDS_NAME)
    }
    assert (path / layer_files.TABLE_NAME).read_bytes() == expected[layer_files.TABLE_NAME]
    assert set(layer_files.absent(path)) == {"layers.2.a", "layers.3.a"}
    verify(path, full=True)
    # Small files and headers came before.
    assert {name for name, _ in hub.asked} == set(SHARDS)


async def test_only_the_bytes_of_wanted_tensors_are_asked_for(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await outlined(store)
    hub.given.clear()
    monkeypatch.setattr(ranges, "GAP_BYTES", 0)
    monkeypatch.setattr(ranges.coalesced, "__defaults__", (0,))
    hub_part.pull_part(of_layers(order, 1, 3), store.models_dir, lambda step: None)
    assert hub.given == {SHARDS[0]: 256, SHARDS[1]: 512}


def test_near_ranges_are_one_request() -> None:
    wanted = [WantedBytes(100, 200, 0), WantedBytes(0, 50, 100), WantedBytes(260, 270, 150)]
    assert [(each.begin, each.end) for each in ranges.coalesced(wanted, 50)] == [(0, 200), (260, 270)]
    assert [(each.begin, each.end) for each in ranges.coalesced(wanted, 60)] == [(0, 270)]
    assert ranges.coalesced([WantedBytes(5, 5, 0)]) == []


async def test_other_layers_are_added_and_a_member_needs_no_ends(store: ModelStore, hub: Hub) -> None:
    order = HubPartOrder(HUB_ID, COMMIT, first=2, last=4)
    await brought(store, order)
    path = place(store)
    assert not parts.is_own(path)
    with pytest.raises(ModelNotFound):
        store.in_part(HUB_ID)
    assert {name for file in path.glob("*.safetensors") for name in read_header(file)} == {
        "layers.2.a",
        "layers.3.a",
    }
    hub.asked.clear()
    await brought(store, of_layers(order, 2, 4))
    assert hub.asked == []
    await brought(store, of_layers(order, 1, 4))
    assert hub.asked
    assert all(wanted for _, wanted in hub.asked)
    verify(path, full=True)
    # Once this machine is to answer with it, it is its own.
    await outlined(store)
    assert store.in_part(HUB_ID).path == path


async def test_a_break_in_the_middle_is_read_on(store: ModelStore, hub: Hub, remote: Path) -> None:
    order = await outlined(store)
    hub.asked.clear()
    hub.cut_after = {SHARDS[0]: 100, SHARDS[1]: 30}
    await brought(store, of_layers(order, 0, 4, own=True))
    assert contents(remote)[layer_files.name_of(1)] == (place(store) / layer_files.name_of(1)).read_bytes()
    begun = [int(wanted.removeprefix("bytes=").partition("-")[0]) for _, wanted in asked_of_weights(hub)]
    assert begun[1] == begun[0] + 100
    verify(place(store), full=True)


async def test_layers_that_have_arrived_stay_when_it_is_stopped(store: ModelStore, hub: Hub) -> None:
    order = await outlined(store)
    hub.stall_after = {SHARDS[1]: 10}
    steps = store.pull_part(of_layers(order, 0, 4))
    task = asyncio.create_task(ended(steps))
    assert await asyncio.to_thread(hub.stalled.wait, 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await steps.aclose()
    found = parts.find(place(store))
    assert found is not None
    assert found.has_layers(0, 1)
    assert not found.has_layers(0, 4)
    hub.stall.set()
    again = await brought(store, of_layers(order, 0, 4))
    assert layer_files.name_of(0) not in {step.file for step in again}
    verify(place(store), full=True)
    assert layer_files.has_layers(place(store), 0, 4)


async def ended(steps: AsyncGenerator[PullProgress, None]) -> None:
    async for _ in steps:
        pass


async def test_a_hub_that_gives_whole_files_only_is_told_apart(store: ModelStore, hub: Hub) -> None:
    order = await outlined(store)
    hub.whole_only = True
    with pytest.raises(DownloadFailed, match="instead of the part") as failed:
        await brought(store, of_layers(order, 0, 1))
    assert "HF_ENDPOINT" in failed.value.hint
    assert store.in_part(HUB_ID).path == place(store)


async def test_a_file_that_changed_is_refused(store: ModelStore, hub: Hub) -> None:
    order = await outlined(store)
    hub.tagged = {SHARDS[0]: "0" * 64}
    with pytest.raises(DownloadFailed, match="is not the file that was listed"):
        await brought(store, of_layers(order, 0, 1))
    hub.tagged.clear()
    raw = hub.models[HUB_ID][SHARDS[0]]
    hub.replaced = {SHARDS[0]: raw + b"0"}
    with pytest.raises(DownloadFailed, match="is not the file that was listed"):
        await brought(store, of_layers(order, 0, 1))
    hub.replaced = {"config.json": hub.models[HUB_ID]["config.json"].replace(b"128", b"256")}
    shutil.rmtree(place(store))
    with pytest.raises(DownloadFailed, match="another checksum"):
        await outlined(store)


async def test_other_files_than_the_asking_machine_knows_are_refused(store: ModelStore, hub: Hub) -> None:
    with pytest.raises(ModelCorrupt, match="lists other files"):
        await brought(store, HubPartOrder(HUB_ID, COMMIT, "0" * 64, first=0, last=1))
    assert not list(parts.all_of(store.models_dir))


async def test_without_a_hub_what_is_here_is_used(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await outlined(store)
    await brought(store, of_layers(order, 0, 2, own=True))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    await brought(store, of_layers(order, 0, 2, own=True))
    await outlined(store)
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE"):
        await brought(store, of_layers(order, 0, 3))


async def test_the_whole_model_takes_the_place_of_its_part(store: ModelStore, hub: Hub) -> None:
    await outlined(store)
    assert store.needs_pull(HUB_ID)
    async with aclosing(store.pull(HUB_ID)) as steps:
        async for _ in steps:
            pass
    store.drop_parts()
    assert not list(parts.all_of(store.models_dir))
    assert store.in_part(HUB_ID).source == "hub"
    assert store.at_commit(hub_parts.HubCommit(HUB_ID, COMMIT)) is not None
    assert store.outline_order(HUB_ID) is None


async def test_a_part_is_removed_by_the_name_of_its_model(store: ModelStore, hub: Hub) -> None:
    await outlined(store)
    store.remove(HUB_ID)
    assert not list(parts.all_of(store.models_dir))


async def test_own_parts_do_not_give_way_to_those_of_others(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    await outlined(store)
    parts.make_room(store.models_dir, store.models_dir / "another", 1 << 60)
    assert store.in_part(HUB_ID).path.exists()


async def test_a_full_disk_is_found_before_anything_is_fetched(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await outlined(store)
    hub.asked.clear()

    def no_room(folder: Path, need_bytes: int) -> None:
        raise DiskFull(f"{need_bytes}")

    monkeypatch.setattr(install, "require_space", no_room)
    with pytest.raises(DiskFull):
        hub_part.pull_part(of_layers(order, 0, 4), store.models_dir, lambda step: None)
    assert hub.asked == []


@pytest.mark.parametrize("midway", [False, True])
async def test_a_full_disk_takes_no_layers_that_have_arrived(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch, midway: bool
) -> None:
    """They may be in use, and took hours."""
    order = await outlined(store)
    await brought(store, of_layers(order, 0, 2))
    path = place(store)
    here = {file.name for file in path.iterdir()}

    def full(*asked: object) -> None:
        if midway:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise DiskFull("Too little.")

    monkeypatch.setattr(*((ranges, "write") if midway else (install, "require_space")), full)
    with pytest.raises(DiskFull):
        hub_part.pull_part(of_layers(order, 0, 4), store.models_dir, lambda step: None)
    assert {file.name for file in path.iterdir()} == here
    assert parts.layers_in(path) == 2


async def test_models_without_layers_or_as_gguf_are_refused_by_name(
    store: ModelStore, hub: Hub, tmp_path: Path
) -> None:
    hub.models["org/gguf"] = {"model.Q4_K_M.gguf": b"GGUF"}
    with pytest.raises(ModelUnsupported):
        await brought(store, HubPartOrder("org/gguf", own=True))
    whole = make_folder(tmp_path / "flat")
    (whole / "model.safetensors").unlink()
    write_weights(whole / "model.safetensors", "embed.weight", "layers.1.a")
    hub.models["org/flat"] = {file.name: file.read_bytes() for file in whole.iterdir()}
    with pytest.raises(ModelUnsupported, match="not named by layers"):
        await brought(store, HubPartOrder("org/flat", own=True))


def test_the_listing_decides_the_digest() -> None:
    file = hub_parts.RemoteFile("config.json", 2, None, git_sha1(b"{}"), "config.json")
    at = hub_parts.HubCommit(HUB_ID, COMMIT)
    one = hub_parts.HubListing(at, [file])
    changes: list[dict[str, Any]] = [
        {"size_bytes": 3},
        {"git_sha1": None},
        {"sha256": "0" * 64},
        {"path": "a/config.json"},
    ]
    others = [msgspec.structs.replace(file, **fields) for fields in changes]
    digests = {hub_parts.HubListing(at, [each]).digest for each in others}
    assert len(digests | {one.digest}) == 5


def test_a_part_has_the_digest_of_its_commit_and_only_where_parts_are(tmp_path: Path) -> None:
    folder = outline(write(tmp_path / "tiny"), tmp_path / "models")
    listed = hub_parts.read(folder.path).listing.digest
    assert hub_parts.digest_of(folder.path, tmp_path / "models") == listed
    assert hub_parts.digest_of(folder.path, None) == listed
    # What lies elsewhere could say anything of itself.
    assert hub_parts.digest_of(folder.path, tmp_path / "others") == ""
    assert hub_parts.digest_of(tmp_path / "tiny", None) == ""
    (folder.path / hub_parts.FILE_NAME).write_text("{")
    assert hub_parts.digest_of(folder.path, None) == ""
