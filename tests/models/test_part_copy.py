"""Single layers of a model on their way to another machine: what arrives, what stays, what is refused."""

from __future__ import annotations

import asyncio
import shutil
import socket
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from hub_outlines import outline
from model_files import make_folder, write_weights
from two_machines import KEY, FaultyWire, exhausted

from fleetd.errors import FleetError, ModelCorrupt, ModelNotFound, PeerLost
from fleetd.models import hub_parts, layer_files, parts
from fleetd.models.copy import client
from fleetd.models.copy.messages import CopyNeed, PartOrder, part_offer_from_hub, part_offer_of
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.models.safetensors_header import read_header
from fleetd.models.verify import verify

pytestmark = pytest.mark.one_loop
LAYERS, SOURCE = 4, "NODEALPHA0123456789"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def there(tmp_path: Path) -> ModelStore:
    """A model whose layers lie in two files, the second layer in both."""
    folder = make_folder(tmp_path / "there" / "own", num_hidden_layers=LAYERS)
    (folder / "model.safetensors").unlink()
    write_weights(folder / SHARDS[0], "embed.weight", "layers.0.a", "layers.1.b")
    write_weights(folder / SHARDS[1], "layers.1.a", "layers.2.a", "layers.3.a", "norm.weight")
    return ModelStore(tmp_path / "there", hub_cache=tmp_path / "none")


@pytest.fixture
def here(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "here", hub_cache=tmp_path / "none")


def order_of(there: ModelStore, first: int, last: int) -> PartOrder:
    folder = there.resolve("own")
    offer = part_offer_of(there, folder)
    return PartOrder(offer, there.digest(folder).hex, "own", SOURCE, first, last)


async def fetched(
    there: ModelStore,
    here: ModelStore,
    order: PartOrder,
    wire: FaultyWire | None = None,
    folder: Path | None = None,
) -> list[str]:
    """The names of the files that were asked for; raises as the receiving side."""
    wire, asked = wire or FaultyWire(), list[str]()
    sending: list[asyncio.Task[None]] = []

    async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
        asked.extend(need.file for need in needs)
        path = folder or there.resolve("own").path
        sending.append(asyncio.create_task(client.send(path, needs, wire.sender, KEY)))
        return wire.receiver, KEY

    try:
        async with aclosing(client.receive_part(order, here.models_dir, connect)) as steps:
            await exhausted(steps)
    finally:
        await asyncio.to_thread(wire.close)
        await asyncio.gather(*sending, return_exceptions=True)
    return asked


def place(here: ModelStore, order: PartOrder) -> Path:
    return parts.place(here.models_dir, order.digest, SOURCE)


def tensors(path: Path) -> set[str]:
    return {name for file in path.glob("*.safetensors") for name in read_header(file)}


async def test_only_the_asked_layers_come_and_are_no_model(there: ModelStore, here: ModelStore) -> None:
    order = order_of(there, 1, 3)
    await fetched(there, here, order)
    path = place(here, order)
    assert tensors(path) == {"layers.1.a", "layers.1.b", "layers.2.a"}
    assert set(layer_files.absent(path)) == {"embed.weight", "layers.0.a", "layers.3.a", "norm.weight"}
    verify(path, full=True)
    found = parts.find(path)
    assert found is not None
    assert found.has_layers(1, 3)
    assert not found.has_layers(0, 3)
    assert here.installed() == []
    with pytest.raises(ModelNotFound):
        here.resolve("own")


async def test_other_layers_are_added_to_those_that_are_here(there: ModelStore, here: ModelStore) -> None:
    await fetched(there, here, order_of(there, 2, 4))
    asked = await fetched(there, here, order_of(there, 1, 4))
    assert asked == [layer_files.name_of(1)]
    assert await fetched(there, here, order_of(there, 1, 3)) == []


