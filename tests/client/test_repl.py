"""The conversation on a real pseudo-terminal: editing, Ctrl-C, commands, history, hostile output."""

from __future__ import annotations

import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from fake_daemon import FLEETCTL, FakeDaemon, Reply, answer, data, delta, final

# Raw mode is on before bracketed paste is, and the prompt is painted once the cursor shows again.
PROMPT = re.compile(r"\x1b\[\?2004h.*?\x1b\[\?25h", re.DOTALL)
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

Start = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def start(daemon: FakeDaemon, env: dict[str, str]) -> Iterator[Start]:
    children: list[pexpect.spawn[str]] = []

    def _start(*arguments: str, ready: bool = True) -> pexpect.spawn[str]:
        child = pexpect.spawn(
            FLEETCTL[0],
            [*FLEETCTL[1:], "--home", str(daemon.home), "chat", *arguments],
            # No answers to cursor position requests come from a pexpect terminal.
            env={**env, "PROMPT_TOOLKIT_NO_CPR": "1"},
            encoding="utf-8",
            timeout=60,
            dimensions=(40, 100),
        )
        # Typing is not simulated at human speed.
        child.delaybeforesend = None
        children.append(child)
        if ready:
            child.expect("Ctrl-D leaves")
            child.expect(PROMPT)
        return child

    yield _start
    for child in children:
        child.close(force=True)


def leave(child: pexpect.spawn[str]) -> int:
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus is not None
    return int(child.exitstatus)


def texts(daemon: FakeDaemon) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in daemon.chats]


def test_a_conversation_remembers(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("first answer"), answer("second answer"))
    child = start()
    child.send("one\r")
    child.expect("first answer")
    child.expect("21.3 tok/s")
    child.expect(PROMPT)
    child.send("two\r")
    child.expect("second answer")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon) == [["one"], ["one", "first answer", "two"]]


