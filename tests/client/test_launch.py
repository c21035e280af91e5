"""`fleetctl launch`: what an agent is started with, and which models it is not started with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_daemon import FakeDaemon, Reply, Run

from fleetctl.exits import Exit
from fleetctl.programs.agent_models import how_to_start
from fleetctl.programs.agents import AGENTS
from fleetd.control.model_listing import ModelListing

AGENT = """#!/bin/sh
printf '%s\\n' "$*"
env | grep -Ei '^(ANTHROPIC|CLAUDE|API_TIMEOUT|FLEETD_API|OPENCODE|[a-z]*_proxy)' | sort
exit 5
"""


LISTING: dict[str, Any] = {
    "installed": [{"name": "short", "context_tokens": 8192, "roles": ["chat"], "tools": "grammar"}],
    "catalog": [
        {"name": "huge", "roles": ["chat", "coding"], "context_tokens": 262_144, "fit": {"where": "none"}},
        {"name": "qwen3-8b", "roles": ["chat"], "context_tokens": 40_960},
        {"name": "qwen3.5-4b", "roles": ["chat", "coding"], "context_tokens": 262_144},
    ],
}


@pytest.fixture
def path(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH, with a program of each agent's name."""
    for name in AGENTS:
        program = tmp_path / name
        program.write_text(AGENT)
        program.chmod(0o755)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    env["ANTHROPIC_API_KEY"] = "sk-of-the-users"
    env["OPENCODE_CONFIG_CONTENT"] = "{}"
    return tmp_path


@pytest.fixture
def served(daemon: FakeDaemon) -> FakeDaemon:
    settings = {
        "base_url": "http://127.0.0.1:8114/v1",
        "api_key": "k",
        "large": "org/big",
        "small": "tiny",
    }
    daemon.on("GET", "/fleet/v1/env", Reply(settings))
    daemon.on("GET", "/v1/models/org/big", Reply({"id": "org/big", "context_length": 65536}))
    daemon.on("GET", "/v1/models/short", Reply({"id": "short", "context_length": 8192}))
    daemon.on("GET", "/v1/models/tiny", Reply({"id": "tiny", "fleet": {"tools": "", "installed": False}}))
    daemon.on("POST", "/v1/messages/count_tokens", Reply({"input_tokens": 99}))
    daemon.on("GET", "/fleet/v1/models", Reply(LISTING))
    return daemon


def test_claude_gets_its_models_in_its_environment(path: Path, served: FakeDaemon, run: Run) -> None:
    done = run("launch", "claude", "-p", "--model-like flag", "fix it", home=served.home)
    first, *variables = done.stdout.splitlines()
    assert (done.returncode, first) == (5, "-p --model-like flag fix it")
    assert dict(line.split("=", 1) for line in variables) == {
        "OPENCODE_CONFIG_CONTENT": "{}",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8114",
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "org/big",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "org/big",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "org/big",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_SUBAGENT_MODEL": "org/big",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",
    }
    (loaded,) = [each.body["model"] for each in served.seen if each.method == "POST"]
    assert loaded == "org/big", "the small one is loaded when it is asked"


