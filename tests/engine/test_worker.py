"""The worker as the daemon sees it: a real process, a real (tiny) model, real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chain_model
import msgspec
import psutil
import pytest
from asking import GREEDY, ask, folder_of, run
from held_prompts import HeldPrompt

from fleetd import limits
from fleetd.engine import protocol
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Generate,
    Loading,
    Prefill,
    Ready,
    Tokenized,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.worker import EXIT_ORPHANED
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineDied,
    EngineStalled,
    FleetError,
    ModelCorrupt,
    ModelUnsupported,
    OutOfMemory,
)
from fleetd.models.folder import ModelFolder

WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.one_loop
@pytest.mark.usefixtures("own_process")
async def test_answers_and_counts(pool: EnginePool, chain: ModelFolder) -> None:
    """The real command; the prompt's text is in no argument of it."""
    answer = await run(pool, chain, ask("<hello>"))
    assert answer.text == "Hello there, world!"
    assert answer.finished.reason == "stop"
    assert answer.finished.usage.completion_tokens == 5
    accepted = [e for e in answer.events if isinstance(e, Accepted)]
    assert accepted[0].prompt_tokens == answer.finished.usage.prompt_tokens == len("user: ") + 1
    first = next(e for e in answer.events if not isinstance(e, Loading))
    assert first == Tokenized(accepted[0].id, accepted[0].prompt_tokens)
    progress = [e for e in answer.events if isinstance(e, Prefill)]
    assert progress[-1].done == accepted[0].prompt_tokens - 1
    (status,) = pool.status()
    assert status.pid is not None
    command = psutil.Process(status.pid).cmdline()
    assert sys.executable in command[0]
    await run(pool, chain, ask("secret-canary <hello>", "r2"))
    assert psutil.Process(status.pid).cmdline() == command
    assert "canary" not in " ".join(command)
    assert "<hello>" not in " ".join(command)


@pytest.mark.one_loop
async def test_template_that_raises_is_the_requests_fault(
    pool: EnginePool, tmp_path: Path, chain_path: Path
) -> None:
    folder = _variant(chain_path, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        await run(pool, folder, ask("<hello>"))


@pytest.mark.one_loop
async def test_poisoned_template_cannot_reach_python(
    pool: EnginePool, tmp_path: Path, chain_path: Path
) -> None:
    folder = _variant(chain_path, tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadRequest, match="template"):
        await run(pool, folder, ask("<hello>"))


@pytest.mark.one_loop
async def test_endless_template_ends_the_worker_not_the_daemon(
    make_pool: Callable[..., EnginePool], tmp_path: Path, chain_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RENDER_S", 0.5)
    loops = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(4)) + "{% endfor %}" * 4
    folder = _variant(chain_path, tmp_path, loops)
    pool = make_pool()
    await pool.load(folder)
    watch = asyncio.create_task(pool.run())
    try:
        with pytest.raises(EngineStalled, match="template"):
            async with asyncio.timeout(60):
                await run(pool, folder, ask("<hello>"))
    finally:
        watch.cancel()


@pytest.mark.one_loop
async def test_a_model_whose_template_knows_no_tools_gets_them_by_grammar(
    pool: EnginePool, tmp_path: Path, chain_path: Path
) -> None:
    folder = _variant(chain_path, tmp_path, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tools in (("with", WEATHER), ("without", None)):
        found = await run(pool, folder, ask("<hello>", name, tools=tools, max_tokens=8))
        told = [e.tools_by_grammar for e in found.events if isinstance(e, Tokenized | Accepted)]
        assert told == [tools is not None] * 2
        assert found.text


@pytest.mark.one_loop
async def test_a_short_prompt_does_not_wait_while_a_long_one_is_tokenized(
    pool: EnginePool, chain: ModelFolder, tmp_path: Path
) -> None:
    held = HeldPrompt(tmp_path)
    long = ask(held.words + "x" * limits.SHORT_PROMPT_BYTES, "long")
    reading = asyncio.create_task(run(pool, chain, long))
    pipe = await asyncio.to_thread(held.wait)
    try:
        assert (await run(pool, chain, ask("<hello>", "short"))).text == "Hello there, world!"
        assert not reading.done()
    finally:
        pipe.close()
    with pytest.raises(ContextLengthExceeded):
        await reading


async def test_killed_worker_ends_the_stream_and_the_next_request_works(
    pool: EnginePool, chain: ModelFolder
) -> None:
    events = pool.stream(chain, ask("<count>"))
    async for event in events:
        if isinstance(event, Delta):
            break
    (status,) = pool.status()
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied):
            async for _ in events:
                pass
    answer = await run(pool, chain, ask("<hello>", "r2"))
    assert answer.text == "Hello there, world!"
    assert pool.status()[0].restarts == 1


def test_worker_goes_when_the_daemon_is_gone(chain_path: Path) -> None:
    """A daemon that is killed cannot say goodbye: all the worker sees is the end of its socket."""
    ours, theirs = socket.socketpair()
    channel, their_channel = socket.socketpair()
    settings = WorkerSettings(name="chain", path=str(chain_path), device="cpu", max_memory_bytes=2 << 30)
    with ours, theirs, channel, their_channel:
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fleetd.engine.worker",
                "--fd",
                str(theirs.fileno()),
                "--streams-fd",
                str(their_channel.fileno()),
                "--settings",
                msgspec.json.encode(settings).decode(),
            ],
            pass_fds=[theirs.fileno(), their_channel.fileno()],
            stderr=subprocess.DEVNULL,
        )
        reports = protocol.reports()
        while not any(isinstance(report, Ready) for report in reports.feed(ours.recv(1 << 16))):
            pass
    assert worker.wait(60) == EXIT_ORPHANED


