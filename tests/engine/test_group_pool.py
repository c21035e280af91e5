"""Models over several machines in the pool: which are named, and what is loaded for others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import folder_of
from files_off_the_loop import files_off_the_loop
from hub_outlines import outline
from rank_workers import places
from sharing import LAYERS, write

from fleetd import limits
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.group_front import GroupFront, NewCut
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import WAITING, LoadFailed, Loading
from fleetd.engine.settings import GroupMember, RingPlace, WorkerOptions, WorkerSettings
from fleetd.errors import FleetError, GroupLost, MemberGone, ModelUnsupported, NoMachine
from fleetd.models import memory_need, model_sizes
from fleetd.models.folder import ModelFolder
from fleetd.models.model_sizes import ModelSizes
from fleetd.models.weights import weight_files

pytestmark = pytest.mark.one_loop

OPTIONS = WorkerOptions(device="cpu", max_memory_bytes=2 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """No test changes its files."""
    return folder_of(write(tmp_path_factory.mktemp("group") / "tiny"))


class FormingGroup:
    """A group whose members never get ready."""

    tokens, kinds, carried = 4096, frozenset[str](), ""
    ring: RingPlace | None = None

    def __init__(self, names: Sequence[str]) -> None:
        self.members = tuple(GroupMember(2, LAYERS, f"m{n}", name) for n, name in enumerate(names))
        self.begun, self.lost = asyncio.Event(), asyncio.Event()

    async def form(self, told: Callable[[Loading], None]) -> None:
        self.begun.set()
        await self.lost.wait()
        raise GroupLost("kitchen has left.")

    async def connect(self, engine: object) -> None:
        raise AssertionError("it is not formed")

    async def watch(self) -> None:
        raise AssertionError("it is not formed")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("told", "expected"), [(True, "kitchen has left."), (False, "Its stream ended.")])
async def test_a_stream_that_ends_is_explained_by_the_machine_it_went_to(
    monkeypatch: pytest.MonkeyPatch, told: bool, expected: str
) -> None:
    """Both are heard of at the same time: the worker here only sees that its stream ends."""
    if not told:
        monkeypatch.setattr(limits, "MEMBER_TELLS_S", 0.01)
    group = FormingGroup(["kitchen"])
    front = GroupFront(WorkerSettings(path="tiny", name="tiny"), group)
    await front.start()
    await group.begun.wait()
    if told:
        asyncio.get_running_loop().call_soon(group.lost.set)
    await front._take(LoadFailed(MemberGone.code, "Its stream ended."))
    assert front.error is not None
    assert (front.error.message, front.state) == (expected, "failed")
    await front.stop()


async def test_layers_for_another_machine_do_not_wait_for_a_group_that_is_formed_here(
    folder: ModelFolder,
) -> None:
    made = list[FormingGroup]()

    def groups(_folder: object, _arithmetic: object, over: Sequence[str]) -> FormingGroup:
        made.append(FormingGroup(over))
        return made[-1]

    pool = EnginePool(WorkerMaker(OPTIONS, groups=groups))
    try:
        loading = asyncio.create_task(pool.load(folder, ["kitchen"]))
        while not made and not loading.done():  # noqa: ASYNC110  (the pool announces nothing before)
            await asyncio.sleep(0)
        await made[0].begun.wait()
        # Its front has some layers only: it is not asked for those of others.
        askers = list[list[str]]()

        def loads(_: Loading) -> None:
            askers.append([name for status in pool.status() for name in status.asked_by])

        async with pool.lent.assisting(folder, 2, LAYERS, progress=loads, asked_by="studio") as engine:
            assert askers, "nothing was told of the load"
            assert all(names == ["studio"] for names in askers)
            assert (engine.settings.first_layer, engine.settings.last_layer) == (2, LAYERS)
            assert [status.asked_by for status in pool.status()] == [[], ["studio"]]
        assert all(status.asked_by == [] for status in pool.status())
        made[0].lost.set()
        with pytest.raises(GroupLost, match="kitchen has left"):
            await loading
    finally:
        await pool.close()


class FormedRing(FormingGroup):
    """A ring whose tunnels are there, and whose other rank never comes."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.members = tuple(GroupMember(0, LAYERS, f"m{n}", name) for n, name in enumerate(names))
        self.ring = places(1 + len(names))[0]

    async def form(self, told: Callable[[Loading], None]) -> None:
        pass

    async def connect(self, engine: object) -> None:
        self.begun.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("lent", ["layers", "rank"])