async def test_layers_that_have_arrived_stay_when_the_stream_breaks(
    there: ModelStore, here: ModelStore
) -> None:
    order = order_of(there, 0, 4)
    sizes = list(order.sizes().values())
    with pytest.raises(PeerLost):
        await fetched(there, here, order, FaultyWire(cut_at=sum(sizes[:-2]) + 200))
    found = parts.find(place(here, order))
    assert found is not None
    assert found.has_layers(0, 2)
    again = await fetched(there, here, order)
    assert layer_files.name_of(3) in again
    assert layer_files.name_of(0) not in again
    verify(place(here, order), full=True)


async def test_a_file_that_changed_since_is_fetched_again(there: ModelStore, here: ModelStore) -> None:
    order = order_of(there, 0, 2)
    await fetched(there, here, order)
    file = place(here, order) / layer_files.name_of(1)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelCorrupt, match="has changed"):
        verify(place(here, order), full=True)
    assert await fetched(there, here, order) == [layer_files.name_of(1)]
    verify(place(here, order), full=True)


async def test_what_is_not_as_offered_is_thrown_away(
    there: ModelStore, here: ModelStore, tmp_path: Path
) -> None:
    order = order_of(there, 0, 2)
    with pytest.raises(ModelCorrupt, match="make up the model"):
        await fetched(there, here, msgspec.structs.replace(order, digest="0" * 64))
    other = tmp_path / "other"
    shutil.copytree(there.resolve("own").path, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("128", "256"))
    with pytest.raises(ModelCorrupt, match=r"config\.json arrived with another checksum"):
        await fetched(there, here, order, folder=other)
    assert not place(here, order).exists()


@pytest.mark.parametrize("raw", [b'{"\xff": ["F32", [1]]}', b'{"a": ["F99", [1]]}', b"[" * 100_000])
async def test_attack_a_table_that_cannot_be_read_keeps_no_other_part_from_being_listed(
    there: ModelStore, here: ModelStore, raw: bytes
) -> None:
    order = order_of(there, 0, 2)
    await fetched(there, here, order)
    assert [part.name for part in here.parts_here()] == ["own"]
    (place(here, order) / layer_files.TABLE_NAME).write_bytes(raw)
    assert here.parts_here() == []
    with pytest.raises(ModelCorrupt, match=layer_files.TABLE_NAME):
        layer_files.absent(place(here, order))


async def test_a_file_name_elsewhere_is_refused(there: ModelStore, here: ModelStore) -> None:
    for name in ("model-fleetd-layer-99999.safetensors", "../model-fleetd-ends.safetensors"):
        wire = FaultyWire()
        with pytest.raises(FleetError):
            await client.send(there.resolve("own").path, [CopyNeed(name, 0)], wire.sender, KEY)
        await asyncio.to_thread(wire.close)


async def test_layers_are_not_read_from_files_outside_of_the_model(
    there: ModelStore, here: ModelStore, tmp_path: Path
) -> None:
    order = order_of(there, 0, 2)
    folder = there.resolve("own").path
    (folder / SHARDS[0]).rename(tmp_path / "elsewhere")
    (folder / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerLost):
        await fetched(there, here, order, folder=folder)


async def test_a_part_goes_with_its_name_or_when_the_whole_model_is_here(
    there: ModelStore, here: ModelStore
) -> None:
    order = order_of(there, 0, 2)
    await fetched(there, here, order)
    assert list(parts.all_of(here.models_dir)) == [place(here, order)]
    here.remove("own")
    assert not place(here, order).exists()
    with pytest.raises(ModelNotFound):
        here.remove("own")
    await fetched(there, here, order)
    shutil.copytree(there.resolve("own").path, here.models_dir / "own")
    here.digest(here.resolve("own"))
    here.sweep()
    assert not place(here, order).exists()


async def test_parts_that_were_not_used_for_longest_make_room(
    there: ModelStore, here: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(there, 0, 1)
    await fetched(there, here, order)
    other = parts.place(here.models_dir, order.digest, "OTHER")
    shutil.copytree(place(here, order), other)
    parts.folder(other, "own")
    free = iter([0, 10**15, 10**15])
    usage = shutil.disk_usage(here.models_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=next(free)))
    parts.make_room(here.models_dir, here.models_dir / "another", 1000)
    assert not place(here, order).exists()
    assert other.exists()


