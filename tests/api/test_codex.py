"""The real Codex does a task against the daemon's HTTP API, with an engine that plays the model.

It is fetched from npm, so these tests are long ones; without npm or its registry they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, serve_in_thread, services
from scripted_agents import ScriptedAgent, extended, hello_folder

from fleetctl.programs.agents import AGENTS, AgentModels
from fleetd.control.daemon_status import ClientSettings
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(600)]

Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def codex(agent_folder: Callable[[str], Path]) -> str:
    return str(agent_folder("codex") / "codex")


@pytest.fixture
def ask(codex: str, tmp_path: Path) -> Ask:
    """Run Codex in an empty home on a folder with one file; returns what it says of its run."""
    home, work = hello_folder(tmp_path)
    (home / ".codex").mkdir()

    def run(script: ScriptedAgent, prompt: str, context: int = 65_536) -> list[dict[str, Any]]:
        with serve_in_thread(lambda: services(FakeRunner(script))) as site:
            models = AgentModels(MODEL, MODEL, context)
            start = AGENTS["codex"].start(ClientSettings(api_key=TOKEN), f"{site.url}/v1", models)
            # Its sandbox needs rights that test machines do not give; the folder is the test's own.
            options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
            done = subprocess.run(
                [codex, *start.arguments, "exec", "--json", *options, prompt],
                cwd=work,
                env={"PATH": os.environ["PATH"], "HOME": str(home), **start.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.stdout, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_it_reads_edits_runs_and_finishes(ask: Ask, tmp_path: Path) -> None:
    edit = "sed -i s/hello/goodbye/ hello.py"
    commands = ["cat hello.py", edit, "python3 hello.py | tee seen.txt"]
    script = ScriptedAgent([("exec_command", {"cmd": command}) for command in commands])
    found = ask(script, "Say goodbye instead of hello, and run it")
    assert found[-1]["type"] == "turn.completed"
    assert found[-1]["usage"]["reasoning_output_tokens"] == 3 * 4
    said = [each["item"]["text"] for each in found if each.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == "All done."
    assert (tmp_path / "work" / "seen.txt").read_text() == "goodbye\n"
    assert {job.route for job in script.jobs} == {"responses"}
    assert len({job.session for job in script.jobs}) == 1
    assert script.jobs[0].session.startswith("session-id ")
    last = script.jobs[-1].request.prompt
    assert isinstance(last, p.ChatPrompt)
    assert last.messages[-1]["content"].strip().endswith("goodbye")
    thoughts = [message.get("reasoning_content") for message in last.messages]
    assert thoughts.count("What is next?") == len(commands), "it did not send the reasoning back"
    assert extended(script.jobs)


def test_a_prompt_that_is_too_long_is_said_in_its_own_words(ask: Ask) -> None:
    script = ScriptedAgent([], limit=100)
    found = ask(script, "Say goodbye")
    assert script.refused == 1
    assert found[-1]["type"] == "turn.failed"
    assert "context window" in found[-1]["error"]["message"]


def test_it_compacts_before_the_context_is_full(ask: Ask) -> None:
    def asks_for_summary(job: Job) -> bool:
        assert isinstance(job.request.prompt, p.ChatPrompt)
        return "checkpoint" in job.request.prompt.messages[-1]["content"].lower()

    turns = [("exec_command", {"cmd": "seq 1 2500"})] * 8
    script = ScriptedAgent(turns, limit=100_000, is_summary=asks_for_summary)
    found = ask(script, "Count", 16_000)
    assert script.turns == [], "it did not compact"
    assert found[-1]["type"] == "turn.completed"
    prompts = [len(str(job.request.prompt)) for job in script.jobs]
    assert prompts[-1] < prompts[-2], "it did not go on with a summary"
