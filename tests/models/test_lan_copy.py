"""A model copied between two machines by their real processes: whole, interrupted, damaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hub_files import COMMIT, make_snapshot
from model_files import make_folder
from own_resources import descriptors
from two_machines import (
    CHUNK,
    KEY,
    SHARDS,
    Copy,
    FaultyWire,
    assert_nothing_published,
    changed,
    children,
    copied,
    copying,
    exhausted,
    partials,
    tcp_pair,
)

from fleetd import limits
from fleetd.errors import (
    DiskFull,
    DownloadFailed,
    PeerLost,
    SealBroken,
)
from fleetd.models import install
from fleetd.models.copy import client, receive, send
from fleetd.models.copy.messages import CopyNeed, CopyOffer, SendOrder, digest_of, offer_of
from fleetd.models.model_store import ModelStore
from fleetd.models.verify import verify
from fleetd.sealed.stream import SealedReceiver, SealedSender

# The work is other processes'.
pytestmark = pytest.mark.one_loop


# ---- It works -------------------------------------------------------------------------------------------


async def test_a_copy_is_the_same_model(there: ModelStore, here: ModelStore) -> None:
    seen = await copied(there, here)
    original, copy = there.resolve("own"), here.resolve("own")
    assert here.digest(copy) == there.digest(original)
    names = sorted(file.name for file in copy.path.iterdir())
    assert names == sorted(file.name for file in original.path.iterdir())
    for name in names:
        if name != "fleetd-manifest.json":
            assert (copy.path / name).read_bytes() == (original.path / name).read_bytes()
    assert (copy.source, copy.revision) == ("hub", COMMIT)
    verify(copy.path, full=True)
    assert seen.stages == ["connecting", "copying", "verifying"]
    totals = {step.total_bytes for step in seen.steps if step.stage == "copying"}
    assert totals == {sum(file.size_bytes for file in offer_of(there, original).files)}
    assert partials(here) == {}
    assert seen.sent is None


async def test_no_descriptor_stays_open(there: ModelStore, here: ModelStore) -> None:
    first = 0
    for cut_at in (None, None, 3_000_000, 0):
        with contextlib.suppress(PeerLost):
            await copied(there, here, FaultyWire(cut_at=cut_at))
            here.remove("own")
        # After the first, because the loop keeps what it needs to start processes.
        first = first or descriptors()
        # The loop may close some of them a little later.
        async with asyncio.timeout(60):
            while descriptors() > first:  # noqa: ASYNC110  (nothing tells that one is closed)
                await asyncio.sleep(0.01)


async def test_a_model_of_the_hub_cache_is_copied_from_its_blobs(
    there: ModelStore, here: ModelStore, tmp_path: Path
) -> None:
    make_snapshot(tmp_path / "hub-there", "org/name")
    folder = there.resolve("org/name")
    await copied(there, here, folder=folder)
    assert here.digest(here.resolve("own")) == there.digest(folder)
    assert not any(file.is_symlink() for file in here.resolve("own").path.iterdir())


async def test_a_model_that_is_there_is_not_fetched_again(there: ModelStore, here: ModelStore) -> None:
    await copied(there, here)
    seen = await copied(there, here)
    assert seen.needs == []


async def test_two_copies_at_once_fetch_once(there: ModelStore, here: ModelStore) -> None:
    first, second = await asyncio.gather(copied(there, here), copied(there, here))
    assert sorted([len(first.needs), len(second.needs)]) == [0, 6]
    verify(here.resolve("own").path, full=True)


async def test_the_daemon_does_not_grow_with_the_model(
    there: ModelStore, here: ModelStore, tmp_path: Path
) -> None:
    source = tmp_path / "there" / "big"
    make_folder(source)
    with (source / "model.safetensors").open("r+b") as file:
        header = json.dumps({"w": {"dtype": "U8", "shape": [128 << 20], "data_offsets": [0, 128 << 20]}})
        file.truncate(0)
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (128 << 20))
    folder = there.resolve("big")
    offer = await asyncio.to_thread(offer_of, there, folder)
    sender, receiver = tcp_pair()
    process = psutil.Process()
    before = peak = process.memory_info().rss
    tasks: list[asyncio.Task[None]] = []

    async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
        tasks.append(asyncio.create_task(client.send(folder.path, needs, sender, KEY)))
        return receiver, KEY

    steps = client.receive(offer, here.models_dir, connect, name="own", digest=digest_of(offer))
    async with contextlib.aclosing(steps):
        async for _ in steps:
            peak = max(peak, process.memory_info().rss)
    await tasks[0]
    assert here.resolve("own").weights_bytes > 128 << 20
    assert peak - before < 16 << 20


# ---- Interrupted ----------------------------------------------------------------------------------------


async def killed(there: ModelStore, here: ModelStore, module: str, at: int) -> None:
    """A copy whose ``module`` is killed when so many bytes have passed and what came is written."""
    wire, seen = FaultyWire(hold_at=at), Copy()
    async with copying(there, here, wire, seen) as steps:
        async for step in steps:
            if wire.held.is_set() and step.done_bytes >= at - 2 * CHUNK and step.stage == "copying":
                break
        (process,) = children(module)
        process.send_signal(signal.SIGKILL)
        wire.release()
        with pytest.raises((DownloadFailed, PeerLost)):
            await exhausted(steps)
    assert_nothing_published(here)


@pytest.mark.parametrize("module", ["fleetd.models.copy.receive", "fleetd.models.copy.send"])
@pytest.mark.parametrize(
    "at",
    [2_000, 3_000_000, *(pytest.param(at, marks=pytest.mark.long) for at in (600_000, 5_000_000, 8_000_000))],
)
async def test_what_arrived_before_a_kill_is_not_sent_again(
    there: ModelStore, here: ModelStore, module: str, at: int
) -> None:
    await killed(there, here, module, at)
    kept = {name: size for name, size in partials(here).items() if name != ".revision"}
    # Killed in the middle of a chunk: that one, and of the small files what was not flushed, are lost.
    assert sum(kept.values()) >= at - 2 * CHUNK
    wire = FaultyWire()
    seen = await copied(there, here, wire)
    original = there.resolve("own")
    assert here.digest(here.resolve("own")) == there.digest(original)
    for need in seen.needs:
        assert need.file not in kept
        assert need.offset == kept.get(f"{need.file}.part", 0)
    lacking = sum((original.path / need.file).stat().st_size - need.offset for need in seen.needs)
    assert lacking < sum(file.size_bytes for file in offer_of(there, original).files) - at + 2 * CHUNK
    assert wire.passed <= lacking + 28 * (lacking // CHUNK + len(seen.needs) + 1)


async def test_a_kill_between_the_last_byte_and_the_end_costs_no_byte(
    there: ModelStore, here: ModelStore
) -> None:
    seen = Copy()
    async with copying(there, here, FaultyWire(), seen) as steps:
        async for step in steps:
            if step.stage == "verifying":
                break
    folder = here.models_dir / "own"
    if folder.exists():  # it was faster than its end
        staged = install.partial_folder(here.models_dir, "own")
        folder.rename(staged)
        (staged / "fleetd-manifest.json").unlink()
    staged = install.partial_folder(here.models_dir, "own")
    (staged / ".revision").write_text(COMMIT)
    seen = await copied(there, here)
    assert seen.needs == []
    verify(here.resolve("own").path, full=True)


async def test_a_copy_nobody_wants_any_more_ends_and_frees_its_lock(
    there: ModelStore, here: ModelStore
) -> None:
    wire = FaultyWire(hold_at=3_000_000)
    async with copying(there, here, wire, Copy()) as steps:
        async for step in steps:
            if step.stage == "copying":
                break
    assert_nothing_published(here)
    with install.locked(here.models_dir, "own", lambda step: pytest.fail(step.stage)):
        pass


@pytest.mark.parametrize("module", ["copy.receive", "copy.send"])
def test_the_processes_end_with_their_daemon(module: str, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", f"fleetd.models.{module}"]
    if module == "copy.receive":
        command += [f"--models-dir={tmp_path}", "--name=own", "--digest=" + "0" * 64]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE) as process:
        theirs.close()
        assert process.stdout is not None
        # It is alive and waits for its message.
        assert b"connecting" in process.stdout.readline()
        ours.close()
        assert process.wait(60) == 1


async def test_what_another_attempt_left_is_used_only_if_it_is_the_same(
    there: ModelStore, here: ModelStore
) -> None:
    original = there.resolve("own").path
    staged = install.partial_folder(here.models_dir, "own")
    install.resume(staged, COMMIT, [])  # a download from the hub, at the same commit
    shutil.copy(original / "config.json", staged)
    (staged / "tokenizer.json").write_bytes(b"[]")  # as long, but not the same
    (staged / f"{SHARDS[0]}.part").write_bytes((original / SHARDS[0]).read_bytes()[:1_000_000])
    (staged / f"{SHARDS[1]}.part").write_bytes(bytes(5_000_000))  # longer than it can be
    (staged / "evil.py").write_bytes(b"import os")
    seen = await copied(there, here)
    needs = {need.file: need.offset for need in seen.needs}
    assert "config.json" not in needs
    assert needs["tokenizer.json"] == 0
    assert (needs[SHARDS[0]], needs[SHARDS[1]]) == (1_000_000, 0)
    verify(here.resolve("own").path, full=True)


async def test_what_is_left_of_another_version_is_thrown_away(there: ModelStore, here: ModelStore) -> None:
    staged = install.partial_folder(here.models_dir, "own")
    install.resume(staged, "f" * 40, [])
    (staged / f"{SHARDS[0]}.part").write_bytes(bytes(1_000_000))
    seen = await copied(there, here)
    assert {need.offset for need in seen.needs} == {0}


# ---- Damaged on the way ---------------------------------------------------------------------------------


async def test_attack_flipped_byte_on_the_wire_of_a_copy(there: ModelStore, here: ModelStore) -> None:
    with pytest.raises(SealBroken, match="changed on its way"):
        await copied(there, here, FaultyWire(flip_at=5_000_000))
    assert_nothing_published(here)
    seen = await copied(there, here)  # what came before is kept, and sound
    assert any(need.offset for need in seen.needs)


async def test_attack_copy_cut_short(there: ModelStore, here: ModelStore) -> None:
    for cut_at in (0, 7, 3_000_000):
        with pytest.raises(PeerLost, match="before its end"):
            await copied(there, here, FaultyWire(cut_at=cut_at))
        assert_nothing_published(here)


async def test_attack_bytes_of_somebody_without_the_key(there: ModelStore, here: ModelStore) -> None:
    folder = there.resolve("own")
    offer = offer_of(there, folder)
    sender, receiver = tcp_pair()
    tasks: list[asyncio.Task[None]] = []

    async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
        tasks.append(asyncio.create_task(client.send(folder.path, needs, sender, bytes(32))))
        return receiver, KEY

    steps = client.receive(offer, here.models_dir, connect, name="own", digest=digest_of(offer))
    async with contextlib.aclosing(steps):
        with pytest.raises(SealBroken):
            await exhausted(steps)
    with contextlib.suppress(PeerLost):
        await tasks[0]
    assert_nothing_published(here)


# ---- Full disks and silence -----------------------------------------------------------------------------


async def test_a_model_that_does_not_fit_is_not_begun(
    there: ModelStore, here: ModelStore, offer: CopyOffer
) -> None:
    huge = changed(offer, SHARDS[0], size_bytes=limits.COPY_BYTES // 2)
    seen = Copy()
    async with copying(there, here, FaultyWire(), seen, offer=huge) as steps:
        with pytest.raises(DiskFull, match=r"4,194,3\d\d MiB are needed"):
            await exhausted(steps)
    assert seen.needs == []
    assert_nothing_published(here)
    assert partials(here) == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(there: ModelStore, here: ModelStore) -> None:
    staged = install.partial_folder(here.models_dir, "own")
    install.resume(staged, COMMIT, [])
    (staged / f"{SHARDS[1]}.part").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match="is full"):
        await copied(there, here)
    assert_nothing_published(here)
    assert partials(here) == {}


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    monkeypatch.setattr(limits, "SEALED_STALL_S", 0.1)
    near, far = tcp_pair()
    with near, far:
        yield near, far


def test_a_sender_that_falls_silent_is_given_up(
    there: ModelStore, here: ModelStore, offer: CopyOffer, stalling: tuple[socket.socket, socket.socket]
) -> None:
    sender = SealedSender(stalling[0], KEY, "acceptor")

    @contextlib.contextmanager
    def connect(needs: list[CopyNeed]) -> Iterator[SealedReceiver]:
        sender.send((there.resolve("own").path / needs[0].file).read_bytes())
        yield SealedReceiver(stalling[1], KEY, "connector")

    with pytest.raises(PeerLost, match="sent nothing"):
        receive.receive(offer, digest_of(offer), "own", here.models_dir, connect, lambda step: None)
    assert_nothing_published(here)
    assert "tokenizer.json" in partials(here)


def test_a_receiver_that_takes_nothing_is_given_up(
    there: ModelStore, stalling: tuple[socket.socket, socket.socket]
) -> None:
    stalling[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    folder = there.resolve("own").path
    order = SendOrder(str(folder), KEY, [CopyNeed(shard, 0) for shard in SHARDS] * 4)
    with pytest.raises(PeerLost, match="taken nothing"):
        send.send(order, SealedSender(stalling[0], KEY, "acceptor"), lambda step: None)
