"""Two models take turns in a memory that holds one: the first is used and gives way to the second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import ask, folder_of, run

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import Loading
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import EngineDied, Overloaded
from fleetd.models.folder import ModelFolder

pytestmark = pytest.mark.one_loop

MakePool = Callable[..., EnginePool]
HELLO = "Hello there, world!"


@pytest.fixture
def first(chain_path: Path) -> ModelFolder:
    return folder_of(chain_path, "first")


@pytest.fixture
def second(chain_path: Path) -> ModelFolder:
    return folder_of(chain_path, "second")


def loaded(pool: EnginePool) -> list[str]:
    return sorted(status.model for status in pool.status() if status.state == "ready")


async def use(pool: EnginePool, folder: ModelFolder) -> None:
    async for _ in pool.loading(folder, evict=False):
        pass


@pytest.mark.parametrize("warm", [True, False])
async def test_the_first_model_is_gone_before_the_second_one_loads(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder, warm: bool
) -> None:
    pool = make_pool()
    if warm:
        await pool.load(second)
        pool.keep("second", 7.0)
    async with pool.turn_taking.in_turn(first, second):
        assert loaded(pool) == []
        await use(pool, first)
        assert loaded(pool) == ["first"]
    assert "first" not in loaded(pool)
    await pool.load(second)
    assert loaded(pool) == ["second"]
    assert pool.stays_s("second") == (7.0 if warm else 1800.0)
    assert (await run(pool, second, ask("<hello>"))).text == HELLO


async def test_requests_wait_for_the_turn_of_their_model(
    make_pool: MakePool, chain_path: Path, first: ModelFolder, second: ModelFolder
) -> None:
    pool, third = make_pool(), folder_of(chain_path, "third")
    await pool.load(second)
    waits = [asyncio.Event() for _ in range(2)]

    async def answer(folder: ModelFolder, waiting: asyncio.Event) -> list[str]:
        stages = []
        async for event in pool.stream(folder, ask("<hello>", folder.name)):
            if isinstance(event, Loading):
                stages.append(event.stage)
                waiting.set()
        return stages

    async with pool.turn_taking.in_turn(first, second):
        asked = [
            asyncio.create_task(answer(folder, waiting))
            for folder, waiting in zip((second, third), waits, strict=True)
        ]
        await asyncio.gather(*(waiting.wait() for waiting in waits))
        await use(pool, first)
        assert loaded(pool) == ["first"]
    for stages in await asyncio.gather(*asked):
        assert stages[0] == "waiting for a model that has to make room"
    assert loaded(pool) == ["second", "third"]


async def test_a_model_that_gave_way_comes_back_whatever_goes_wrong(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder
) -> None:
    pool = make_pool()
    await pool.load(second)

    async def fails() -> None:
        async with pool.turn_taking.in_turn(first, second):
            await use(pool, first)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    await use(pool, second)
    assert loaded(pool) == ["second"]
    began = asyncio.Event()

    async def leaves() -> None:
        async with pool.turn_taking.in_turn(first, second):
            began.set()
            await asyncio.Event().wait()

    leaving = asyncio.create_task(leaves())
    await began.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    # Nobody asks for it, and it loads.
    while loaded(pool) != ["second"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_model_that_was_not_loaded_is_not_loaded_for_a_client_that_left(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder
) -> None:
    pool = make_pool()

    async def fails() -> None:
        async with pool.turn_taking.in_turn(first, second):
            await use(pool, first)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert pool.status() == []
    assert pool.turn_taking.why_stays(second) == ""


async def test_a_model_that_is_used_or_pinned_does_not_give_way(
    first: ModelFolder, second: ModelFolder
) -> None:
    pinned: set[str] = set()
    pool = EnginePool(
        WorkerMaker(WorkerOptions(device="cpu", max_memory_bytes=2 << 30)), pinned=lambda: pinned
    )

    async def refused(why: str) -> None:
        with pytest.raises(Overloaded, match=why):
            async with pool.turn_taking.in_turn(first, second):
                pytest.fail("it gave way")
        assert loaded(pool) == ["second"]

    try:
        await pool.load(second)
        answer = pool.stream(second, ask("<count>"))
        while isinstance(await anext(answer), Loading):
            pass
        await refused("second is in use")
        await answer.aclose()
        pinned.add("second")
        await refused("second is pinned")
        # What scores would stay, too.
        pinned.clear()
        pinned.add("first")
        await refused("first is pinned")
    finally:
        await pool.close()


async def test_the_first_model_stays_while_others_use_it(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder
) -> None:
    pool = make_pool()
    async with pool.turn_taking.in_turn(first, second):
        answer = pool.stream(first, ask("<count>"))
        while isinstance(await anext(answer), Loading):
            pass

        async def ends() -> None:
            assert loaded(pool) == ["first"]
            async for _ in answer:
                pass

        ending = asyncio.create_task(ends())
    await ending
    await pool.load(second)
    assert loaded(pool) == ["second"]


async def test_a_request_that_waits_for_its_ended_model_does_not_hold_the_turn(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder
) -> None:
    """It has a claim on the first model and waits for the end of the turn, which waits for claims."""
    pool = make_pool()
    answer = pool.stream(first, ask("<count>"))

    async def again() -> str:
        with pytest.raises(EngineDied):
            async for _ in answer:
                pass
        return (await run(pool, first, ask("<hello>", "again"))).text

    async def scores() -> None:
        async with pool.turn_taking.in_turn(first, second):
            while isinstance(await anext(answer), Loading):
                pass

    scoring = asyncio.create_task(scores())
    while (turns := pool.loader.turns) is None or turns.allowed:  # noqa: ASYNC110  (it announces nothing)
        await asyncio.sleep(0)
    asked = asyncio.create_task(again())
    engine = pool.engine(first)
    assert engine is not None
    engine.kill()
    await scoring
    assert await asked == HELLO
    await pool.load(second)
    assert "second" in loaded(pool)


async def turn_ends(pool: EnginePool) -> None:
    """Wait until the first model is to give way."""
    while (turns := pool.loader.turns) is None or turns.allowed:  # noqa: ASYNC110  (it announces nothing)
        await asyncio.sleep(0)


async def test_who_asks_for_a_model_that_gives_way_does_not_put_off_the_one_that_waits(
    make_pool: MakePool, first: ModelFolder, second: ModelFolder
) -> None:
    pool = make_pool()
    began, waits = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def answered(folder: ModelFolder, name: str) -> None:
        async for event in pool.stream(folder, ask("<hello>", name)):
            if isinstance(event, Loading) and event.stage == "waiting for a model that has to make room":
                waits.set()
        order.append(name)

    async def scores() -> None:
        async with pool.turn_taking.in_turn(first, second):
            await use(pool, first)
            began.set()

    early = pool.stream(first, ask("<count>", "early"))
    scoring = asyncio.create_task(scores())
    await began.wait()
    while isinstance(await anext(early), Loading):
        pass
    await turn_ends(pool)
    # It is loaded and could answer: whoever comes now and later would keep it for ever.
    late = asyncio.create_task(answered(first, "late"))
    waiting = asyncio.create_task(waits.wait())
    await asyncio.wait({late, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert waits.is_set(), "it was answered, and more could be for ever"
    assert loaded(pool) == ["first"]
    assert not pool.lent.holds(first, 0, 1)
    async for _ in early:
        pass
    await scoring
    await answered(second, "second")
    await late
    assert order == ["second", "late"]


async def test_a_model_that_waited_for_a_turn_does_not_wait_for_the_next(
    make_pool: MakePool, chain_path: Path, first: ModelFolder, second: ModelFolder
) -> None:
    pool, third = make_pool(), folder_of(chain_path, "third")
    waits = asyncio.Event()

    async def loads_third() -> None:
        async for _ in pool.loading(third):
            waits.set()

    async with pool.turn_taking.in_turn(first, second):
        asked = asyncio.create_task(loads_third())
        await waits.wait()
    ending = pool.turn_taking.task
    assert ending is not None
    await ending
    with pytest.raises(Overloaded, match="another model is to be loaded first"):
        async with pool.turn_taking.in_turn(first, second):
            pytest.fail("a model that waits waited for one turn more")
    await asked
    async with pool.turn_taking.in_turn(first, second):
        assert loaded(pool) == ["third"]