def test_codex_gets_its_models_in_its_arguments_before_the_users_own(
    path: Path, served: FakeDaemon, run: Run
) -> None:
    shown = json.loads(run("launch", "--json", "codex", "exec", "fix it", home=served.home).stdout)
    assert shown["environment"] == {"FLEETD_API_KEY": "k"}
    program, *options, first, second = shown["command"]
    assert (program, first, second) == (str(path / "codex"), "exec", "fix it")
    assert options[::2] == ["-c"] * (len(options) // 2)
    settings = tomllib.loads("\n".join(options[1::2]))
    assert settings == {
        "model": "org/big",
        "model_provider": "fleetd",
        "model_context_window": 65536,
        "show_raw_agent_reasoning": True,
        "model_providers": {
            "fleetd": {
                "name": "fleetd",
                "base_url": "http://127.0.0.1:8114/v1",
                "env_key": "FLEETD_API_KEY",
                "wire_api": "responses",
                "stream_idle_timeout_ms": 3_600_000,
            }
        },
    }


def test_opencode_gets_its_models_in_its_environment(path: Path, served: FakeDaemon, run: Run) -> None:
    done = run("launch", "opencode", "run", "fix it", home=served.home)
    first, *variables = done.stdout.splitlines()
    assert (done.returncode, first) == (5, "run fix it")
    given = dict(line.split("=", 1) for line in variables)
    assert given["FLEETD_API_KEY"] == "k"
    config = json.loads(given["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["small_model"]) == ("fleetd/org/big", "fleetd/tiny")
    provider = config["provider"]["fleetd"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8114/v1"
    assert provider["options"]["apiKey"] == "{env:FLEETD_API_KEY}"
    assert provider["models"]["org/big"]["limit"] == {"context": 65536, "output": 16384}
    assert '"k"' not in given["OPENCODE_CONFIG_CONTENT"]


PROXY = {"HTTP_PROXY": "http://10.9.9.9:3128", "https_proxy": "http://10.9.9.9:3128"}


@pytest.mark.parametrize("agent", sorted(AGENTS))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "corp.example, localhost"}, "corp.example,localhost,127.0.0.1"),
        ({"no_proxy": "corp.example"}, "corp.example,127.0.0.1,localhost"),
        ({"NO_PROXY": "*", "no_proxy": "*"}, "*"),
    ],
)
def test_no_agent_asks_this_machine_by_a_proxy(
    path: Path,
    served: FakeDaemon,
    run: Run,
    env: dict[str, str],
    agent: str,
    before: dict[str, str],
    after: str,
) -> None:
    env |= {**PROXY, **before}
    done = run("launch", agent, home=served.home)
    given = dict(line.split("=", 1) for line in done.stdout.splitlines()[1:])
    assert (given["NO_PROXY"], given["no_proxy"]) == (after, after)
    assert given["HTTP_PROXY"] == PROXY["HTTP_PROXY"], "other servers are asked as before"
    assert ("past the proxy" in done.stderr) == (before.get("NO_PROXY") != "*")


def test_where_there_is_no_proxy_nothing_is_said_of_it(path: Path, served: FakeDaemon, run: Run) -> None:
    done = run("launch", "claude", home=served.home)
    assert "proxy" not in (done.stdout + done.stderr).lower()


def test_claude_uses_no_other_provider_and_is_told_so(
    path: Path, served: FakeDaemon, run: Run, env: dict[str, str]
) -> None:
    others = {
        "CLAUDE_CODE_USE_BEDROCK": "1",
        "CLAUDE_CODE_USE_VERTEX": "1",
        "ANTHROPIC_CUSTOM_HEADERS": "Authorization: Bearer of-the-users",
        "CLAUDE_CODE_OAUTH_TOKEN": "of-the-users",
    }
    env |= others
    done = run("launch", "claude", home=served.home)
    assert not [line for line in done.stdout.splitlines() if line.split("=")[0] in others]
    assert "of-the-users" not in done.stdout + done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "claude gets no" in line]
    assert all(name in said for name in (*others, "ANTHROPIC_API_KEY"))
    shown = json.loads(run("launch", "--json", "claude", home=served.home).stdout)["environment"]
    assert [shown[name] for name in others] == [""] * len(others)