async def test_closing_the_stream_frees_its_slot(
    make_pool: Callable[..., EnginePool], tmp_path: Path
) -> None:
    # With room for more than anybody would wait for: it does not end by itself.
    chain = folder_of(chain_model.build(tmp_path / "chain", context=1 << 17))
    pool = make_pool(max_streams=1)
    events = pool.stream(chain, ask("<count>"))
    async for event in events:
        if isinstance(event, Delta):
            break
    await events.aclose()
    async with asyncio.timeout(60):
        answer = await run(pool, chain, ask("<hello>", "r2"))
    assert answer.text == "Hello there, world!"


@pytest.mark.one_loop
async def test_request_that_cannot_fit_in_memory_is_refused_with_figures(
    make_pool: Callable[..., EnginePool], chain: ModelFolder
) -> None:
    # Weights and working room fit, a few hundred tokens of KV do, 4,000 do not.
    pool = make_pool(max_memory_bytes=(8 << 20) + (512 << 20) + (2 << 20))
    with pytest.raises(OutOfMemory, match=r"4001 tokens need .* of KV cache"):
        await run(pool, chain, Generate("r", TokenPrompt([65] * 4000), GREEDY, max_tokens=1))
    assert (await run(pool, chain, ask("<hello>", "r2", max_tokens=8))).text == "Hello there, world!"


@pytest.mark.one_loop
async def test_answer_without_a_limit_is_not_refused_for_what_it_might_become(
    make_pool: Callable[..., EnginePool], chain: ModelFolder
) -> None:
    # Room for about 700 tokens, a context of 4,096: the answer may run until the memory ends.
    pool = make_pool(max_memory_bytes=(8 << 20) + (512 << 20) + (2 << 20))
    answer = await run(pool, chain, ask("<count>"))
    assert answer.finished.reason == "length"
    assert 500 < answer.finished.usage.completion_tokens < 1000


@pytest.mark.one_loop
async def test_model_that_cannot_fit_is_refused_before_it_is_read(
    make_pool: Callable[..., EnginePool], chain: ModelFolder
) -> None:
    pool = make_pool(max_memory_bytes=100 << 20)
    with pytest.raises(OutOfMemory, match="chain needs"):
        await run(pool, chain, ask("<hello>"))


@pytest.mark.one_loop
async def test_truncated_weights_are_named(pool: EnginePool, tmp_path: Path, chain_path: Path) -> None:
    folder = folder_of(shutil.copytree(chain_path, tmp_path / "cut"), "cut")
    weights = folder.path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        await run(pool, folder, ask("<hello>"))


@pytest.mark.one_loop
async def test_unknown_architecture_is_named(pool: EnginePool, tmp_path: Path) -> None:
    path = chain_model.build(tmp_path / "odd", config={"model_type": "abacus"})
    with pytest.raises(ModelUnsupported, match="abacus"):
        await run(pool, folder_of(path, "odd"), ask("<hello>"))


