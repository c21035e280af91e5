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

from fleetd import limits
from fleetd.engine import protocol
from fleetd.engine.pool import EnginePool
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Generate,
    Loading,
    Prefill,
    Ready,
    Sampling,
    TextPrompt,
    Tokenized,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.worker import EXIT_ORPHANED
from fleetd.errors import (
    BadRequest,
    EngineDied,
    EngineStalled,
    FleetError,
    InvalidValue,
    ModelCorrupt,
    ModelUnsupported,
    OutOfMemory,
    UnsupportedParameter,
)
from fleetd.models.folder import ModelFolder

WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.usefixtures("own_process")
async def test_answers_and_counts(pool: EnginePool, chain: ModelFolder) -> None:
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


@pytest.mark.one_loop
async def test_a_prompt_that_is_only_counted_is_not_read(pool: EnginePool, chain: ModelFolder) -> None:
    for text in ("<hello>", "x" * 5000):  # longer than the context
        asked = msgspec.structs.replace(ask(text), count_only=True, max_tokens=0)
        answer = await run(pool, chain, asked)
        accepted, finished = [event for event in answer.events if not isinstance(event, Loading)]
        assert (finished, type(accepted)) == (answer.finished, Accepted)
        # The marker is one token.
        counted = len("user: ") + (1 if text == "<hello>" else len(text))
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_tokens == counted
        assert answer.finished.usage.prompt_tokens == 0


