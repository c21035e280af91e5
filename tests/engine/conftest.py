from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import chain_model
import forked_programs
import mlx.core as mx
import mlx.nn as nn
import pytest
import set_speeds
import tiny_architectures
import tiny_models
import vector_models
from asking import folder_of
from disk_worker import BLOCK
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from two_disks import PROMPT, TwoMachines
from vector_asking import vectors_folder

from fleetd import limits
from fleetd.engine.cpu import mlx_functions, products
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.settings import WorkerOptions
from fleetd.models.folder import ModelFolder


@pytest.fixture(scope="session")
def chain_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain_model.build(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def chain(chain_path: Path) -> ModelFolder:
    return folder_of(chain_path)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return vectors_folder(vector_models.write(tmp_path_factory.mktemp("m") / "embedder", "bert"))


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = vector_models.write(tmp_path_factory.mktemp("m") / "ranker", "bert", head="classifier")
    return vectors_folder(path)


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers, computed on the CPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    made = tiny_architectures.tiny("llama", num_hidden_layers=2, vocab_size=tiny_models.VOCAB)
    mx.set_default_device(before)
    return made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is waited for, as the programs of ``set_speeds`` wait."""
    for name, value in (set_speeds.LIMITS | {"CACHE_FLUSH_S": 60.0}).items():
        monkeypatch.setattr(limits, name, value)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three blocks are asked for, of which two lack, and have a state at the end of each."""
    monkeypatch.setattr(limits, "FETCH_LEAST_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(limits, "CHECKPOINT_BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(limits, "FETCH_CHECK_BLOCKS", 2)


@pytest.fixture
def make_machines(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., TwoMachines]]:
    with ExitStack() as stack:

        def make(model: Any, prompt: list[int] = PROMPT) -> TwoMachines:
            made = TwoMachines(model, tokenizer, tmp_path, prompt)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def machines(model: Any, make_machines: Callable[..., TwoMachines]) -> TwoMachines:
    return make_machines(model)


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started as the daemon starts them, for tests of the start itself."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", forked_programs.exec_as_usual)


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[..., EnginePool]]:
    async with AsyncExitStack() as stack:

        def make(idle_unload_s: float = 1800.0, **options: Any) -> EnginePool:
            given = WorkerOptions(**{"device": "cpu", "max_memory_bytes": 2 << 30, **options})
            pool = EnginePool(WorkerMaker(given), idle_unload_s=idle_unload_s)
            stack.push_async_callback(pool.close)
            return pool

        yield make


@pytest.fixture
def pool(make_pool: Callable[..., EnginePool]) -> EnginePool:
    return make_pool()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """MLX computes on the CPU, whatever the machine has."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def cpu_installed(on_cpu: None) -> Iterator[None]:
    """What a worker on a CPU computes with; undone afterwards."""
    if products._blas is None:
        pytest.skip(
            "MKL could not be loaded: nothing of fleetd.engine.cpu.products's exactness can be checked here"
        )
    modules = {
        m: m.swiglu
        for name, m in list(sys.modules.items())
        if name.startswith("mlx_lm.models.") and hasattr(m, "swiglu")
    }
    stock = {name: getattr(mx.fast, name) for name in ("scaled_dot_product_attention", "rms_norm", "rope")}
    matmul, linear, head = mx.matmul, nn.Linear.__call__, nn.Embedding.as_linear
    windows = [
        (cache, name, getattr(cache, name))
        for cache in (RotatingKVCache, BatchRotatingKVCache)
        for name in ("keys_and_values", "make_mask")
    ]
    mlx_functions.install()
    yield
    mx.enable_compile()
    for name, function in stock.items():
        setattr(mx.fast, name, function)
    mx.matmul, nn.Linear.__call__, nn.Embedding.as_linear = matmul, linear, head
    for cache, name, function in windows:
        setattr(cache, name, function)
    for module, function in modules.items():
        module.swiglu = function
