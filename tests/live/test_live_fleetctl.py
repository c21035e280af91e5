"""fleetctl's chat through the real socket to a real model."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator

import pexpect  # type: ignore[import-untyped]
import pytest
from live_daemon import FLEETCTL, REPO, LiveDaemon

pytestmark = pytest.mark.model


def test_one_question(live: LiveDaemon) -> None:
    done = live.fleetctl("chat", "--temperature", "0", "What is the capital of France?")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "smollm2-135m" in done.stderr.splitlines()[-1]


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
    conversation.send("What is the capital of France?\r")
    conversation.expect("The capital of France is Paris.")
    conversation.expect("prompt tokens")
    conversation.expect(READY)
    conversation.send("And of Germany?\r")
    conversation.expect("Berlin")
    conversation.expect(r"(\d+) prompt tokens \((\d+) cached\)")
    prompt, cached = map(int, conversation.match.groups())
    # All of the first turn but the mark that ends its answer.
    assert cached >= 40
    assert prompt - cached <= 20
    conversation.expect(READY)
    conversation.send("\x04")
    conversation.expect(pexpect.EOF)
