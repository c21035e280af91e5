"""The real opencode does a task against the daemon's HTTP API, with an engine that plays the model.

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

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(600)]

Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def opencode(agent_folder: Callable[[str], Path]) -> str:
    return str(agent_folder("opencode") / "opencode")


@pytest.fixture
def ask(opencode: str, tmp_path: Path) -> Ask:
    """Run opencode in an empty home on a folder with one file; returns what it says of its run."""
    home, work = hello_folder(tmp_path)

    def run(script: ScriptedAgent, prompt: str, context: int = 65_536) -> list[dict[str, Any]]:
        with serve_in_thread(lambda: services(FakeRunner(script))) as site:
            models = AgentModels(MODEL, MODEL, context)
            start = AGENTS["opencode"].start(ClientSettings(api_key=TOKEN), f"{site.url}/v1", models)
            done = subprocess.run(
                [opencode, "run", "--format", "json", *start.arguments, prompt],
                cwd=work,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(home),
                    "OPENCODE_DISABLE_AUTOUPDATE": "1",
                    **start.environment,
                },
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
    file = str(tmp_path / "work" / "hello.py")
    turns: list[tuple[str, dict[str, Any]]] = [
        ("read", {"filePath": file}),
        ("edit", {"filePath": file, "oldString": "hello", "newString": "goodbye"}),
        ("bash", {"command": "python3 hello.py | tee seen.txt", "description": "Run it"}),
    ]
    script = ScriptedAgent(turns)
    found = ask(script, "Say goodbye instead of hello, and run it")
    assert [each["part"]["text"] for each in found if each["type"] == "text"][-1] == "All done."
    assert Path(file).read_text() == 'print("goodbye")\n'
    assert (tmp_path / "work" / "seen.txt").read_text() == "goodbye\n"
    assert {job.route for job in script.jobs} == {"chat"}
    # It also asks for a title, without tools.
    session = [
        job
        for job in script.jobs
        if isinstance(job.request.prompt, p.ChatPrompt) and job.request.prompt.tools
    ]
    last = session[-1].request.prompt
    assert isinstance(last, p.ChatPrompt)
    assert "goodbye" in last.messages[-1]["content"]
    thoughts = [message.get("reasoning_content") for message in last.messages]
    assert thoughts.count("What is next?") == len(turns), "it did not send the reasoning back"
    assert extended(session)
    assert len({job.session for job in script.jobs}) == 1
    assert script.jobs[0].session.startswith("x-session-affinity ses_")


def test_a_prompt_that_is_too_long_is_reported(ask: Ask) -> None:
    script = ScriptedAgent([], limit=100)
    found = ask(script, "Say goodbye")
    assert script.refused
    assert "maximum context length" in str([each for each in found if each["type"] == "error"])
