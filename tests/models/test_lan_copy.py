"""A model copied between two machines by their real processes: whole, interrupted, damaged, lied about."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hub_files import COMMIT, make_snapshot
from model_files import CONFIG, make_folder

from fleetd import limits
from fleetd.errors import (
    DiskFull,
    DownloadFailed,
    FleetError,
    ModelCorrupt,
    ModelRefused,
    PeerLost,
    ProtocolError,
    SealBroken,
)
from fleetd.models import copy_client, copy_receive, copy_send, install
from fleetd.models.copy_offer import Need, Offer, OfferedFile, SendOrder, check, digest_of, offer_of
from fleetd.models.progress import PullProgress
from fleetd.models.safetensors_write import Planned, write_safetensors
from fleetd.models.store import ModelStore
from fleetd.models.verify import verify
from fleetd.sealed.stream import SealedReceiver, SealedSender

# The work is other processes'.
pytestmark = pytest.mark.one_loop

KEY = bytes(range(32))
CHUNK = limits.SEALED_CHUNK_BYTES
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


# ---- Two machines and the wire between them --------------------------------------------------------------


@pytest.fixture
def there(tmp_path: Path) -> ModelStore:
    """A machine that has the model "own": two shards of 4 MiB and a bit."""
    store = ModelStore(tmp_path / "there", hub_cache=tmp_path / "hub-there")
    staged = make_folder(install.partial_folder(store.models_dir, "own"))
    (staged / "model.safetensors").unlink()
    rng = np.random.default_rng(7)
    for number, name in enumerate(SHARDS):
        values = rng.standard_normal((1 << 20) + 100).astype(np.float32)
        planned = Planned(f"w{number}", "F32", values.shape, lambda values=values: values)
        write_safetensors(staged / name, [planned])
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    (staged / "model.safetensors.index.json").write_text(json.dumps(index))
    install.publish(
        staged, store.models_dir, "own", name="own", source="hub", revision=COMMIT, report=lambda step: None
    )
    return store


@pytest.fixture
def here(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "here", hub_cache=tmp_path / "hub-here")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


class Wire:
    """Carries a stream from its sender to its receiver, counts the bytes, and misbehaves on demand.

    Args:
        hold_at: nothing passes after so many bytes until ``release``.
        cut_at: the connection closes after so many.
        flip_at: this byte arrives changed.
    """

    def __init__(
        self, *, hold_at: int | None = None, cut_at: int | None = None, flip_at: int | None = None
    ) -> None:
        self._marks = (hold_at, cut_at, flip_at)
        self.passed = 0
        self.held = threading.Event()
        self._released = threading.Event()
        self.sender, self._from = tcp_pair()
        self._to, self.receiver = tcp_pair()
        # Little is under way at any time, so that who is held here still has something to send.
        self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        self._from.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        for sock in (self.sender, self.receiver):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def release(self) -> None:
        self._released.set()

    def _carry(self) -> None:
        hold_at, cut_at, flip_at = self._marks
        with self._from, self._to, contextlib.suppress(OSError):
            while data := bytearray(self._from.recv(1 << 16)):
                if flip_at is not None and self.passed <= flip_at < self.passed + len(data):
                    data[flip_at - self.passed] ^= 1
                if cut_at is not None and self.passed + len(data) >= cut_at:
                    self._send(data[: cut_at - self.passed])
                    return
                if hold_at is not None and not self.held.is_set() and self.passed + len(data) >= hold_at:
                    first = hold_at - self.passed
                    self._send(data[:first])
                    del data[:first]
                    self.held.set()
                    self._released.wait(60)
                self._send(data)

    def _send(self, data: bytearray) -> None:
        self._to.sendall(data)
        self.passed += len(data)

    def close(self) -> None:
        self.release()
        for sock in (self.sender, self.receiver, self._from, self._to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join(10)


@dataclass
class Copy:
    """One attempt: what was asked for, what was reported, how each side ended."""

    needs: list[Need] = field(default_factory=list)
    steps: list[PullProgress] = field(default_factory=list)
    sent: FleetError | None = None

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(step.stage for step in self.steps))


@contextlib.asynccontextmanager
async def copying(
    there: ModelStore, here: ModelStore, wire: Wire, seen: Copy, **changes: Any
) -> AsyncIterator[Any]:
    """The steps of a copy of "own". ``changes``: another ``offer``, ``digest`` or ``folder`` to send from."""
    folder = changes.get("folder") or (await asyncio.to_thread(there.resolve, "own"))
    offer: Offer = changes.get("offer") or await asyncio.to_thread(offer_of, there, folder)
    sending: list[asyncio.Task[None]] = []

    async def connect(needs: list[Need]) -> tuple[socket.socket, bytes]:
        seen.needs = needs
        send = copy_client.send(folder.path, needs, wire.sender, KEY)
        sending.append(asyncio.create_task(send))
        return wire.receiver, KEY

    steps = copy_client.receive(
        offer, here.models_dir, connect, name="own", digest=changes.get("digest") or digest_of(offer)
    )
    try:
        async with contextlib.aclosing(steps):
            yield steps
    finally:
        await asyncio.to_thread(wire.close)
        for task in sending:
            try:
                await task
            except FleetError as error:
                seen.sent = error


async def copied(there: ModelStore, here: ModelStore, wire: Wire | None = None, **changes: Any) -> Copy:
    seen = Copy()
    async with copying(there, here, wire or Wire(), seen, **changes) as steps:
        await exhausted(steps, seen)
    return seen


def partials(store: ModelStore) -> dict[str, int]:
    folder = install.partial_folder(store.models_dir, "own")
    return {entry.name: entry.stat().st_size for entry in folder.iterdir()} if folder.exists() else {}


def children(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


def assert_nothing_published(store: ModelStore) -> None:
    assert store.installed() == []
    visible = [entry for entry in store.models_dir.iterdir() if not entry.name.startswith(".")]
    assert visible == []
    assert children("fleetd.models.copy_receive") == children("fleetd.models.copy_send") == []


# ---- It works --------------------------------------------------------------------------------------------


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
    counts = []
    for cut_at in (None, None, 3_000_000, 0):
        with contextlib.suppress(PeerLost):
            await copied(there, here, Wire(cut_at=cut_at))
            here.remove("own")
        counts.append(psutil.Process().num_fds())
    # After the first, because the loop keeps what it needs to start processes.
    assert len(set(counts)) == 1


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

    async def connect(needs: list[Need]) -> tuple[socket.socket, bytes]:
        tasks.append(asyncio.create_task(copy_client.send(folder.path, needs, sender, KEY)))
        return receiver, KEY

    steps = copy_client.receive(offer, here.models_dir, connect, name="own", digest=digest_of(offer))
    async with contextlib.aclosing(steps):
        async for _ in steps:
            peak = max(peak, process.memory_info().rss)
    await tasks[0]
    assert here.resolve("own").weights_bytes > 128 << 20
    assert peak - before < 16 << 20


# ---- Interrupted -----------------------------------------------------------------------------------------


async def exhausted(steps: AsyncIterator[PullProgress], seen: Copy | None = None) -> None:
    async for step in steps:
        if seen is not None:
            seen.steps.append(step)


async def killed(there: ModelStore, here: ModelStore, module: str, at: int) -> None:
    """A copy whose ``module`` is killed when so many bytes have passed and what came is written."""
    wire, seen = Wire(hold_at=at), Copy()
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


@pytest.mark.parametrize("module", ["fleetd.models.copy_receive", "fleetd.models.copy_send"])
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
    wire = Wire()
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
    async with copying(there, here, Wire(), seen) as steps:
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
    wire = Wire(hold_at=3_000_000)
    async with copying(there, here, wire, Copy()) as steps:
        async for step in steps:
            if step.stage == "copying":
                break
    assert_nothing_published(here)
    with install.locked(here.models_dir, "own", lambda step: pytest.fail(step.stage)):
        pass


@pytest.mark.parametrize("module", ["copy_receive", "copy_send"])
def test_the_processes_end_with_their_daemon(module: str, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", f"fleetd.models.{module}"]
    if module == "copy_receive":
        command += [f"--models-dir={tmp_path}", "--name=own", "--digest=" + "0" * 64]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE) as process:
        theirs.close()
        assert process.stdout is not None
        # It is alive and waits for its message.
        assert b"connecting" in process.stdout.readline()
        ours.close()
        assert process.wait(10) == 1


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


# ---- Damaged on the way ----------------------------------------------------------------------------------


async def test_attack_flipped_byte_on_the_wire_of_a_copy(there: ModelStore, here: ModelStore) -> None:
    with pytest.raises(SealBroken, match="changed on its way"):
        await copied(there, here, Wire(flip_at=5_000_000))
    assert_nothing_published(here)
    seen = await copied(there, here)  # what came before is kept, and sound
    assert any(need.offset for need in seen.needs)


async def test_attack_copy_cut_short(there: ModelStore, here: ModelStore) -> None:
    for cut_at in (0, 7, 3_000_000):
        with pytest.raises(PeerLost, match="before its end"):
            await copied(there, here, Wire(cut_at=cut_at))
        assert_nothing_published(here)


async def test_attack_bytes_of_somebody_without_the_key(there: ModelStore, here: ModelStore) -> None:
    folder = there.resolve("own")
    offer = offer_of(there, folder)
    sender, receiver = tcp_pair()
    tasks: list[asyncio.Task[None]] = []

    async def connect(needs: list[Need]) -> tuple[socket.socket, bytes]:
        tasks.append(asyncio.create_task(copy_client.send(folder.path, needs, sender, bytes(32))))
        return receiver, KEY

    steps = copy_client.receive(offer, here.models_dir, connect, name="own", digest=digest_of(offer))
    async with contextlib.aclosing(steps):
        with pytest.raises(SealBroken):
            await exhausted(steps)
    with contextlib.suppress(PeerLost):
        await tasks[0]
    assert_nothing_published(here)


# ---- Lies ------------------------------------------------------------------------------------------------


def changed(offer: Offer, which: str, /, **fields: Any) -> Offer:
    """The offer with something else said about one file."""
    files = [
        OfferedFile(**({"name": file.name, "size_bytes": file.size_bytes, "blake3": file.blake3} | fields))
        if file.name == which
        else file
        for file in offer.files
    ]
    return Offer(offer.source, offer.revision, files)


@pytest.fixture
def offer(there: ModelStore) -> Offer:
    return offer_of(there, there.resolve("own"))


async def test_attack_other_files_than_the_digest_asked_for(
    there: ModelStore, here: ModelStore, offer: Offer
) -> None:
    lie = changed(offer, SHARDS[0], blake3="0" * 64)
    with pytest.raises(ModelCorrupt, match="make up the model"):
        await copied(there, here, offer=lie, digest=digest_of(offer))
    assert not here.models_dir.exists()


async def test_attack_files_that_are_not_what_their_hash_says(
    there: ModelStore, here: ModelStore, offer: Offer
) -> None:
    with pytest.raises(ModelCorrupt, match="another checksum"):
        await copied(there, here, offer=changed(offer, SHARDS[1], blake3="0" * 64))
    assert_nothing_published(here)
    assert f"{SHARDS[1]}.part" not in partials(here)
    assert SHARDS[0] in partials(here)


async def test_attack_offered_sizes_that_are_wrong(there: ModelStore, here: ModelStore, offer: Offer) -> None:
    size = next(file.size_bytes for file in offer.files if file.name == SHARDS[1])
    with pytest.raises(ModelCorrupt, match="another checksum"):
        await copied(there, here, offer=changed(offer, SHARDS[1], size_bytes=size - 1))
    with pytest.raises(PeerLost, match="without its last 1 bytes"):
        await copied(there, here, offer=changed(offer, SHARDS[1], size_bytes=size + 1))
    assert_nothing_published(here)


async def test_attack_more_bytes_than_were_asked_for(
    there: ModelStore, here: ModelStore, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy_client.send

    async def send_twice(folder: Path, needs: list[Need], sock: socket.socket, key: bytes) -> None:
        await real(folder, [*needs, Need("config.json", 0)], sock, key)

    monkeypatch.setattr(copy_client, "send", send_twice)
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
def test_attack_names_that_are_no_file_of_a_model(offer: Offer, name: str) -> None:
    for lie in (
        changed(offer, "tokenizer.json", name=name),
        Offer(offer.source, offer.revision, [*offer.files, OfferedFile(name, 1, "0" * 64)]),
    ):
        with pytest.raises(ModelRefused, match="not the name"):
            check(lie, digest_of(lie))


async def test_attack_path_in_an_offer_stops_the_process_too(
    there: ModelStore, here: ModelStore, offer: Offer, tmp_path: Path
) -> None:
    lie = changed(offer, "tokenizer.json", name="../../../escaped.json")
    with pytest.raises(ModelRefused):
        await copied(there, here, offer=lie)
    found = await asyncio.to_thread(lambda: list(tmp_path.rglob("escaped*")))
    assert found == []


async def test_attack_name_of_another_model(there: ModelStore, here: ModelStore, offer: Offer) -> None:
    async def connect(needs: list[Need]) -> tuple[socket.socket, bytes]:
        raise AssertionError

    for name in ("../own", "/own", ".."):
        steps = copy_client.receive(offer, here.models_dir, connect, name=name, digest=digest_of(offer))
        async with contextlib.aclosing(steps):
            with pytest.raises(FleetError, match="not the name of a model"):
                await anext(steps)


def test_names_that_differ_only_in_case_are_one_name(offer: Offer) -> None:
    lie = Offer(offer.source, None, [*offer.files, OfferedFile("Config.json", 2, "0" * 64)])
    with pytest.raises(ModelRefused, match="twice"):
        check(lie, digest_of(lie))


def test_offers_are_bounded(offer: Offer) -> None:
    def check_with(*extra: OfferedFile) -> None:
        grown = Offer(offer.source, None, [*offer.files, *extra])
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
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=Offer) == offer
    (folder.path / "one-more.jinja").touch()
    with pytest.raises(ModelRefused, match=f"{limits.COPY_FILES} can be copied"):
        offer_of(there, folder)


async def test_attack_config_that_names_code_ends_the_copy_before_the_weights(
    there: ModelStore, here: ModelStore
) -> None:
    folder = there.resolve("own")
    (folder.path / "config.json").write_text(json.dumps(CONFIG | {"model_file": "evil.py"}))
    seen = Copy()
    async with copying(there, here, Wire(), seen) as steps:
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


# ---- Full disks and silence ------------------------------------------------------------------------------


async def test_a_model_that_does_not_fit_is_not_begun(
    there: ModelStore, here: ModelStore, offer: Offer
) -> None:
    huge = changed(offer, SHARDS[0], size_bytes=limits.COPY_BYTES // 2)
    seen = Copy()
    async with copying(there, here, Wire(), seen, offer=huge) as steps:
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
    there: ModelStore, here: ModelStore, offer: Offer, stalling: tuple[socket.socket, socket.socket]
) -> None:
    sender = SealedSender(stalling[0], KEY, "acceptor")

    @contextlib.contextmanager
    def connect(needs: list[Need]) -> Iterator[SealedReceiver]:
        sender.send((there.resolve("own").path / needs[0].file).read_bytes())
        yield SealedReceiver(stalling[1], KEY, "connector")

    with pytest.raises(PeerLost, match="sent nothing"):
        copy_receive.receive(offer, digest_of(offer), "own", here.models_dir, connect, lambda step: None)
    assert_nothing_published(here)
    assert "tokenizer.json" in partials(here)


def test_a_receiver_that_takes_nothing_is_given_up(
    there: ModelStore, stalling: tuple[socket.socket, socket.socket]
) -> None:
    stalling[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    folder = there.resolve("own").path
    order = SendOrder(str(folder), KEY, [Need(shard, 0) for shard in SHARDS] * 4)
    with pytest.raises(PeerLost, match="taken nothing"):
        copy_send.send(order, SealedSender(stalling[0], KEY, "acceptor"), lambda step: None)


# ---- What may be asked of a sender -----------------------------------------------------------------------


async def refusal(folder: Path, *needs: Need) -> FleetError:
    """How the sending process refuses; the other side gets not one byte."""
    near, far = tcp_pair()
    with far:
        with pytest.raises(FleetError) as refused:
            await copy_client.send(folder, list(needs), near, KEY)
        far.settimeout(10)
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
        refused = await refusal(folder, Need("config.json", 0), Need(name, 0))
        assert isinstance(refused, ModelRefused), name
    for name in ("link.json", "folder.json", "pipe.json"):
        refused = await refusal(folder, Need(name, 0))
        assert isinstance(refused, ModelRefused), name
        assert "not a file in the model's folder" in refused.message


async def test_needs_of_what_is_not_there(there: ModelStore) -> None:
    folder = there.resolve("own").path
    size = (folder / "config.json").stat().st_size
    assert isinstance(await refusal(folder, Need("gone.json", 0)), ModelCorrupt)
    assert isinstance(await refusal(folder, Need("config.json", size + 1)), ModelCorrupt)


async def test_more_needs_than_files_are_refused(there: ModelStore) -> None:
    folder = there.resolve("own").path
    many = [Need("config.json", 0)] * (limits.COPY_FILES + 1)
    assert isinstance(await refusal(folder, *many), ProtocolError)
    near, far = tcp_pair()
    with far:
        reading = asyncio.create_task(asyncio.to_thread(received_bytes, far))
        await copy_client.send(folder, many[1:], near, KEY)
        assert await reading == limits.COPY_FILES * (folder / "config.json").stat().st_size


def received_bytes(sock: socket.socket) -> int:
    return sum(len(view) for view in SealedReceiver(sock, KEY, "connector").chunks())
