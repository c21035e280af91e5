"""Which worker helps: the one that has the layers, else one that is loaded where nothing has to give way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import folder_of, run
from sharing import LAYERS, prompt, write

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import EngineError, OutOfMemory
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES

pytestmark = pytest.mark.one_loop
MakePool = Callable[..., EnginePool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return folder_of(write(tmp_path_factory.mktemp("tiny"), hidden_size=256, intermediate_size=1024), "tiny")


def weights_bytes(model: ModelFolder) -> int:
    return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))


async def test_a_loaded_model_helps_with_any_of_its_layers(make_pool: MakePool, model: ModelFolder) -> None:
    pool = make_pool()
    assert pool.engine(model) is None
    assert not pool.lent.holds(model, 0, 2)
    async with (
        pool.lent.assisting(model, 0, 0) as every,
        pool.lent.assisting(model, 0, 2) as first,
        pool.lent.assisting(model, 2, LAYERS) as second,
    ):
        assert every is first is second is pool.engine(model)
        assert pool.lent.part(model) is None
        assert pool.table.in_use("tiny")
    assert not pool.table.in_use("tiny")
    assert (await run(pool, model, prompt("r", 20, shared=False))).finished.usage.completion_tokens == 4
    assert [status.model for status in pool.status()] == ["tiny"]


async def test_who_asks_for_some_layers_gets_no_more_where_all_would_fit(
    make_pool: MakePool, model: ModelFolder
) -> None:
    """Whoever asked has found that its prompt does not fit beside all of them."""
    pool = make_pool()
    assert await _held(pool, model, 0, 2) == "tiny[0:2]"
    assert pool.lent.part(model) == (0, 2)


async def test_a_model_that_is_being_loaded_helps_once_it_is(make_pool: MakePool, model: ModelFolder) -> None:
    pool = make_pool()
    whole = asyncio.create_task(_held(pool, model, 0, 0))
    while (loaded := pool.table.models.get("tiny")) is None or loaded.state != "loading":  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await _held(pool, model, 0, 2) == "tiny" == await whole
    assert [status.model for status in pool.status()] == ["tiny"]


async def test_where_the_model_does_not_fit_some_layers_help(make_pool: MakePool, model: ModelFolder) -> None:
    pool = make_pool(max_memory_bytes=WORKING_BYTES + weights_bytes(model) * 3 // 4)
    both = await asyncio.gather(*(_held(pool, model, 0, 2) for _ in range(2)))
    assert both == ["tiny[0:2]", "tiny[0:2]"]
    assert pool.engine(model) is None
    assert pool.lent.holds(model, 0, 2)
    assert pool.lent.holds(model, 1, 2)
    assert not pool.lent.holds(model, 2, LAYERS)
    (status,) = pool.status()
    assert (status.model, status.state) == ("tiny[0:2]", "ready")
    assert (status.part_of, status.first_layer, status.last_layer) == ("tiny", 0, 2)
    assert pool.lent.part(model) == (0, 2)
    # Prefill is measured here too; there is nothing that it could decode.
    assert status.speed.prefill_tok_s > 0
    assert status.speed.decode_tok_s == 0
    assert await _held(pool, model, 0, 1) == "tiny[0:2]"
    # All of them are still too many, which is nobody's failure here, and what is there stays.
    for last in (0, LAYERS):
        with pytest.raises(OutOfMemory):
            await _held(pool, model, 0, last)
    assert [status.model for status in pool.status()] == ["tiny[0:2]"]
    assert await pool.unload("tiny")
    assert pool.status() == []
    assert pool.lent.part(model) is None


async def test_a_part_answers_nothing_and_goes_with_its_model(
    make_pool: MakePool, model: ModelFolder
) -> None:
    pool = make_pool(max_memory_bytes=WORKING_BYTES + weights_bytes(model) * 3 // 4)
    async with pool.lent.assisting(model, 2, LAYERS) as engine:
        assert engine.facts is not None
        assert (engine.facts.first_layer, engine.facts.last_layer) == (2, LAYERS)
        with pytest.raises(EngineError, match="some of the model's layers"):
            await anext(engine.stream(prompt("r", 20)))
    assert not await pool.unload("tin")
    assert await pool.unload("tiny")
    assert not pool.lent.holds(model, 2, LAYERS)


async def _held(pool: EnginePool, model: ModelFolder, first: int, last: int) -> str:
    async with pool.lent.assisting(model, first, last) as engine:
        return engine.settings.name