async def test_what_another_machine_asks_for_does_not_wait_for_a_rank_here_that_waits_for_others(
    folder: ModelFolder, lent: str
) -> None:
    """Of two machines that divide two models, each may have the rank of the other one that is waited for."""
    ring = FormedRing(["kitchen"])
    pool = EnginePool(WorkerMaker(OPTIONS, ranks=lambda *_: ring))
    loading = asyncio.create_task(use(pool.loading(folder, over=["kitchen"], split="tensors")))
    try:
        await ring.begun.wait()
        stages: asyncio.Queue[str] = asyncio.Queue()

        def loads(step: Loading) -> None:
            stages.put_nowait(step.stage)

        other = folder_of(folder.path, "other")
        borrowed = (
            pool.lent.assisting(other, 2, LAYERS, progress=loads)
            if lent == "layers"
            else pool.lent.ranked(other, places(2)[1], progress=loads)
        )

        async def borrow() -> None:
            async with borrowed:
                pass

        borrowing = asyncio.create_task(borrow())
        assert not (await stages.get()).startswith(WAITING)
        borrowing.cancel()
        await asyncio.wait([borrowing])
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        await pool.close()


async def use(steps: AsyncIterator[Loading]) -> None:
    async for _ in steps:
        pass


@pytest.mark.parametrize("over", [["kitchen"], []])
async def test_a_model_is_loaded_without_a_look_at_its_files_on_the_loop(
    folder: ModelFolder, over: list[str]
) -> None:
    made = list[FormingGroup]()

    def groups(_folder: ModelFolder, sizes: ModelSizes, over: Sequence[str]) -> FormingGroup:
        assert len(sizes.each_layer(sizes.need.arithmetic).layers) == LAYERS
        made.append(FormingGroup(over))
        made[-1].lost.set()
        return made[-1]

    pool = EnginePool(WorkerMaker(OPTIONS, groups=groups))
    try:
        with files_off_the_loop(folder.path), contextlib.suppress(GroupLost):
            await pool.load(folder, over)
        assert bool(made) == bool(over)
    finally:
        await pool.close()


async def test_a_model_that_is_to_be_here_alone_is_not_cut(folder: ModelFolder) -> None:
    pool = EnginePool(WorkerMaker(OPTIONS, groups=lambda *_: pytest.fail("it is not cut")))
    try:
        await pool.load(folder, [])
        assert pool.engine(folder) is not None
    finally:
        await pool.close()


async def test_a_model_in_part_is_never_loaded_alone(tmp_path: Path) -> None:
    folder = outline(write(tmp_path / "tiny"), tmp_path / "models")
    pool = EnginePool(WorkerMaker(OPTIONS))
    assert pool.takes_others(folder, None)
    try:
        for over in (None, []):
            with pytest.raises(NoMachine, match="is here in part"):
                await pool.load(folder, over)
        pool.maker.ranks = lambda *_: pytest.fail("not all files are here")
        with pytest.raises(ModelUnsupported, match="need all files"):
            async for _ in pool.loading(folder, over=["kitchen"], split="tensors"):
                pass
        assert pool.status() == []
    finally:
        await pool.close()


async def test_a_worker_is_told_of_the_drafter_for_its_model(folder: ModelFolder, tmp_path: Path) -> None:
    asked: list[str] = []

    async def drafter(target: ModelFolder) -> Path:
        asked.append(target.name)
        return tmp_path / "drafter"

    pool = EnginePool(WorkerMaker(OPTIONS, drafter=drafter))
    try:
        await pool.load(folder)
        engine = pool.engine(folder)
        assert engine is not None
        assert engine.settings.drafter == str(tmp_path / "drafter")
        assert asked == [folder.name]
        assert engine.facts is not None
        # There is none: it says why, and the model runs.
        assert engine.facts.draft_head.startswith("off: ")
    finally:
        await pool.close()


class HeldGroup(FormingGroup):
    """A group whose front is ready, though no worker runs."""

    closed = False

    async def form(self, told: Callable[[Loading], None]) -> None:
        self.begun.set()
        await asyncio.Event().wait()

    def close(self) -> None:
        self.closed = True