# ---- of a machine that has the model in part itself ------------------------------------------------------


def order_of_part(folder: Path, digest: str, first: int, last: int) -> PartOrder:
    return PartOrder(part_offer_from_hub(folder), digest, "org/own", SOURCE, first, last)


@pytest.fixture
def in_part(tmp_path: Path) -> ModelFolder:
    """The first two of four layers."""
    whole = make_folder(tmp_path / "one", num_hidden_layers=LAYERS)
    write_weights(whole / "model.safetensors", "embed.weight", *(f"layers.{n}.a" for n in range(LAYERS)))
    return outline(whole, tmp_path / "there", layers=range(2))


async def test_a_machine_gives_layers_of_a_model_that_it_has_in_part(
    in_part: ModelFolder, there: ModelStore, here: ModelStore
) -> None:
    digest = hub_parts.read(in_part.path).listing.digest
    order = order_of_part(in_part.path, digest, 0, 2)
    await fetched(there, here, order, folder=in_part.path)
    assert tensors(place(here, order)) == {"layers.0.a", "layers.1.a"}
    assert set(layer_files.absent(place(here, order))) == {"embed.weight", "layers.2.a", "layers.3.a"}
    verify(place(here, order), full=True)
    # It is believed for that machine's work alone.
    assert not parts.is_from_hub(place(here, order))
    with pytest.raises(PeerLost):
        await fetched(there, here, order_of_part(in_part.path, digest, 2, 4), folder=in_part.path)


async def test_layers_of_another_listing_than_was_asked_for_are_refused(
    in_part: ModelFolder, there: ModelStore, here: ModelStore
) -> None:
    order = order_of_part(in_part.path, "0" * 64, 0, 2)
    with pytest.raises(ModelCorrupt, match="were offered"):
        await fetched(there, here, order, folder=in_part.path)
    assert not place(here, order).exists()


def test_layer_files_are_the_same_however_a_model_is_spread(there: ModelStore, tmp_path: Path) -> None:
    one = make_folder(tmp_path / "one", num_hidden_layers=LAYERS)
    names = (
        "embed.weight",
        "norm.weight",
        "layers.1.a",
        "layers.0.a",
        "layers.1.b",
        "layers.2.a",
        "layers.3.a",
    )
    write_weights(one / "model.safetensors", *names)
    buffer = memoryview(bytearray(100))

    def contents(path: Path) -> dict[str, bytes]:
        found = layer_files.files_of(path).files
        return {
            name: b"".join(bytes(piece) for piece in each.pieces(0, buffer)) for name, each in found.items()
        }

    spread = contents(there.resolve("own").path)
    assert contents(one) == spread
    name = layer_files.name_of(1)
    content = layer_files.files_of(one).files[name]
    assert content.size_bytes == len(spread[name])
    for offset in (1, len(content.head), len(content.head) + 5, content.size_bytes):
        assert b"".join(bytes(each) for each in content.pieces(offset, buffer)) == spread[name][offset:]


@pytest.mark.parametrize("before", ["", "language_model.", "model.language_model."])
def test_the_layers_of_a_head_go_with_what_belongs_to_no_layer(tmp_path: Path, before: str) -> None:
    """The machine that answers has the head, and it alone."""
    folder = make_folder(tmp_path / "m", num_hidden_layers=2)
    head = [f"{before}mtp.layers.{number}.norm.weight" for number in range(3)]
    write_weights(folder / "model.safetensors", "embed.weight", "layers.0.a", "layers.1.a", *head)
    files = layer_files.files_of(folder)
    assert files.layers == 2
    buffer = memoryview(bytearray(4096))
    ends = b"".join(bytes(piece) for piece in files.files[layer_files.ENDS_NAME].pieces(0, buffer))
    assert all(name.encode() in ends for name in head)
    assert not files.ends_everywhere
