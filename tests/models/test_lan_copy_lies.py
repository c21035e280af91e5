"""A model copied between two machines of which one lies: about files, names, sizes, or what it wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
from model_files import CONFIG
from msgspec.structs import replace
from two_machines import (
    KEY,
    SHARDS,
    Copy,
    FaultyWire,
    assert_nothing_published,
    changed,
    copied,
    copying,
    exhausted,
    partials,
    tcp_pair,
)

from fleetd import limits
from fleetd.errors import (
    FleetError,
    ModelCorrupt,
    ModelRefused,
    PeerLate,
    PeerLost,
    ProtocolError,
)
from fleetd.models.copy import client
from fleetd.models.copy.messages import CopyNeed, CopyOffer, OfferedFile, check, digest_of, offer_of
from fleetd.models.model_store import ModelStore
from fleetd.models.pull_lines import PullProgress
from fleetd.requests.model_copies import CopyTimes
from fleetd.sealed.stream import SealedReceiver

# The work is other processes'.
pytestmark = pytest.mark.one_loop


# ---- Lies -----------------------------------------------------------------------------------------------


async def test_attack_other_files_than_the_digest_asked_for(
    there: ModelStore, here: ModelStore, offer: CopyOffer
) -> None:
    lie = changed(offer, SHARDS[0], blake3="0" * 64)
    with pytest.raises(ModelCorrupt, match="make up the model"):
        await copied(there, here, offer=lie, digest=digest_of(offer))
    assert not here.models_dir.exists()


async def test_attack_files_that_are_not_what_their_hash_says(
    there: ModelStore, here: ModelStore, offer: CopyOffer
) -> None:
    with pytest.raises(ModelCorrupt, match="another checksum"):
        await copied(there, here, offer=changed(offer, SHARDS[1], blake3="0" * 64))
    assert_nothing_published(here)
    assert f"{SHARDS[1]}.part" not in partials(here)
    assert SHARDS[0] in partials(here)


async def test_attack_offered_sizes_that_are_wrong(
    there: ModelStore, here: ModelStore, offer: CopyOffer
) -> None:
    size = next(file.size_bytes for file in offer.files if file.name == SHARDS[1])
    with pytest.raises(ModelCorrupt, match="another checksum"):
        await copied(there, here, offer=changed(offer, SHARDS[1], size_bytes=size - 1))
    with pytest.raises(PeerLost, match="without its last 1 bytes"):
        await copied(there, here, offer=changed(offer, SHARDS[1], size_bytes=size + 1))
    assert_nothing_published(here)


async def test_attack_more_bytes_than_were_asked_for(
    there: ModelStore, here: ModelStore, offer: CopyOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.send

    async def send_twice(folder: Path, needs: list[CopyNeed], sock: socket.socket, key: bytes) -> None:
        await real(folder, [*needs, CopyNeed("config.json", 0)], sock, key)

    monkeypatch.setattr(client, "send", send_twice)
    with pytest.raises(ProtocolError, match="more than it was asked for"):
        await copied(there, here)
    assert_nothing_published(here)


NO_FILE_OF_A_MODEL = (
    "../../x.json",
    "/etc/x.json",
    "sub/config.json",
    "modeling_own.py",
    "weights.bin",
    "fleetd-manifest.json",
    ".hidden.json",
    "two words.json",
    "nul\0.json",
    "",
    f"{'n' * 196}.json",
)


@pytest.mark.parametrize("name", NO_FILE_OF_A_MODEL)
def test_attack_names_that_are_no_file_of_a_model(offer: CopyOffer, name: str) -> None:
    for lie in (
        changed(offer, "tokenizer.json", name=name),
        CopyOffer(offer.source, offer.revision, [*offer.files, OfferedFile(name, 1, "0" * 64)]),
    ):
        with pytest.raises(ModelRefused, match="not the name"):
            check(lie, digest_of(lie))


async def test_attack_path_in_an_offer_stops_the_process_too(
    there: ModelStore, here: ModelStore, offer: CopyOffer, tmp_path: Path
) -> None:
    lie = changed(offer, "tokenizer.json", name="../../../escaped.json")
    with pytest.raises(ModelRefused):
        await copied(there, here, offer=lie)
    found = await asyncio.to_thread(lambda: list(tmp_path.rglob("escaped*")))
    assert found == []


async def test_attack_name_of_another_model(there: ModelStore, here: ModelStore, offer: CopyOffer) -> None:
    async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
        raise AssertionError

    for name in ("../own", "/own", ".."):
        steps = client.receive(offer, here.models_dir, connect, name=name, digest=digest_of(offer))
        async with contextlib.aclosing(steps):
            with pytest.raises(FleetError, match="not the name of a model"):
                await anext(steps)


def test_names_that_differ_only_in_case_are_one_name(offer: CopyOffer) -> None:
    lie = CopyOffer(offer.source, None, [*offer.files, OfferedFile("Config.json", 2, "0" * 64)])
    with pytest.raises(ModelRefused, match="twice"):
        check(lie, digest_of(lie))


def test_offers_are_bounded(offer: CopyOffer) -> None:
    def check_with(*extra: OfferedFile) -> None:
        grown = CopyOffer(offer.source, None, [*offer.files, *extra])
        check(grown, digest_of(grown))

    used = sum(file.size_bytes for file in offer.files)
    check_with(OfferedFile("more.safetensors", limits.COPY_BYTES - used, "0" * 64))
    with pytest.raises(ModelRefused, match="over the bound"):
        check_with(OfferedFile("more.safetensors", limits.COPY_BYTES - used + 1, "0" * 64))
    check_with(OfferedFile("more.json", limits.MODEL_JSON_BYTES, "0" * 64))
    with pytest.raises(ModelRefused, match="all but weights"):
        check_with(OfferedFile("more.json", limits.MODEL_JSON_BYTES + 1, "0" * 64))
    check_with(OfferedFile(f"{'n' * 195}.json", 1, "0" * 64))


def test_the_number_of_files_is_bounded_on_both_sides(there: ModelStore) -> None:
    folder = there.resolve("own")
    have = len(offer_of(there, folder).files)
    for number in range(limits.COPY_FILES - have):
        (folder.path / f"x{number}.txt.jinja").touch()
    offer = offer_of(there, folder)
    assert len(offer.files) == limits.COPY_FILES
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=CopyOffer) == offer
    (folder.path / "one-more.jinja").touch()
    with pytest.raises(ModelRefused, match=f"{limits.COPY_FILES} can be copied"):
        offer_of(there, folder)


async def test_attack_config_that_names_code_ends_the_copy_before_the_weights(
    there: ModelStore, here: ModelStore
) -> None:
    folder = there.resolve("own")
    (folder.path / "config.json").write_text(json.dumps(CONFIG | {"model_file": "evil.py"}))
    seen = Copy()
    async with copying(there, here, FaultyWire(), seen) as steps:
        with pytest.raises(ModelRefused, match="model_file"):
            await exhausted(steps, seen)
    assert not {step.file for step in seen.steps} & set(SHARDS)
    assert_nothing_published(here)
    assert partials(here) == {}


async def test_attack_weights_that_are_no_weights(there: ModelStore, here: ModelStore) -> None:
    folder = there.resolve("own")
    (folder.path / SHARDS[0]).write_bytes(b"\xff" * 5000)
    with pytest.raises(ModelCorrupt):
        await copied(there, here)
    assert_nothing_published(here)
    assert partials(here) == {}


# ---- What may be asked of a sender ----------------------------------------------------------------------


async def refusal(folder: Path, *needs: CopyNeed) -> FleetError:
    """How the sending process refuses; the other side gets not one byte."""
    near, far = tcp_pair()
    with far:
        with pytest.raises(FleetError) as refused:
            await client.send(folder, list(needs), near, KEY)
        far.settimeout(60)
        assert far.recv(1) == b""
    return refused.value


async def test_attack_needs_that_name_other_files(there: ModelStore, tmp_path: Path) -> None:
    folder = there.resolve("own").path
    (tmp_path / "there" / "secret.json").write_text("{}")
    (folder / "code.py").write_text("")
    (folder / "link.json").symlink_to("../secret.json")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    for name in (
        "../secret.json",
        str(tmp_path / "there" / "secret.json"),
        "code.py",
        "fleetd-manifest.json",
    ):
        refused = await refusal(folder, CopyNeed("config.json", 0), CopyNeed(name, 0))
        assert isinstance(refused, ModelRefused), name
    for name in ("link.json", "folder.json", "pipe.json"):
        refused = await refusal(folder, CopyNeed(name, 0))
        assert isinstance(refused, ModelRefused), name
        assert "not a file in the model's folder" in refused.message


async def test_needs_of_what_is_not_there(there: ModelStore) -> None:
    folder = there.resolve("own").path
    size = (folder / "config.json").stat().st_size
    assert isinstance(await refusal(folder, CopyNeed("gone.json", 0)), ModelCorrupt)
    assert isinstance(await refusal(folder, CopyNeed("config.json", size + 1)), ModelCorrupt)


async def test_more_needs_than_files_are_refused(there: ModelStore) -> None:
    folder = there.resolve("own").path
    many = [CopyNeed("config.json", 0)] * (limits.COPY_FILES + 1)
    assert isinstance(await refusal(folder, *many), ProtocolError)
    near, far = tcp_pair()
    with far:
        reading = asyncio.create_task(asyncio.to_thread(received_bytes, far))
        await client.send(folder, many[1:], near, KEY)
        assert await reading == limits.COPY_FILES * (folder / "config.json").stat().st_size


def received_bytes(sock: socket.socket) -> int:
    return sum(len(view) for view in SealedReceiver(sock, KEY, "connector").chunks())


def test_attack_a_copy_that_trickles_is_fetched_elsewhere() -> None:
    """A byte now and then is a sign of life for the stream, and no copy."""
    times = CopyTimes()
    copying = PullProgress("w", 0, 1 << 30, "copying")
    times.seen(copying, 100.0)
    enough = int(limits.COPY_LEAST_BYTES_PER_S)
    times.seen(replace(copying, done_bytes=enough), 101.0 + limits.COPY_GRACE_S)
    times.seen(replace(copying, stage="checking"), 1e9)
    with pytest.raises(PeerLate, match="bytes of the copy came in"):
        times.seen(replace(copying, done_bytes=enough + 1), 103.0 + limits.COPY_GRACE_S)
