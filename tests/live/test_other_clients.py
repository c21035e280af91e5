"""litellm and the llm command line, each in its own process, against a live daemon with a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_fakes import Target

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.one_loop]

LITELLM = """
import json, sys
import litellm
litellm.telemetry = False
base_url, key, model = sys.argv[1:]
messages = [{"role": "user", "content": "Say something."}]
ask = dict(api_base=base_url, api_key=key, messages=messages, max_tokens=4, seed=1)
usage = dict(stream=True, stream_options={"include_usage": True})
out = {}
for provider in ("openai", "hosted_vllm", "ollama_chat"):
    ask["api_base"] = base_url[:-3] if provider == "ollama_chat" else base_url
    whole = litellm.completion(model=f"{provider}/{model}", **ask)
    chunks = litellm.completion(model=f"{provider}/{model}", **usage, **ask)
    chunks = list(chunks)
    out[provider] = {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "tokens": whole.usage.completion_tokens,
        "streamed_tokens": [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)],
    }
ask["api_base"] = base_url
try:
    litellm.completion(model=f"openai/{model}", **{**ask, "temperature": 9})
except litellm.BadRequestError as error:
    out["error"] = str(error)
long = [{"role": "user", "content": "x" * 5000 + "<hello>"}]
out["too long"] = []
for stream in (False, True):
    try:
        asked = litellm.completion(model="openai/chain", stream=stream, **{**ask, "messages": long})
        list(asked) if stream else asked
    except litellm.ContextWindowExceededError as error:
        out["too long"].append(type(error).__name__)
print(json.dumps(out))
"""

# The chain model's tool, asked for through each of litellm's ways to a server.
LITELLM_TOOLS = """
import json, sys
import litellm
litellm.telemetry = False
base_url, key = sys.argv[1:]
bases = {"openai": base_url, "anthropic": base_url[:-3], "ollama_chat": base_url[:-3]}
schema = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
out = {}
for provider, base in bases.items():
    ask = dict(model=f"{provider}/chain", api_base=base, api_key=key, temperature=0, max_tokens=40)
    ask["messages"] = [{"role": "user", "content": "<weather>"}]
    whole = litellm.completion(tools=tools, **ask)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(tools=tools, stream=True, **ask)))
    out[provider] = [
        [reply.choices[0].message.content, call.function.name, json.loads(call.function.arguments)]
        for reply in (whole, streamed)
        for call in reply.choices[0].message.tool_calls
    ]
print(json.dumps(out))
"""

# The same for the chain model's reasoning, whole and streamed.
LITELLM_THINKING = """
import json, sys
import litellm
litellm.telemetry = False
base_url, key = sys.argv[1:]
root = base_url[:-3]
bases = {"openai": base_url, "hosted_vllm": base_url, "anthropic": root, "ollama_chat": root}
out = {}
for provider, base in bases.items():
    ask = dict(model=f"{provider}/chain", api_base=base, api_key=key, temperature=0, max_tokens=40)
    ask["messages"] = [{"role": "user", "content": "<ponder>"}]
    if provider != "anthropic":  # litellm lets only models that it knows have it there
        ask["reasoning_effort"] = "medium"
    whole = litellm.completion(**ask)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **ask)))
    said = [reply.choices[0].message for reply in (whole, streamed)]
    out[provider] = [[message.reasoning_content, message.content] for message in said]
print(json.dumps(out))
"""


def run(*command: str, env: dict[str, str]) -> str:
    merged = {**os.environ, **env}
    done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_litellm(target: Target) -> None:
    # Its price list would be fetched from the network.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    printed = run(sys.executable, "-c", LITELLM, target.base_url, target.api_key, target.model, env=env)
    out: dict[str, Any] = json.loads(printed.splitlines()[-1])
    for provider in ("openai", "hosted_vllm", "ollama_chat"):
        seen = out[provider]
        assert seen["whole"]
        assert seen["whole"] == seen["streamed"]
        assert seen["streamed_tokens"][-1:] == [seen["tokens"]]
    assert "temperature" in out["error"]
    assert out["too long"] == ["ContextWindowExceededError"] * 2


def test_litellm_calls_tools_in_three_dialects(target: Target) -> None:
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    printed = run(sys.executable, "-c", LITELLM_TOOLS, target.base_url, target.api_key, env=env)
    called = ["Let me look.", "get_weather", {"city": "Paris"}]
    out = json.loads(printed.splitlines()[-1])
    assert out == {provider: [called, called] for provider in ("openai", "anthropic", "ollama_chat")}


def test_litellm_is_told_the_reasoning_in_three_dialects(target: Target) -> None:
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    printed = run(sys.executable, "-c", LITELLM_THINKING, target.base_url, target.api_key, env=env)
    thought = ["First, I wonder.", "So: 42."]
    out = json.loads(printed.splitlines()[-1])
    providers = ("openai", "hosted_vllm", "anthropic", "ollama_chat")
    assert out == {provider: [thought, thought] for provider in providers}


def test_llm_command_line(target: Target, tmp_path: Path) -> None:
    model = {
        "model_id": "fleet",
        "model_name": target.model,
        "api_base": target.base_url,
        "api_key_name": "fleet",
    }
    chain = model | {"model_id": "chain", "model_name": "chain", "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model, chain]))
    (tmp_path / "keys.json").write_text(json.dumps({"fleet": target.api_key}))
    env = {"LLM_USER_PATH": str(tmp_path)}
    llm = (sys.executable, "-m", "llm")
    assert "fleet" in run(*llm, "models", env=env)
    for stream in ([], ["--no-stream"]):
        options = ["-o", "max_tokens", "6", "-o", "seed", "3", *stream]
        assert run(*llm, "-m", "fleet", *options, "Say something.", env=env).strip()
        tool = "def get_weather(city: str) -> str:\n    return f'{city} is dry. <hello>'"
        options = ["-o", "temperature", "0", "--functions", tool, "--td", *stream]
        # It shows no reasoning, and takes it for no part of the answer.
        assert run(*llm, "-m", "chain", "-o", "temperature", "0", *stream, "<ponder>", env=env) == "So: 42.\n"
        said = run(*llm, "-m", "chain", *options, "<weather>", env=env)
        assert "Let me look." in said
        assert "Hello there, world!" in said
