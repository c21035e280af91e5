"""The real Claude Code does a task against the daemon's HTTP API, with an engine that plays the model.

It is fetched from npm, so these tests are long ones; without npm or its registry they are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Step, serve_in_thread, services

from fleetd import errors
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(600)]

NPM = shutil.which("npm")


@pytest.fixture(scope="module")
def claude(tmp_path_factory: pytest.TempPathFactory) -> str:
    if NPM is None:
        pytest.skip("npm is not installed: Claude Code was NOT tried")
    folder = tmp_path_factory.mktemp("claude-code")
    command = [
        NPM,
        "install",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(folder),
        "@anthropic-ai/claude-code",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm could not fetch it: Claude Code was NOT tried. {done.stderr[-300:]}")
    package = folder / "node_modules" / "@anthropic-ai" / "claude-code"
    # npm may leave a package's own installer to the user.
    subprocess.run(["node", "install.cjs"], cwd=package, check=True, timeout=120)  # noqa: S607
    return str(folder / "node_modules" / ".bin" / "claude")


class Scripted:
    """Plays one turn per tool result that a conversation has, then says that it is done."""

    def __init__(self, turns: list[tuple[str, dict[str, Any]]], limit: int = 10_000_000) -> None:
        self.turns = turns
        self.limit = limit
        self.jobs: list[Job] = []
        self.refused = 0

    def __call__(self, job: Job) -> Iterable[Step]:
        self.jobs.append(job)
        r = job.request
        assert isinstance(r.prompt, p.ChatPrompt)
        tokens = len(str(r.prompt.messages)) // 4
        if r.count_only:
            return [p.Accepted(r.id, tokens), p.Finished(r.id, "stop")]
        if tokens > self.limit:
            self.refused += 1
            return [
                errors.ContextLengthExceeded(
                    f"The prompt is too long: {tokens} tokens > {self.limit} maximum. "
                    f"This model's maximum context length is {self.limit} tokens."
                )
            ]
        begin: list[Step] = [p.Accepted(r.id, tokens), p.Prefill(r.id, tokens, tokens)]
        done = sum(message["role"] == "tool" for message in r.prompt.messages)
        if not r.prompt.tools or done >= len(self.turns):
            return [*begin, p.Delta(r.id, "All done."), p.Finished(r.id, "stop", p.Usage(tokens, 0, 3))]
        name, arguments = self.turns[done]
        return [
            *begin,
            p.Delta(r.id, "What is next?", "reasoning"),
            p.Delta(r.id, f"Now {name}."),
            p.ToolCall(r.id, 0, f"call_{done}", name, json.dumps(arguments)),
            p.Finished(r.id, "tool_calls", p.Usage(tokens, 0, 20, 4)),
        ]


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(claude: str, tmp_path: Path) -> Ask:
    """Run Claude Code in an empty home on a folder with one file; returns what it says of its run."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "hello.py").write_text('print("hello")\n')

    def run(script: Scripted, *arguments: str, **variables: str) -> dict[str, Any]:
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
    script = Scripted(
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
    # Each turn goes on from what was there: nothing of a prompt varies between requests.
    prompts = [job.request.prompt for job in script.jobs if job.route == "messages"]
    for before, after in itertools.pairwise(prompts):
        assert isinstance(before, p.ChatPrompt)
        assert isinstance(after, p.ChatPrompt)
        assert after.messages[: len(before.messages)] == before.messages
        assert after.tools == before.tools


def test_a_prompt_that_is_too_long_makes_it_compact(ask: Ask, tmp_path: Path) -> None:
    turns: list[tuple[str, dict[str, Any]]] = []
    for n in range(5):
        file = tmp_path / "work" / f"long{n}.txt"
        file.write_text("\n".join(f"line {i} of long file {n} that fills the context" for i in range(500)))
        turns.append(("Read", {"file_path": str(file)}))

    class UntilCompacted(Scripted):
        def __call__(self, job: Job) -> Iterable[Step]:
            if "continued from a previous" in str(job.request.prompt):
                self.turns = []
            return super().__call__(job)

    script = UntilCompacted(turns, limit=25_000)
    found = ask(
        script, "-p", "Read the files", ANTHROPIC_MODEL=MODEL, CLAUDE_CODE_MAX_CONTEXT_TOKENS="200000"
    )
    assert script.refused == 1
    assert script.turns == [], "it did not go on with a summary"
    assert (found["is_error"], found["result"]) == (False, "All done.")