async def forming(pool: EnginePool, folder: ModelFolder, made: list[FormingGroup], count: int) -> None:
    """Until so many groups have begun to form."""
    while len(made) < count:  # noqa: ASYNC110  (the pool announces nothing before)
        await asyncio.sleep(0)
    await made[-1].begun.wait()


@pytest.mark.parametrize("asked", [False, True])
async def test_a_group_that_nobody_uses_is_loaded_over_another_cut(
    folder: ModelFolder, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUP_RECUT_IDLE_S", 0.0)
    made = list[FormingGroup]()
    measured = [GroupStage("", 0, 2, 0.1, 0.0, 64), GroupStage("kitchen", 2, LAYERS, 0.9, 0.1, 64)]
    seen: list[object] = []

    def group(*_: object) -> FormingGroup:
        made.append(HeldGroup(["kitchen"]))
        return made[-1]

    def cut_anew(name: str, stages: Sequence[GroupStage], tokens: int) -> NewCut:
        seen.append((name, stages))
        return NewCut(group(), "kitchen is slow.", folder)

    pool = EnginePool(WorkerMaker(OPTIONS, groups=group))
    pool.recut.cut_anew = cut_anew
    try:
        loading = asyncio.create_task(pool.load(folder, ["kitchen"]))
        await forming(pool, folder, made, 1)
        front = pool.loading_engine(folder)
        assert isinstance(front, GroupFront)
        pool.recut.use_idle_time()
        assert not seen  # It loads, and has measured nothing.
        front.state, front.stages = "ready", measured
        await front._notify()
        await loading
        if asked:
            with pool.table.claim(folder.name):
                pool.recut.use_idle_time()
                assert pool.recut.task is None
            return
        pool.recut.use_idle_time()
        await forming(pool, folder, made, 2)
        assert seen == [(folder.name, measured)]
        assert [getattr(each, "closed", None) for each in made] == [True, False]
        (status,) = pool.status()
        assert (status.state, status.cut_anew) == ("loading", "kitchen is slow.")
        # A request waits for it.
        waiting = asyncio.create_task(pool.load(folder))
        pool.recut.use_idle_time()
        await asyncio.sleep(0)
        assert not waiting.done()
        await pool.unload(folder.name)
        with pytest.raises(FleetError):
            await waiting
    finally:
        await pool.close()


async def test_layers_are_loaded_on_when_one_of_two_that_wait_for_them_leaves(folder: ModelFolder) -> None:
    pool = EnginePool(WorkerMaker(OPTIONS))

    async def used() -> bool:
        async with pool.lent.assisting(folder, 2, LAYERS) as engine:
            return engine.state == "ready"

    try:
        stays, leaves = (asyncio.create_task(used()) for _ in range(2))
        while pool.lent.part(folder) is None:  # noqa: ASYNC110  (the pool announces nothing before)
            await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await pool.lent.let_go(folder, 2, LAYERS)
        assert await stays
    finally:
        await pool.close()


async def test_a_model_that_is_unloaded_while_it_is_cut_anew_does_not_load(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUP_RECUT_IDLE_S", 0.0)
    made = list[FormingGroup]()
    ends, ended = asyncio.Event(), asyncio.Event()

    def group(*_: object) -> FormingGroup:
        made.append(HeldGroup(["kitchen"]))
        return made[-1]

    pool = EnginePool(WorkerMaker(OPTIONS, groups=group))
    pool.recut.cut_anew = lambda *_: NewCut(group(), "kitchen is slow.", folder)
    try:
        loading = asyncio.create_task(pool.load(folder, ["kitchen"]))
        await forming(pool, folder, made, 1)
        front = pool.loading_engine(folder)
        assert isinstance(front, GroupFront)
        front.state, front.stages = "ready", [GroupStage("", 0, 2, 0.1, 0.0, 64)]
        await front._notify()
        await loading
        stop = front.stop

        async def slow() -> None:
            ends.set()
            await ended.wait()
            await stop()

        monkeypatch.setattr(front, "stop", slow)
        pool.recut.use_idle_time()
        await ends.wait()
        assert await pool.unload(folder.name)
        ended.set()
        cutting = pool.recut.task
        assert cutting is not None
        await cutting
        assert pool.status() == []
        assert not made[1].begun.is_set()
        assert [getattr(each, "closed", None) for each in made] == [True, True]
    finally:
        await pool.close()


@pytest.mark.parametrize("ends", ["unloaded", "closed"])
async def test_other_machines_load_for_a_model_only_as_long_as_it_is_held(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(limits, "GROUP_RECUT_IDLE_S", 0.0)
    monkeypatch.setattr(limits, "POOL_CHECK_S", 0.01)
    made = list[FormingGroup]()
    prepares, given_up, closed_before = asyncio.Event(), asyncio.Event(), list[bool]()

    def group(*_: object) -> FormingGroup:
        made.append(HeldGroup(["kitchen"]))
        return made[-1]

    async def prepare(kind: str, until: object) -> None:
        prepares.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed_before.append(getattr(made[1], "closed", False))
            given_up.set()

    pool = EnginePool(WorkerMaker(OPTIONS, groups=group))
    pool.recut.cut_anew = lambda *_: NewCut(group(), "kitchen is slow.", folder, None, prepare)
    try:
        loading = asyncio.create_task(pool.load(folder, ["kitchen"]))
        await forming(pool, folder, made, 1)
        front = pool.loading_engine(folder)
        assert isinstance(front, GroupFront)
        front.state, front.stages = "ready", [GroupStage("", 0, 2, 0.1, 0.0, 64)]
        await front._notify()
        await loading
        pool.recut.use_idle_time()
        await prepares.wait()
        # The group before is held meanwhile.
        assert pool.engine(folder) is front
        if ends == "unloaded":
            assert await pool.unload(folder.name)
        else:
            await pool.close()
        await given_up.wait()
        cutting = pool.recut.task
        assert cutting is not None
        await asyncio.wait([cutting])
        assert [getattr(each, "closed", None) for each in made] == [True, True]
        assert closed_before == [False], "what it opened at last would be left"
        assert not made[1].begun.is_set()
        assert pool.status() == []
    finally:
        await pool.close()


async def test_whoever_ends_a_group_and_is_cancelled_is_cancelled(folder: ModelFolder) -> None:
    made = list[FormingGroup]()
    leaves = asyncio.Event()

    class SlowGroup(HeldGroup):
        async def form(self, told: Callable[[Loading], None]) -> None:
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await leaves.wait()

    def group(*_: object) -> FormingGroup:
        made.append(SlowGroup(["kitchen"]))
        return made[-1]

    pool = EnginePool(WorkerMaker(OPTIONS, groups=group))
    try:
        loading = asyncio.create_task(pool.load(folder, ["kitchen"]))
        await forming(pool, folder, made, 1)
        front = pool.loading_engine(folder)
        assert front is not None
        stopping = asyncio.create_task(front.stop())
        while front.state != "stopping":  # noqa: ASYNC110  (it announces that to loads only)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        stopping.cancel()
        leaves.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        with pytest.raises(FleetError):
            await loading
    finally:
        await pool.close()


async def test_a_disk_that_hangs_when_a_model_is_to_load_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = folder_of(write(tmp_path / "slow"), "slow"), folder_of(write(tmp_path / "other"), "other")
    asked, answers, sizes = threading.Event(), threading.Event(), model_sizes.weight_need

    def hangs(path: Path, *given: Any) -> Any:
        if path == slow.path and not answers.is_set():
            asked.set()
            assert answers.wait(100)
        return sizes(path, *given)

    monkeypatch.setattr(model_sizes, "weight_need", hangs)
    pool = EnginePool(WorkerMaker(OPTIONS))
    try:
        loading = asyncio.create_task(pool.load(slow))
        await asyncio.to_thread(asked.wait)
        await pool.load(other)
        assert not loading.done()
        answers.set()
        await loading
        assert sorted(status.model for status in pool.status()) == ["other", "slow"]
    finally:
        answers.set()
        await pool.close()


async def test_what_is_read_of_layers_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(write(tmp_path / "tiny"))
    read, headers = list[Path](), memory_need.read_header

    def reading(file: Path) -> Any:
        read.append(file)
        return headers(file)

    monkeypatch.setattr(memory_need, "read_header", reading)
    first = memory_need.layer_bytes(folder.path, folder.config, "")
    assert len(read) == len(weight_files(folder.path))
    assert memory_need.layer_bytes(folder.path, folder.config, "") == first
    assert len(read) == len(weight_files(folder.path))
    # Other files under the same names are read again.
    file = weight_files(folder.path)[0]
    os.utime(file, ns=(1, 1))
    assert memory_need.layer_bytes(folder.path, folder.config, "") == first
    assert len(read) == 2 * len(weight_files(folder.path))