def test_ctrl_c_stops_the_answer_and_not_the_program(daemon: FakeDaemon, start: Start) -> None:
    endless = Reply(stream=[delta(content="Once upon a time"), threading.Event()])
    daemon.chat(endless, answer("fine"))
    child = start()
    child.send("tell\r")
    child.expect("Once upon a time")
    child.send(CTRL_C)
    child.expect("stopped")
    child.expect(PROMPT)
    assert endless.gone.wait(60)
    child.send("go on\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    # What was said before the stop stays part of the conversation.
    assert texts(daemon)[-1] == ["tell", "Once upon a time", "go on"]


def test_ctrl_c_before_the_first_token_forgets_the_question(daemon: FakeDaemon, start: Start) -> None:
    silent = Reply(stream=[": keepalive 10/4096\n\n", threading.Event()])
    daemon.chat(silent, answer("fine"))
    child = start()
    child.send("long one\r")
    child.expect("reading the prompt")
    child.expect("10 of 4,096 tokens")
    child.send(CTRL_C)
    child.expect("stopped")
    child.expect(PROMPT)
    child.send("short\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon)[-1] == ["short"]


def test_the_progress_line_is_gone_before_the_answer(daemon: FakeDaemon, start: Start) -> None:
    held = threading.Event()
    daemon.chat(Reply(stream=[": loading reading 3/30\n\n", held, delta(content="Answer"), *final()]))
    child = start()
    child.send("x\r")
    child.expect("model: reading")
    held.set()
    child.expect("Answer")
    assert child.before is not None
    assert child.before.endswith("\r\x1b[K")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_ctrl_c_at_the_prompt_clears_the_line(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    child = start()
    child.send("never mind")
    child.expect("never mind")
    child.send(CTRL_C)
    child.send("this\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon) == [["this"]]


def test_several_lines(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    child = start()
    child.send("one\\\r" + "two" + ALT_ENTER + "three\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon) == [["one\ntwo\nthree"]]


def test_pasted_lines_are_one_message(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    child = start()
    child.send("\x1b[200~def f():\n    return 1\n\x1b[201~")
    child.send("explain\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon) == [["def f():\n    return 1\nexplain"]]


def test_commands(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    daemon.on(
        "GET",
        "/v1/models/nope",
        Reply({"error": {"message": "There is no model 'nope'.", "code": "model_not_found"}}, 404),
    )
    daemon.on("GET", "/v1/models/other", Reply({"id": "other"}))
    child = start("--system", "be brief")

    def say(line: str, expected: str) -> None:
        child.send(line + "\r")
        child.expect(expected)
        child.expect(PROMPT)

    say("/help", "Ctrl-C stops an answer")
    say("first", "fine")
    say("/model", "model: smollm2-135m")
    say("/model nope", "no model 'nope'")
    say("/model", "model: smollm2-135m")
    say("/model other", "model: other")
    say("/stats", "closing line: off")
    say("second", "fine")
    say("/new", "starts anew")
    say("/system -", "system message: .none.")
    say("third", "fine")
    say("/nonsense", "no command /nonsense")
    say("/etc/fstab means what?", "fine")
    child.send("/quit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert [body["model"] for body in daemon.chats] == ["smollm2-135m", "other", "other", "other"]
    assert texts(daemon) == [
        ["be brief", "first"],
        ["be brief", "first", "fine", "second"],
        ["third"],
        ["third", "fine", "/etc/fstab means what?"],
    ]


def test_an_error_ends_the_answer_and_not_the_conversation(daemon: FakeDaemon, start: Start) -> None:
    died = {"error": {"message": "The engine died.", "code": "engine_died", "hint": "Ask again."}}
    daemon.chat(Reply(stream=[delta(content="Half"), data(died)]), answer("fine"))
    child = start()
    child.send("one\r")
    child.expect("The engine died.")
    child.expect("Ask again.")
    child.expect(PROMPT)
    child.send("two\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon)[-1] == ["two"]


def test_every_answer_of_a_conversation_follows_the_schema(
    daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "any.json"
    file.write_text('{"type": "object"}')
    daemon.chat(answer('{"a": 1}'), answer('{"a": 2}'))
    child = start("--schema", str(file))
    for n in (1, 2):
        child.send(f"{n}\r")
        child.expect(f'"a": {n}')
        child.expect(PROMPT)
    assert leave(child) == 0
    schemas = [body["response_format"]["json_schema"]["schema"] for body in daemon.chats]
    assert schemas == [{"type": "object"}] * 2


def test_history_is_kept_for_this_user_alone(daemon: FakeDaemon, start: Start, env: dict[str, str]) -> None:
    daemon.chat(answer("fine"))
    child = start()
    child.send("remember me\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    path = Path(env["XDG_STATE_HOME"]) / "fleetctl" / "chat-history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = start()
    again.send(UP + "\r")
    again.expect("fine")
    again.expect(PROMPT)
    assert leave(again) == 0
    assert texts(daemon)[-1] == ["remember me"]


def test_history_that_cannot_be_kept_is_a_remark(
    daemon: FakeDaemon, start: Start, env: dict[str, str]
) -> None:
    Path(env["XDG_STATE_HOME"]).write_text("a file where a folder should be")
    child = start(ready=False)
    child.expect("history is not kept")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_escape_injection_model_output_cannot_drive_the_terminal(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(
        Reply(stream=[delta(reasoning_content="\x1b]0;a\x07"), delta(content="\x1b[2Jred\x9b"), *final()])
    )
    child = start()
    child.send("x\r")
    child.expect_exact("\\x1b[2Jred\\x9b")
    assert child.before is not None
    assert "\\x1b]0;a\\x07" in _COLOURS.sub("", child.before)
    assert "\x1b]0;" not in child.before
    child.expect(PROMPT)
    assert leave(child) == 0


def test_no_daemon_ends_it_at_once(daemon: FakeDaemon, start: Start) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({"error": {"message": "Stopping.", "code": "draining"}}, 503))
    child = start(ready=False)
    child.expect("Stopping.")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 5


def test_json_needs_a_prompt(daemon: FakeDaemon, start: Start) -> None:
    child = start("--json", ready=False)
    child.expect("--json needs a PROMPT")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2


def test_one_shot_on_a_terminal_is_sanitised_too(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("\x1b[31mred\r\nnext"))
    child = start("hello", ready=False)
    child.expect_exact("\\x1b[31mred\r\nnext\r\n")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
