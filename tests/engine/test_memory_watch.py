"""Where no address-space limit works: a worker whose model's files take too much memory is ended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import fake_worker
import pytest
import unbounded_worker
from asking import ask, folder_of, run

from fleetd import limits
from fleetd.engine.cpu import address_space
from fleetd.engine.daemon_side import memory_watch
from fleetd.engine.daemon_side.memory_watch import MemoryWatch
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Accepted
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import EngineDied, ModelUnsupported
from fleetd.hardware.memory import resident_bytes
from fleetd.limits import GIB, MIB
from fleetd.models.memory_need import WORKING_BYTES, build_bytes

WEIGHTS = 10 * GIB
ALLOWED = WORKING_BYTES + limits.RENDER_BYTES


# ---- What is decided -------------------------------------------------------------------------------------


def test_a_load_may_take_its_weights_twice_and_what_building_takes() -> None:
    watch, bound = MemoryWatch("m", WEIGHTS), build_bytes(WEIGHTS)
    assert all(watch.loading(n) is None for n in (0, WEIGHTS, 2 * WEIGHTS, bound))
    assert isinstance(watch.loading(bound + 1), ModelUnsupported)


def test_a_template_may_take_its_part_whatever_the_model_holds_already() -> None:
    watch = MemoryWatch("m", WEIGHTS)
    assert watch.preparing(WEIGHTS, WEIGHTS) is None
    assert watch.preparing(WEIGHTS + ALLOWED, WEIGHTS) is None
    assert isinstance(watch.preparing(WEIGHTS + ALLOWED + 1, WEIGHTS), ModelUnsupported)


def test_other_prompts_keys_and_values_are_not_the_templates_fault() -> None:
    """Not when they are given back either: the worker's memory may stay resident, to be used again."""
    watch = MemoryWatch("m", WEIGHTS)
    assert watch.preparing(WEIGHTS, WEIGHTS) is None
    assert watch.preparing(WEIGHTS + 20 * GIB, WEIGHTS + 20 * GIB) is None
    assert watch.preparing(WEIGHTS + 20 * GIB, WEIGHTS) is None
    assert watch.preparing(WEIGHTS + 20 * GIB + ALLOWED + 1, WEIGHTS) is not None


def test_each_run_of_prompts_begins_with_what_is_there() -> None:
    watch = MemoryWatch("m", WEIGHTS)
    assert watch.preparing(WEIGHTS, 0) is None
    watch.prepared()
    assert watch.preparing(2 * WEIGHTS, 0) is None
    assert watch.preparing(2 * WEIGHTS + ALLOWED + 1, 0) is not None


def test_the_memory_of_a_process_is_read() -> None:
    assert resident_bytes(os.getpid()) > MIB
    assert resident_bytes(0x7FFFFFFF) == 0


# ---- And done --------------------------------------------------------------------------------------------


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """As on a machine where no address-space limit works."""
    monkeypatch.setattr(address_space, "is_bounded", lambda device: False)
    script = str(unbounded_worker.__file__)

    def does(what: str) -> None:
        monkeypatch.setattr(EngineProcess, "command", (sys.executable, script, what))

    return does


# Half a MiB more at a time, and 4 GiB at most.
GROWING = (
    "{% set ns = namespace(x=[]) %}{% for i in range(8192) %}{% set ns.x = ns.x + ['x' * (524288 + i)] %}"
    "{% endfor %}{{ messages[0].content }}"
)


@pytest.mark.one_loop
async def test_attack_a_template_that_grows_ends_its_worker(
    make_pool: Callable[..., EnginePool],
    unbounded: Callable[[str], None],
    tmp_path: Path,
    chain_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RENDER_BYTES", 64 * MIB)
    monkeypatch.setattr(memory_watch, "WORKING_BYTES", 0)
    unbounded("renders")
    path = shutil.copytree(chain_path, tmp_path / "growing")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": GROWING}))
    async with asyncio.timeout(60):
        with pytest.raises(ModelUnsupported, match="the chat template of growing took"):
            await run(make_pool(), folder_of(path, "growing"), ask("<hello>"))


@pytest.mark.one_loop
async def test_attack_a_build_that_grows_ends_its_worker(
    make_pool: Callable[..., EnginePool], unbounded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUILD_BYTES", 0)
    unbounded("builds")
    async with asyncio.timeout(60):
        with pytest.raises(ModelUnsupported, match="Building greedy took"):
            await make_pool().load(folder_of(Path("/nowhere"), "greedy"))


@pytest.mark.one_loop
async def test_who_only_shares_a_worker_with_such_a_template_may_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By readings that are given here: the worker has accepted one prompt, and prepares another."""
    resident, looked = MIB, asyncio.Event()

    def reading(pid: int) -> int:
        if engine.state == "ready":
            looked.set()
        return resident

    monkeypatch.setattr("fleetd.engine.daemon_side.supervisor.resident_bytes", reading)
    monkeypatch.setattr(EngineProcess, "command", (sys.executable, str(fake_worker.__file__), "accepts one"))
    engine = EngineProcess(WorkerSettings(name="fake", path="/nowhere"), is_bounded=False)
    await engine.start()
    try:
        async with asyncio.timeout(30):
            _ = [progress async for progress in engine.loaded()]
            other = engine.stream(ask("<hello>", "other"))
            assert isinstance(await anext(other), Accepted)
            # The look that counts is one at a time at which the other prompt is prepared.
            looked.clear()
            own = asyncio.ensure_future(anext(engine.stream(ask("grow", "own"))))
            await looked.wait()
            resident += ALLOWED + 1
            with pytest.raises(ModelUnsupported):
                await own
            with pytest.raises(EngineDied):
                await anext(other)
    finally:
        await engine.stop()
