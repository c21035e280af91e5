"""The real Claude Code does a task against the daemon's HTTP API, with an engine that plays the model.

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

from fleetd.engine import protocol as p

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def claude(agent_folder: Callable[[str], Path]) -> str:
    return str(agent_folder("claude") / "claude")


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(claude: str, tmp_path: Path) -> Ask:
    """Run Claude Code in an empty home on a folder with one file; returns what it says of its run."""
    home, work = hello_folder(tmp_path)

    def run(script: ScriptedAgent, *arguments: str, **variables: str) -> dict[str, Any]:
        with serve_in_thread(lambda: services(FakeRunner(script))) as site:
            env = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "ANTHROPIC_BASE_URL": site.url,
                "ANTHROPIC_AUTH_TOKEN": TOKEN,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                **variables,
            }
            command = [claude, *arguments, "--allowedTools", "Read,Edit,Bash", "--output-format", "json"]
            done = subprocess.run(
                command,
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.parametrize("model", ["", MODEL])
def test_it_reads_edits_runs_and_finishes(ask: Ask, tmp_path: Path, model: str) -> None:
    file = tmp_path / "work" / "hello.py"
    script = ScriptedAgent(
        [
            ("Read", {"file_path": str(file)}),
            ("Edit", {"file_path": str(file), "old_string": "hello", "new_string": "goodbye"}),
            ("Bash", {"command": "cat hello.py > seen.txt; python3 hello.py", "description": "Run it"}),
        ]
    )
    chosen = {"ANTHROPIC_MODEL": model, "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536"} if model else {}
    found = ask(script, "-p", "Say goodbye instead of hello, and run it", **chosen)
    assert (found["is_error"], found["result"], found["num_turns"]) == (False, "All done.", 4)
    assert file.read_text() == 'print("goodbye")\n'
    assert (tmp_path / "work" / "seen.txt").read_text() == 'print("goodbye")\n'
    assert {job.route for job in script.jobs} <= {"messages", "count_tokens"}
    last = script.jobs[-1].request.prompt
    assert isinstance(last, p.ChatPrompt)
    assert last.messages[-1]["content"].endswith("goodbye")
    turns = [job for job in script.jobs if job.route == "messages"]
    assert extended(turns)
    assert len({job.session for job in turns}) == 1
    assert turns[0].session.startswith("x-claude-code-session-id ")


def test_a_prompt_that_is_too_long_makes_it_compact(ask: Ask, tmp_path: Path) -> None:
    turns: list[tuple[str, dict[str, Any]]] = []
    for n in range(5):
        file = tmp_path / "work" / f"long{n}.txt"
        file.write_text("\n".join(f"line {i} of long file {n} that fills the context" for i in range(500)))
        turns.append(("Read", {"file_path": str(file)}))

    script = ScriptedAgent(
        turns, limit=25_000, is_summary=lambda job: "continued from a previous" in str(job.request.prompt)
    )
    found = ask(
        script, "-p", "Read the files", ANTHROPIC_MODEL=MODEL, CLAUDE_CODE_MAX_CONTEXT_TOKENS="200000"
    )
    assert script.refused == 1
    assert script.turns == [], "it did not go on with a summary"
    assert (found["is_error"], found["result"]) == (False, "All done.")
