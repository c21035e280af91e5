"""The next turn of a session reads only what is new, whatever varies between requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import miniature_tokenizers
import pytest
from turned_scheduler import CHUNK, TinyFamily, Turned, drawn, family

from fleetd.api.anthropic import translate as anthropic
from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.http.body import parse
from fleetd.api.openai import bodies as openai_bodies
from fleetd.api.openai import translate as openai
from fleetd.api.responses import translate as responses
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import Cancel, Generate, Prefill

pytestmark = pytest.mark.usefixtures("cpu_installed")
INSTRUCTIONS = "You are an agent that works in a repository. Look before you change anything. " * 120
TOOLS = {
    name: {"type": "object", "properties": {"path": {"type": "string", "description": "Where. " * 20}}}
    for name in ("Read", "Edit", "Grep", "Write")
}
CALL = {"path": "src/main.py"}
RESULT = "1\tprint('hello')\n" * 30
MARK = {"cache_control": {"type": "ephemeral"}}


def of_claude_code(turn: int, noise: str) -> Generate:
    """In the likeness of its requests: a number for billing first, marks of the cache that move on."""

    def block(text: str, marked: bool) -> dict[str, Any]:
        return {"type": "text", "text": text, **(MARK if marked else {})}

    messages: list[Any] = [
        {"role": "user", "content": [block("<system-reminder>Rules.</system-reminder>", False)]},
        {"role": "system", "content": "Agents: general-purpose."},
    ]
    messages[0]["content"].append(block("Fix the test.", turn == 1))
    if turn == 2:
        use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": CALL}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT, **MARK}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    messages[-1 if turn == 2 else 0]["content"].append(block(f"Date {noise}.", False))
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": messages,
        "system": [
            block(f"x-anthropic-billing-header: cc_version=2.1; cch={noise};", False),
            block(INSTRUCTIONS, True),
        ],
        "tools": [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()],
        "metadata": {"user_id": f"user_{noise}"},
    }
    return anthropic.generate(parse(json.dumps(body).encode(), MessagesBody), "r")


def of_codex(turn: int, noise: str) -> Generate:
    def item(role: str, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": noise,
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }

    items = [item("developer", INSTRUCTIONS), item("user", "Fix the test.")]
    if turn == 2:
        items += [
            {"type": "function_call", "call_id": "c", "name": "Read", "arguments": json.dumps(CALL)},
            {"type": "function_call_output", "call_id": "c", "output": RESULT},
        ]
    items.append(item("user", f"Date {noise}."))
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()]
    body = {"model": "m", "input": items, "tools": tools, "prompt_cache_key": noise}
    return responses.translate(parse(json.dumps(body).encode(), ResponsesBody), "r").generate


def of_opencode(turn: int, noise: str) -> Generate:
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Fix the test."},
    ]
    if turn == 2:
        call = {"id": "c", "type": "function", "function": {"name": "Read", "arguments": json.dumps(CALL)}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": RESULT},
        ]
    messages.append({"role": "user", "content": f"Date {noise}."})
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    body = {"model": "m", "messages": messages, "tools": tools, "user": noise}
    return openai.chat(parse(json.dumps(body).encode(), openai_bodies.ChatBody), "r")[0]


Client = Callable[[int, str], Generate]
CLIENTS = [of_claude_code, of_codex, of_opencode]
ROOM = 1 << 20


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("tokenizer", [miniature_tokenizers.qwen3], ids=["qwen3"])
def test_numbers_marks_and_dates_behind_the_prefix_keep_99_percent_of_it(
    client: Client, tokenizer: Callable[[], Any]
) -> None:
    made = tokenizer()
    for turn in (1, 2):
        one, other = (prepare(client(turn, noise), made, ROOM).tokens for noise in ("2026-11-23", "0451-xx"))
        assert common(one, other) >= 0.99 * len(one)
        assert one != other


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("gemma"), "gemma3_text")


@pytest.mark.parametrize(
    "client", [of_claude_code, *(pytest.param(each, marks=pytest.mark.long) for each in CLIENTS[1:])]
)
def test_the_next_turn_of_each_agent_reads_what_is_new_and_at_most_one_chunk(
    llama: TinyFamily, client: Client
) -> None:
    made = miniature_tokenizers.qwen3()
    first, second = (prepare(client(turn, "1"), made, ROOM).tokens for turn in (1, 2))
    shared = common(first, second)
    bench = Turned(llama, context_tokens=1 << 16, chunks=FixedChunks(256, 256))
    bench.ask("first", first)
    bench.finish()
    bench.ask("second", second)
    bench.finish()
    assert len(first) > 5000
    assert shared > 0.99 * len(first), "the template does not go on from the turn before"
    assert bench.computed("second") <= len(second) - shared + 256


@pytest.mark.parametrize("tokens", [3_000, pytest.param(30_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_turn_two_of_a_long_session_reads_what_is_new_and_at_most_one_chunk(
    request: pytest.FixtureRequest, name: str, tokens: int
) -> None:
    chunk = max(CHUNK, tokens // 100)
    bench = Turned(request.getfixturevalue(name), context_tokens=1 << 16, chunks=FixedChunks(chunk, chunk))
    first = drawn(tokens)
    bench.ask("first", first, max_tokens=5)
    bench.finish()
    # Clients may write an answer's tokens in another way.
    new = drawn(400, seed=2)
    bench.ask("second", first + new)
    bench.finish()
    assert bench.computed("second") <= len(new) + chunk


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_request_that_is_repeated_after_its_time_goes_on_where_it_was_cancelled(
    request: pytest.FixtureRequest, name: str
) -> None:
    bench = Turned(request.getfixturevalue(name))
    tokens, turns = drawn(900), 0
    for attempt in ("first", "second", "third"):
        bench.ask(attempt, tokens)
        bench.turn(10)
        turns += 10
        done = bench.of(attempt, Prefill)[-1].done
        assert done >= (turns - 3) * CHUNK or done == len(tokens) - 1
        bench.scheduler.tell(Cancel(attempt))
        bench.finish()
    bench.ask("last", tokens)
    bench.finish()
    assert bench.computed("last") == 1