@pytest.mark.one_loop
async def test_never_splits_a_code_point(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<utf8>"))
    assert answer.text == "aé€😀z"
    assert all("\ufffd" not in e.text for e in answer.events if isinstance(e, Delta))


@pytest.mark.one_loop
async def test_half_a_code_point_at_the_end_is_no_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<utf8>", max_tokens=2))
    assert answer.text == "a"
    assert answer.finished.reason == "length"


@pytest.mark.one_loop
async def test_reasoning_is_set_apart(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<ponder>"))
    assert answer.reasoning == "First, I wonder."
    assert answer.text == "So: 42."
    assert answer.finished.usage.reasoning_tokens > 0


@pytest.mark.one_loop
async def test_tool_call_is_parsed_and_its_tags_never_shown(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<weather>", tools=WEATHER))
    assert answer.text == "Let me look."
    assert [(c.index, c.name, json.loads(c.arguments)) for c in answer.calls] == [
        (0, "get_weather", {"city": "Paris"})
    ]
    assert answer.finished.reason == "tool_calls"


@pytest.mark.one_loop
async def test_half_a_tool_call_is_neither_a_call_nor_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<weather>", tools=WEATHER, max_tokens=4))
    assert answer.calls == []
    assert answer.text == "Let me look."
    assert answer.finished.reason == "length"


@pytest.mark.one_loop
@pytest.mark.parametrize("stop", [["STOP"], ["P bad", "nothing"], ["TOP bad part"], ["ST", "STOP"]])
async def test_stop_string_across_tokens_is_cut_before_it(
    pool: EnginePool, chain: ModelFolder, stop: list[str]
) -> None:
    answer = await run(pool, chain, ask("<cutoff>", stop=stop))
    whole = "good part STOP bad part"
    cut = min(whole.find(s) for s in stop if s in whole)
    assert answer.text == whole[:cut]
    assert answer.finished.reason == "stop"
    assert answer.finished.stop in stop


@pytest.mark.one_loop
async def test_logprobs_cover_the_text(pool: EnginePool, chain: ModelFolder) -> None:
    answer = await run(pool, chain, ask("<hello>", top_logprobs=3))
    assert "".join(p.token for p in answer.logprobs) == answer.text
    assert [p.text_offset for p in answer.logprobs] == [0, 3, 9, 16]
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0].token == entry.token
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


@pytest.mark.one_loop
async def test_echo_scores_the_prompt(pool: EnginePool, chain: ModelFolder) -> None:
    request = Generate("r", TextPrompt("<hello>Hel"), GREEDY, max_tokens=0, top_logprobs=0, echo=True)
    answer = await run(pool, chain, request)
    assert [p.token for p in answer.logprobs] == ["<hello>", "Hel"]
    # The chain makes "Hel" the certain continuation: e^√512 against 511 ones.
    assert answer.logprobs[1].logprob > -1e-3
    assert answer.finished.usage.completion_tokens == 0


@pytest.mark.one_loop
async def test_continuation_of_a_plain_prompt_keeps_its_first_space(
    pool: EnginePool, chain: ModelFolder
) -> None:
    """A chat's answer begins with a word, a continuation where the text stopped."""
    plain = Generate("r1", TextPrompt("<count>"), GREEDY, max_tokens=2)
    assert (await run(pool, chain, plain)).text == " 1 2"
    assert (await run(pool, chain, ask("<count>", "r2", max_tokens=2))).text == "1 2"
    echoed = Generate("r3", TextPrompt("<count>"), GREEDY, max_tokens=2, top_logprobs=0, echo=True)
    answer = await run(pool, chain, echoed)
    assert answer.text == "<count> 1 2"
    assert [answer.text[p.text_offset :].startswith(p.token) for p in answer.logprobs] == [True] * 3


@pytest.mark.one_loop
async def test_token_prompt_outside_the_vocabulary(pool: EnginePool, chain: ModelFolder) -> None:
    with pytest.raises(InvalidValue, match="outside the vocabulary"):
        await run(pool, chain, Generate("r", TokenPrompt([3, 100000]), GREEDY))


@pytest.mark.one_loop
async def test_empty_prompt(pool: EnginePool, chain: ModelFolder) -> None:
    with pytest.raises(BadRequest, match="empty"):
        await run(pool, chain, Generate("r", TextPrompt(""), GREEDY))


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
            async with asyncio.timeout(20):
                await run(pool, folder, ask("<hello>"))
    finally:
        watch.cancel()


@pytest.mark.one_loop
async def test_tools_for_a_model_without_a_format(pool: EnginePool, tmp_path: Path, chain_path: Path) -> None:
    folder = _variant(chain_path, tmp_path, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UnsupportedParameter, match="tool"):
        await run(pool, folder, ask("<hello>", tools=WEATHER))


@pytest.mark.usefixtures("own_process")
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
async def test_same_seed_same_answer_alone_or_in_company(pool: EnginePool, chain: ModelFolder) -> None:
    # So many are as likely that the chain's certainty is gone and every draw matters.
    even = dict.fromkeys(range(64), 100.0)

    async def draw(request_id: str, seed: int) -> str:
        request = ask(
            "<hello>",
            request_id,
            max_tokens=24,
            sampling=Sampling(temperature=1.0, seed=seed, logit_bias=even),
            top_logprobs=0,
        )
        return "".join(p.token for p in (await run(pool, chain, request)).logprobs)

    alone = await draw("a", 11)
    together = await asyncio.gather(*(draw(f"b{i}", seed) for i, seed in enumerate([5, 11, 7, 11])))
    assert together[1] == together[3] == alone
    assert len({together[0], together[1], together[2]}) == 3


@pytest.mark.one_loop
async def test_second_turn_prefills_only_what_is_new(pool: EnginePool, chain: ModelFolder) -> None:
    long = "x" * 700
    first = [{"role": "user", "content": long + "<hello>"}]
    one = await run(pool, chain, Generate("r1", ChatPrompt(first), GREEDY))
    second = [
        *first,
        {"role": "assistant", "content": one.text},
        {"role": "user", "content": "again <hello>"},
    ]
    two = await run(pool, chain, Generate("r2", ChatPrompt(second), GREEDY))
    assert two.text == one.text
    assert two.finished.usage.cached_tokens >= 700


@pytest.mark.one_loop
async def test_identical_prompt_is_answered_from_the_cache_identically(
    pool: EnginePool, chain: ModelFolder
) -> None:
    one = await run(pool, chain, ask("<hello>", "r1", top_logprobs=2))
    two = await run(pool, chain, ask("<hello>", "r2", top_logprobs=2))
    assert two.finished.usage.cached_tokens == two.finished.usage.prompt_tokens - 1
    assert [(p.token, p.logprob) for p in two.logprobs] == [(p.token, p.logprob) for p in one.logprobs]


@pytest.mark.one_loop
async def test_no_request_sees_anothers_cache(pool: EnginePool, chain: ModelFolder) -> None:
    """Prompts that share beginnings, lengths and slots, all at once, against each by itself."""
    prompts = [f"{'ab' * n}{m}" for n in (1, 40, 200) for m in ("<hello>", "<cutoff>", "<ponder>")]
    together = await asyncio.gather(
        *(run(pool, chain, ask(p, f"t{i}", top_logprobs=1)) for i, p in enumerate(prompts))
    )
    again = [await run(pool, chain, ask(p, f"s{i}", top_logprobs=1)) for i, p in enumerate(prompts)]
    fresh = EnginePool(pool.options)
    try:
        alone = [await run(fresh, chain, ask(p, f"s{i}", top_logprobs=1)) for i, p in enumerate(prompts)]
    finally:
        await fresh.close()
    for a, b, c in zip(together, again, alone, strict=True):
        assert [(p.token, p.logprob) for p in a.logprobs] == [(p.token, p.logprob) for p in c.logprobs]
        assert [(p.token, p.logprob) for p in b.logprobs] == [(p.token, p.logprob) for p in c.logprobs]


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
    monkeypatch.setattr("fleetd.engine.pool._CHECK_S", 0.05)
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
    monkeypatch.setattr("fleetd.engine.pool._CHECK_S", 0.05)
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
    slow = pool.stream(chain, ask("<count>", "slow", max_tokens=2000))
    async for event in slow:
        if isinstance(event, Delta):
            break
    quick = await run(pool, chain, ask("<hello>", "quick"))
    assert quick.text == "Hello there, world!"
    async with asyncio.timeout(60):
        while "slow" in pool._engines["chain"]._streams:  # noqa: ASYNC110 — its queue fills meanwhile
            await asyncio.sleep(0.01)
    with pytest.raises(FleetError, match="too slowly"):
        async for _ in slow:
            pass


@pytest.mark.one_loop
@pytest.mark.usefixtures("own_process")
async def test_prompt_text_is_in_no_argument_list(pool: EnginePool, chain: ModelFolder) -> None:
    await run(pool, chain, ask("secret-canary <hello>"))
    (status,) = pool.status()
    assert status.pid is not None
    assert "canary" not in " ".join(psutil.Process(status.pid).cmdline())
    assert sys.executable in psutil.Process(status.pid).cmdline()[0]


def _variant(chain_path: Path, tmp_path: Path, template: str) -> ModelFolder:
    path = shutil.copytree(chain_path, tmp_path / "variant")
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = template
    config.write_text(json.dumps(settings))
    return folder_of(path, "variant")
