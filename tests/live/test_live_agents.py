"""Claude Code, Codex and opencode, started by `fleetctl launch`, do a task with a live daemon.

Its worker is real, but for the tokens that it chooses: chat template, tokenizer, prefix cache, prefill and
the reading of tool calls are those of every model. The programs come from npm, so these tests are long ones;
where npm or its registry is missing they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_daemon import FLEETCTL, REPO
from scripted_answers import DONE
from scripted_daemon import ScriptedDaemon, anew
from scripted_model import NAME

from fleetd.control.prefill_trace import Trace

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(900)]

TASK = "Say goodbye instead of hello, and run it"
THOUGHT = "What is next?"
RUN_S = 400.0

Launch = Callable[..., str]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, with one file."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hello.py").write_text('print("hello")\n')
    return folder


@pytest.fixture
def launch(
    scripted: ScriptedDaemon, agent_folder: Callable[[str], Path], tmp_path: Path, work: Path
) -> Launch:
    """Run `fleetctl launch` with an agent and its arguments, in an empty home; returns what it prints."""
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)

    def run(agent: str, *arguments: str) -> str:
        done = subprocess.run(
            [*FLEETCTL, "--home", str(scripted.daemon.home), "launch", "-m", NAME, agent, *arguments],
            cwd=work,
            env={
                "PATH": f"{agent_folder(agent)}:{os.environ['PATH']}",
                "HOME": str(home),
                "PYTHONPATH": str(REPO),
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.stdout

    return run


def claude(launch: Launch, prompt: str, *arguments: str) -> dict[str, Any]:
    """Returns what it says of its run."""
    options = ["--allowedTools", "Read,Edit,Bash", "--output-format", "json"]
    found: dict[str, Any] = json.loads(launch("claude", "-p", prompt, *options, *arguments))
    return found


def session(traces: list[Trace]) -> list[Trace]:
    """The turns: an agent also asks for a title, and has prompts counted."""
    longest = max(trace.prompt_tokens for trace in traces)
    return [trace for trace in traces if 2 * trace.prompt_tokens > longest and trace.completion_tokens]


def is_done(work: Path) -> bool:
    return (work / "hello.py").read_text() == 'print("goodbye")\n' and (
        work / "seen.txt"
    ).read_text() == "goodbye\n"


def test_claude_code_reads_edits_runs_and_finishes(
    scripted: ScriptedDaemon, launch: Launch, work: Path
) -> None:
    file = str(work / "hello.py")
    # It puts this field before all others where a model leaves it out, and the call would be read anew.
    edit = {"replace_all": False, "file_path": file, "old_string": "hello", "new_string": "goodbye"}
    scripted.play(
        [
            ("Read", {"file_path": file}),
            ("Edit", edit),
            ("Bash", {"command": "python3 hello.py | tee seen.txt", "description": "Run it"}),
        ],
        thought=THOUGHT,
    )
    found = claude(launch, TASK)
    assert (found["is_error"], found["result"], found["num_turns"]) == (False, DONE, 4)
    assert is_done(work)
    turns = session(scripted.traces(4))
    assert len(turns) == 4
    assert anew(turns) == [0, 0, 0]


def test_a_prompt_that_is_too_long_makes_claude_code_compact(
    scripted: ScriptedDaemon, launch: Launch, work: Path
) -> None:
    turns: list[tuple[str, dict[str, Any]]] = []
    for n in range(6):
        file = work / f"long{n}.txt"
        file.write_text("\n".join(f"line {i} of long file {n} that fills the context" for i in range(700)))
        turns.append(("Read", {"file_path": str(file)}))
    scripted.play(turns, until="continued from a previous")
    before = len(scripted.refused())
    # Left to itself it would compact before the context that it is told is full.
    larger = {"env": {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "400000"}}
    found = claude(launch, "Read the files", "--settings", json.dumps(larger))
    assert (found["is_error"], found["result"]) == (False, DONE)
    refused = [(line["path"], line["code"]) for line in scripted.refused()[before:]]
    assert refused == [("/v1/messages", "context_length_exceeded")]
    prompts = [trace.prompt_tokens for trace in scripted.traces(3) if trace.completion_tokens]
    assert prompts[-1] < max(prompts), "it did not go on with a summary"


def test_codex_reads_edits_runs_and_finishes(scripted: ScriptedDaemon, launch: Launch, work: Path) -> None:
    edit = "sed -i s/hello/goodbye/ hello.py"
    commands = ["cat hello.py", edit, "python3 hello.py | tee seen.txt"]
    scripted.play([("exec_command", {"cmd": command}) for command in commands], thought=THOUGHT)
    # Its sandbox needs rights that test machines do not give; the folder is the test's own.
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    found = [json.loads(line) for line in launch("codex", "exec", "--json", *options, TASK).splitlines()]
    assert found[-1]["type"] == "turn.completed"
    said = [each["item"]["text"] for each in found if each.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == DONE
    assert is_done(work)
    turns = session(scripted.traces(4))
    assert len(turns) == 4
    assert anew(turns) == [0, 0, 0]


def test_opencode_reads_edits_runs_and_finishes(scripted: ScriptedDaemon, launch: Launch, work: Path) -> None:
    file = str(work / "hello.py")
    scripted.play(
        [
            ("read", {"filePath": file}),
            ("edit", {"filePath": file, "oldString": "hello", "newString": "goodbye"}),
            ("bash", {"command": "python3 hello.py | tee seen.txt", "description": "Run it"}),
        ],
        thought=THOUGHT,
    )
    found = [json.loads(line) for line in launch("opencode", "run", "--format", "json", TASK).splitlines()]
    assert [each["part"]["text"] for each in found if each["type"] == "text"][-1] == DONE
    assert is_done(work)
    turns = session(scripted.traces(4))
    assert len(turns) == 4
    assert anew(turns) == [0, 0, 0]