def refusal(daemon: FakeDaemon, run: Run, *arguments: str) -> str:
    done = run("launch", *arguments, "claude", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
    return done.stderr


def test_a_model_that_cannot_is_refused(path: Path, served: FakeDaemon, run: Run) -> None:
    told = refusal(served, run, "-m", "short")
    assert "short has a context of 8,192 tokens; claude needs 32,768." in told
    assert "`fleetctl models pull qwen3.5-4b`, then `fleetctl launch -m qwen3.5-4b claude`" in told
    said = "org/big has no chat template."
    error: Any = {"type": "invalid_request_error", "message": said, "code": "invalid_request"}
    served.on("POST", "/v1/messages/count_tokens", Reply({"type": "error", "error": error}, 400))
    assert said in refusal(served, run)
    missing = {"error": {"message": "No model.", "code": "model_not_found", "hint": "Try another."}}
    served.on("GET", "/v1/models/nothing", Reply(missing, 404))
    assert "No model." in refusal(served, run, "-m", "nothing")


def test_a_context_that_is_known_once_the_model_is_loaded_counts(
    path: Path, served: FakeDaemon, run: Run
) -> None:
    def after_load(context: int) -> None:
        loaded = Reply({"id": "new", "context_length": context})
        served.on("GET", "/v1/models/new", Reply({"id": "new"}), loaded)

    after_load(131_072)
    shown = json.loads(run("launch", "--json", "-m", "new", "claude", home=served.home).stdout)
    assert shown["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    paths = [each.path for each in served.seen]
    assert paths[-3:] == ["/v1/models/new", "/v1/messages/count_tokens", "/v1/models/new"]
    after_load(4096)
    assert "a context of 4,096 tokens; claude needs 32,768" in refusal(served, run, "-m", "new")


@pytest.mark.parametrize(
    ("small", "reason"),
    [
        (
            {"context_length": 8192},
            "tiny (models.small) has a context of 8,192 tokens, and claude needs 32,768",
        ),
        (
            {"context_length": 65536, "fleet": {"tools": "", "installed": True}},
            "tiny (models.small) has no chat template",
        ),
    ],
)
def test_a_small_model_that_cannot_is_replaced_by_the_large_one(
    path: Path, served: FakeDaemon, run: Run, small: dict[str, Any], reason: str
) -> None:
    served.on("GET", "/v1/models/tiny", Reply({"id": "tiny", **small}))
    done = run("launch", "--json", "claude", home=served.home)
    assert json.loads(done.stdout)["environment"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "org/big"
    assert reason in done.stderr
    assert "org/big takes its place" in done.stderr


def test_json_shows_what_would_be_started(path: Path, served: FakeDaemon, run: Run) -> None:
    shown = json.loads(run("launch", "--json", "-m", "org/big", "claude", "-p", home=served.home).stdout)
    assert shown["command"] == [str(path / "claude"), "-p"]
    assert shown["environment"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "org/big"


def test_an_agent_that_is_not_installed_is_missed_after_a_model_that_cannot(
    served: FakeDaemon, run: Run, env: dict[str, str], tmp_path: Path
) -> None:
    env["PATH"] = str(tmp_path)
    done = run("launch", "claude", home=served.home)
    assert done.returncode == Exit.ERROR
    assert "npm install -g @anthropic-ai/claude-code" in done.stderr
    assert not [seen for seen in served.seen if seen.method == "POST"], "nothing is loaded for it"
    assert "qwen3.5-4b can" in refusal(served, run, "-m", "short")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"recommended": ["coding"]},
            "`fleetctl models pull qwen3-8b`, then `fleetctl launch -m qwen3-8b codex`",
        ),
        (
            {"recommended": ["coding"], "installed": True},
            "qwen3-8b can: `fleetctl launch -m qwen3-8b codex`.",
        ),
        ({}, "`fleetctl models pull qwen3.5-4b`, then `fleetctl launch -m qwen3.5-4b codex`"),
        (
            {"recommended": ["coding"], "fit": {"where": "freed", "short_bytes": 3_500_000_000}},
            "qwen3.5-4b can, and fits here: `fleetctl models pull qwen3.5-4b`, then `fleetctl launch "
            "-m qwen3.5-4b codex`. qwen3-8b is recommended, once 3.5 GB more of memory are free.",
        ),
        ({"context_tokens": 300_000}, "No model of the catalog fits this machine"),
    ],
)
def test_the_best_model_that_fits_is_named_with_the_line_to_type(changes: dict[str, Any], line: str) -> None:
    huge, first, second = LISTING["catalog"]
    models = msgspec.convert({**LISTING, "catalog": [huge, {**first, **changes}, second]}, ModelListing)
    context = 300_001 if "context_tokens" in changes else 32_768
    assert line in how_to_start(models, "codex", context)


def test_a_model_that_fits_once_memory_is_freed_is_better_than_none() -> None:
    freed = {"fit": {"where": "freed", "short_bytes": 3_500_000_000}}
    models = msgspec.convert(
        {**LISTING, "catalog": [{**entry, **freed} for entry in LISTING["catalog"]]}, ModelListing
    )
    line = how_to_start(models, "codex", 32_768)
    assert line.startswith(
        "huge can, and fits here once 3.5 GB more of memory are free: `fleetctl models pull "
    )


def test_an_installed_model_with_tools_and_context_comes_before_a_download_that_is_not_recommended() -> None:
    mine = {"name": "mine", "context_tokens": 65_536, "roles": ["chat"], "tools": "json_tools"}
    models = msgspec.convert({**LISTING, "installed": [mine]}, ModelListing)
    assert how_to_start(models, "claude", 32_768) == "mine can: `fleetctl launch -m mine claude`."