@pytest.mark.one_loop
async def test_a_model_whose_code_ends_the_process_is_unsupported(pool: EnginePool, tmp_path: Path) -> None:
    path = chain_model.build(tmp_path / "odd", config={"model_type": "olmo"})
    with pytest.raises(ModelUnsupported, match="ends the process"):
        await run(pool, folder_of(path, "odd"), ask("<hello>"))


@pytest.mark.one_loop
async def test_config_that_does_not_fit_the_weights(pool: EnginePool, tmp_path: Path) -> None:
    path = chain_model.build(tmp_path / "odd", config={"num_hidden_layers": 5})
    with pytest.raises(ModelCorrupt):
        await run(pool, folder_of(path, "odd"), ask("<hello>"))


@pytest.mark.one_loop
async def test_idle_model_is_unloaded(
    make_pool: Callable[..., EnginePool], chain: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POOL_CHECK_S", 0.05)
    pool = make_pool(idle_unload_s=0.2)
    unload, unloaded = pool.unload, asyncio.Event()

    async def noted(name: str) -> None:
        await unload(name)
        unloaded.set()

    monkeypatch.setattr(pool, "unload", noted)
    await run(pool, chain, ask("<hello>"))
    watch = asyncio.create_task(pool.run())
    try:
        # Until the worker has ended: a watch that is cancelled before leaves its socket open.
        await asyncio.wait_for(unloaded.wait(), 30)
        assert not pool.status()
    finally:
        watch.cancel()
    assert (await run(pool, chain, ask("<hello>", "r2"))).text == "Hello there, world!"


@pytest.mark.one_loop
async def test_a_client_says_how_long_a_model_stays(
    make_pool: Callable[..., EnginePool], chain: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POOL_CHECK_S", 0.05)
    pool = make_pool(idle_unload_s=0.0)
    pool.keep("chain", 5.0)
    assert pool.stays_s("chain") == math.inf  # it is not loaded
    unload, unloaded = pool.unload, asyncio.Event()

    async def noted(name: str) -> None:
        await unload(name)
        unloaded.set()

    monkeypatch.setattr(pool, "unload", noted)
    await run(pool, chain, ask("<hello>"))
    watch = asyncio.create_task(pool.run())
    try:
        pool.keep(chain.name, 0.0)
        await asyncio.wait_for(unloaded.wait(), 30)
        assert pool.stays_s(chain.name) == math.inf  # what was said holds until the model is unloaded
    finally:
        watch.cancel()


@pytest.mark.one_loop
async def test_first_requests_share_one_load(pool: EnginePool, chain: ModelFolder) -> None:
    answers = await asyncio.gather(*(run(pool, chain, ask("<hello>", f"r{i}")) for i in range(4)))
    assert len(pool.status()) == 1
    assert {a.text for a in answers} == {"Hello there, world!"}


@pytest.mark.one_loop
async def test_models_load_one_after_the_other(pool: EnginePool, chain: ModelFolder) -> None:
    """Side by side each would count the same free memory as its own."""
    second = folder_of(chain.path, "second")
    one, two = await asyncio.gather(
        run(pool, chain, ask("<hello>", "r1")), run(pool, second, ask("<hello>", "r2"))
    )
    assert one.text == two.text == "Hello there, world!"
    stages = [[e.stage for e in answer.events if isinstance(e, Loading)] for answer in (one, two)]
    waited = [s for s in stages if any(stage.startswith("waiting for") for stage in s)]
    assert len(waited) == 1
    assert waited[0].index("starting") > 0


async def test_reader_that_stops_reading_costs_only_its_own_answer(
    pool: EnginePool, chain: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENTS_QUEUED", 16)  # more than a quick answer has
    await pool.load(chain)
    go_on = asyncio.Event()

    async def slowly() -> None:
        # On a busy machine its queue may be full before it has read anything.
        async for _ in pool.stream(chain, ask("<count>", "slow", max_tokens=2000)):
            await go_on.wait()

    reading = asyncio.create_task(slowly())
    quick = await run(pool, chain, ask("<hello>", "quick"))
    assert quick.text == "Hello there, world!"
    async with asyncio.timeout(60):
        while "slow" in pool.table.models["chain"].first._streams:  # noqa: ASYNC110  (its queue fills)
            await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(FleetError, match="too slowly"):
        await reading


def _variant(chain_path: Path, tmp_path: Path, template: str) -> ModelFolder:
    path = shutil.copytree(chain_path, tmp_path / "variant")
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = template
    config.write_text(json.dumps(settings))
    return folder_of(path, "variant")
