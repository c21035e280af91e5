"""The same worker on a GPU, Metal or CUDA. Without one these tests skip and say what was not proved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import mlx.core as mx
import pytest
from asking import ask, run
from shared_runs import LAYERS, SharedRun
from tiny_architectures import tiny

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Generate, TokenPrompt
from fleetd.models.folder import ModelFolder
from fleetd.plan.prefill.split import Split

pytestmark = [
    pytest.mark.one_loop,
    # A driver that was asked for a GPU does not survive a fork.
    pytest.mark.usefixtures("own_process"),
    pytest.mark.skipif(
        not mx.is_available(mx.gpu),
        reason="no Metal or CUDA device: the engine's GPU path is NOT tested on this machine",
    ),
]


async def test_answers_on_the_gpu(make_pool: Callable[..., EnginePool], chain: ModelFolder) -> None:
    pool = make_pool(device="gpu")
    answer = await run(pool, chain, ask("<hello>"))
    assert answer.text == "Hello there, world!"
    assert pool.status()[0].device in ("metal", "cuda")


async def test_a_batch_on_the_gpu_answers_as_each_alone(
    make_pool: Callable[..., EnginePool], chain: ModelFolder
) -> None:
    """The chain's certainty is far above any kernel's rounding: what differs here is a mix-up, not noise."""
    pool = make_pool(device="gpu")
    markers = ["<hello>", "<utf8>", "<ponder>", "<cutoff>", "<count>"]
    together = await asyncio.gather(
        *(run(pool, chain, ask(m, f"r{i}", max_tokens=40)) for i, m in enumerate(markers))
    )
    alone = [await run(pool, chain, ask(m, f"s{i}", max_tokens=40)) for i, m in enumerate(markers)]
    assert [(a.text, a.reasoning) for a in together] == [(a.text, a.reasoning) for a in alone]


async def test_the_same_prompt_is_always_cut_in_the_same_places_on_the_gpu(
    make_pool: Callable[..., EnginePool], chain: ModelFolder
) -> None:
    pool = make_pool(device="gpu", prefix_cache_bytes=1)
    requests = [Generate(f"r{i}", TokenPrompt([65] * 3000), max_tokens=4, top_logprobs=3) for i in range(2)]
    one, two = [await run(pool, chain, r) for r in requests]
    assert [(p.token, p.logprob) for p in one.logprobs] == [(p.token, p.logprob) for p in two.logprobs]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "split",
    [
        Split("layers", (0, 1, 3, LAYERS), LAYERS, 20, 300, 64),
        Split("layers", (0, LAYERS, LAYERS), LAYERS, 0, 300, 64),
        Split("tokens", (20, 148, 212, 300), LAYERS, 20, 300, 64),
    ],
)
def test_a_shared_prefill_on_the_gpu_has_the_bytes_of_the_local_one(name: str, split: Split) -> None:
    """Rows are written into MLX's own memory: on a GPU that shares it, that has to be what it reads."""
    shared = SharedRun(tiny(name), split, device="gpu")
    shared.check(shared.finish().cache)
