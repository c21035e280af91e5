"""fleetctl through the real socket to a real daemon and a real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest
from interrupting import interrupt
from live_daemon import FLEETCTL, REPO, LiveDaemon, until

pytestmark = pytest.mark.model

SMOL = "smollm2-135m"
QUESTION = ("chat", "--temperature", "0", "What is 2+2?")


def test_a_question_and_the_same_again(live: LiveDaemon) -> None:
    done = live.fleetctl(*QUESTION)
    assert (done.returncode, done.stdout) == (0, "The answer to this classic math problem is 4.\n"), (
        done.stderr
    )
    last = done.stderr.splitlines()[-1]
    assert SMOL in last
    assert "tok/s" in last
    value = json.loads(live.fleetctl(*QUESTION, "--json").stdout)
    assert value["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert value["exactness"] == "exact"


def test_a_text_from_a_pipe_follows_the_instruction(live: LiveDaemon) -> None:
    # The chain model answers what comes last, so the piped text must.
    done = live.fleetctl("chat", "-m", "chain", "--temperature", "0", "say", stdin="it: <hello>")
    assert (done.returncode, done.stdout) == (0, "Hello there, world!\n")
    done = live.fleetctl("chat", "-m", "chain", "--json", "--temperature", "0", "<hello>")
    answer = json.loads(done.stdout)
    assert answer["content"] == "Hello there, world!"
    assert (answer["plan"], answer["exactness"]) == ("local; nodes=this", "exact")


# The prompt is painted once the cursor shows again.
READY = re.compile(r"\x1b\[\?2004h.*?\x1b\[\?25h", re.DOTALL)


@pytest.fixture
def conversation(live: LiveDaemon) -> Iterator[pexpect.spawn]:
    child = pexpect.spawn(
        sys.executable,
        [*FLEETCTL[1:], "--home", str(live.home), "chat", "--temperature", "0", "--max-tokens", "30"],
        cwd=str(REPO),
        # No answers to cursor position requests come from a pexpect terminal.
        env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"},
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 160),
    )
    child.delaybeforesend = None
    yield child
    child.close(force=True)


def test_the_second_turn_is_computed_on_top_of_the_first(conversation: pexpect.spawn) -> None:
    conversation.expect(READY)
    conversation.send("What is 2+2?\r")
    # What it answers depends on the processor's kernels, where they round otherwise.
    conversation.expect("prompt tokens")
    conversation.expect(READY)
    conversation.send("What is 3+3?\r")
    conversation.expect(r"(\d+) prompt tokens \((\d+) cached\)")
    prompt, cached = map(int, conversation.match.groups())
    # All of the first turn but the mark that ends its answer.
    assert cached >= 40
    assert prompt - cached <= 20
    conversation.expect(READY)
    conversation.send("\x04")
    conversation.expect(pexpect.EOF)


def test_models_for_this_machine_are_told_apart_and_others_are_not_downloaded_by_mistake(
    live: LiveDaemon,
) -> None:
    listed = json.loads(live.fleetctl("models", "--json").stdout)
    most = listed["memory"]["largest_bytes"]
    for model in listed["catalog"]:
        assert (model["fit"]["where"] in ("here", "freed")) == (model["memory_bytes"] <= most), model["name"]
    shown, everything = (live.fleetctl("models", *more).stdout for more in ((), ("--all",)))
    assert "kimi-k2.6" not in shown
    assert "kimi-k2.6" in everything
    refused = live.fleetctl("models", "pull", "kimi-k2.6")
    assert refused.returncode == 2
    told = " ".join(refused.stderr.split())
    assert re.search(r"kimi-k2.6 will not load here: it needs [\d.]+ [GT]B, and models may take", told)
    assert "Say --yes" in told


def test_one_more_machine_is_priced_by_the_planner_and_called_modelled(live: LiveDaemon) -> None:
    live.fleetctl("models", "load", SMOL)
    told = live.fleetctl("plan", "--with", "Mac mini M4, 16 GB", "-m", SMOL)
    assert told.returncode == 0, told.stderr
    assert "modelled times" in told.stdout
    assert re.search(r"4,096 +\d", told.stdout)
    refused = live.fleetctl("plan", "--with", "Mac mini M4, 17 GB", "-m", SMOL)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "Did you mean 'Mac mini M4, 16 GB'" in refused.stderr
    assert "DGX Spark, 128 GB" in live.fleetctl("plan", "--with", "list").stdout.splitlines()


def test_every_reading_verb_agrees_with_the_daemon(live: LiveDaemon) -> None:
    def told(*arguments: str) -> str:
        return live.fleetctl(*arguments).stdout

    told("models", "load", SMOL)
    status = json.loads(told("status", "--json"))
    assert SMOL in [engine["model"] for engine in status["engines"]]
    assert re.search(rf"{SMOL} +ready", told("status"))
    models = json.loads(told("models", "--json"))
    assert [model["loaded"] for model in models["installed"] if model["name"] == SMOL] == [True]
    assert "loaded" in told("models")
    assert "is intact" in told("models", "verify", SMOL)
    env = json.loads(told("env", "--json"))
    assert env["base_url"] == f"http://127.0.0.1:{status['http']['port']}/v1"
    assert env["api_key"] == live.key
    assert live.fleetctl("usage").returncode == 0
    plan = json.loads(told("plan", "--tokens", "4000", "--json"))
    assert [(option["kind"], option["chosen"]) for option in plan["options"]] == [("local", True)]
    assert re.search(r"^\*  local  this ", told("plan", "--tokens", "4000"), re.MULTILINE)
    checks = json.loads(told("doctor", "--json"))["checks"]
    # The machine that runs the tests may itself be short of memory or disk.
    assert {check["name"] for check in checks if check["level"] == "fail"} <= {"disk", "memory"}, checks


def test_a_folder_anywhere_becomes_a_model_like_any_other(
    make_daemon: Callable[..., LiveDaemon], live_models: Path, tmp_path: Path
) -> None:
    daemon = make_daemon()
    folder = tmp_path / "work" / "My Model"
    shutil.copytree(live_models / "chain", folder)
    assert daemon.fleetctl("models", "add", str(folder), "--name", "mine").stdout == "mine is ready to use.\n"
    done = daemon.fleetctl("chat", "-m", "mine", "--temperature", "0", "say <hello>")
    assert (done.returncode, done.stdout) == (0, "Hello there, world!\n"), done.stderr
    installed = json.loads(daemon.fleetctl("models", "--json").stdout)["installed"]
    assert [(m["source"], m["loaded"]) for m in installed if m["name"] == "mine"] == [("added", True)]
    plan = json.loads(daemon.fleetctl("plan", "-m", str(folder), "--tokens", "100", "--json").stdout)
    assert [(option["kind"], option["chosen"]) for option in plan["options"]] == [("local", True)]
    assert daemon.fleetctl("models", "remove", "mine", "--yes").returncode == 0
    assert "There is no model" in daemon.fleetctl("chat", "-m", "mine", "hi").stderr
    assert (folder / "config.json").is_file()


def test_the_id_that_an_answer_has_leads_to_its_trace(make_daemon: Callable[..., LiveDaemon]) -> None:
    """Also where no other machine could have had a part in it."""
    daemon = make_daemon()
    assert "No request has come yet" in daemon.fleetctl("trace").stdout
    done = daemon.fleetctl("chat", "-m", "chain", "--json", "<hello>")
    told = daemon.fleetctl("trace", json.loads(done.stdout)["request"]).stdout
    assert "outcome      computed here · exact" in told
    steps = [line.split()[0] for line in told[told.index("STEP") :].splitlines() if line]
    assert steps[:5] == ["STEP", "waiting", "loading", "reading", "writing"]
    # Steps of less than a hundredth are not shown; of the load, which came first, some take longer.
    assert len(steps) > 6


def test_ctrl_c_frees_the_slot(live: LiveDaemon) -> None:
    live.fleetctl(*QUESTION)
    command = [*FLEETCTL, "--home", str(live.home), "chat", "Tell me a very long story about a fox."]
    with subprocess.Popen(
        command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(5)
        interrupt(process)
        process.stdout.read()
    assert process.returncode == 130
    until(lambda: live.running == 0)


def test_an_unknown_model_is_refused_by_name(live: LiveDaemon) -> None:
    done = live.fleetctl("chat", "--model", "smollm2-135", "hi")
    assert done.returncode == 4
    assert SMOL in done.stderr
