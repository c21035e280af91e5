"""The same worker on a GPU, Metal or CUDA. Without one these tests skip and say what was not proved."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from asking import ask, folder_of, run
from shared_runs import LAYERS, SharedRun
from tiny_architectures import tiny
from vector_asking import vector_events

from fleetd.compression.token_scores import SegmentScores, merge
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import EmbedTexts, Generate, Profile, Score, TextsEmbedded, TokenPrompt
from fleetd.engine.sampling.constraint import Constraint
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


# ---- What came after the first loans: in bfloat16, which a CPU computes in float32 -------------------------

DEVICE = "gpu"


@pytest.fixture
def half(chain: ModelFolder, tmp_path: Path) -> ModelFolder:
    """The chain with weights of 16 bits, which hold its numbers exactly."""
    path = tmp_path / "half"
    shutil.copytree(chain.path, path)
    with mx.stream(mx.cpu):
        weights: Any = mx.load(str(path / "model.safetensors"))
        less = {name: weight.astype(mx.bfloat16) for name, weight in weights.items()}
        mx.save_safetensors(str(path / "model.safetensors"), less, metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder_of(path)


@pytest.mark.parametrize("kv_bits", [0, 8])
async def test_answers_in_half_precision_and_with_quantised_rows(
    make_pool: Callable[..., EnginePool], half: ModelFolder, kv_bits: int
) -> None:
    pool = make_pool(device=DEVICE)
    pool.maker.kv_bits = lambda name: kv_bits
    answer = await run(pool, half, ask("<hello>"))
    assert answer.text == "Hello there, world!"


async def test_an_answer_on_the_gpu_keeps_to_its_grammar(
    make_pool: Callable[..., EnginePool], half: ModelFolder
) -> None:
    """What is allowed is told to the device as a mask of all tokens; a free answer runs beside it."""
    pool = make_pool(device=DEVICE)
    held = ask("<hello>", "r1", constraint=Constraint("regex", "Hello (here|there), world[?]"))
    answer, free = await asyncio.gather(run(pool, half, held), run(pool, half, ask("<hello>", "r2")))
    assert (answer.text, free.text) == ("Hello there, world?", "Hello there, world!")


async def test_log_probabilities_of_a_prompt_are_about_those_of_a_cpu(
    make_pool: Callable[..., EnginePool], half: ModelFolder
) -> None:
    prompt = Generate("r", TokenPrompt([65, 66, 67] * 50), max_tokens=2, top_logprobs=2, echo=True)
    found = [await run(make_pool(device=device), half, prompt) for device in (DEVICE, "cpu")]
    ours, theirs = ([entry.logprob for entry in each.logprobs] for each in found)
    assert len(ours) == len(theirs) >= 150
    assert ours == pytest.approx(theirs, abs=0.1)


async def test_scores_of_a_text_are_about_those_of_a_cpu(
    make_pool: Callable[..., EnginePool], half: ModelFolder
) -> None:
    score = Score("s", "abc def " * 300 + "which?", [(2400, 2406)], profile=Profile([(0, 0)], 1))
    found = [await make_pool(device=device).ask(half, score) for device in (DEVICE, "cpu")]
    ours, theirs = (merge([SegmentScores.unpack(each.scores)]) for each in found)
    assert (list(ours.starts), list(ours.ends)) == (list(theirs.starts), list(theirs.ends))
    np.testing.assert_allclose(ours.values, theirs.values, atol=0.05)


async def test_vectors_are_about_those_of_a_cpu(
    make_pool: Callable[..., EnginePool], embedder: ModelFolder
) -> None:
    asked = EmbedTexts("a", ["one text", "another one, which is longer than the first"])
    found = [await vector_events(make_pool(device=device), embedder, asked) for device in (DEVICE, "cpu")]
    ours, theirs = (
        np.frombuffer(event.vectors, "<f4").reshape(-1, event.width)
        for events in found
        for event in events
        if isinstance(event, TextsEmbedded)
    )
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) > 0.999
