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
from interrupting import once_it_waits

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
    once_it_waits(child.pid)
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
    once_it_waits(child.pid)
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
    say("/nonsense", "no command /nonsense. /help")
    say("/modle", "no command /modle. Did you mean /model.")
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


def say(child: pexpect.spawn[str], line: str, expected: str) -> None:
    child.send(line + "\r")
    child.expect(expected)
    child.expect(PROMPT)


def test_models_are_listed_and_the_one_in_use_is_marked(daemon: FakeDaemon, start: Start) -> None:
    models = Reply({"data": [{"id": "smollm2-135m"}, {"id": "red\x1b[31m"}]})
    daemon.on("GET", "/v1/models", models, Reply({"data": []}))
    child = start()
    say(child, "/models", r"\* smollm2-135m\r\n  red\\x1b\[31m\r\n")
    say(child, "/models", "No model can be asked now")
    assert leave(child) == 0


def test_retry_asks_the_last_question_again(daemon: FakeDaemon, start: Start) -> None:
    refused = Reply({"error": {"message": "Busy.", "code": "overloaded"}}, 503)
    daemon.chat(answer("first"), answer("second"), refused, answer("third"))
    child = start()
    say(child, "/retry", "Nothing was asked yet")
    say(child, "one", "first")
    say(child, "/retry", "second")
    say(child, "/retry", "Busy.")
    say(child, "two", "third")
    assert leave(child) == 0
    assert texts(daemon) == [["one"], ["one"], ["one"], ["one", "second", "two"]]


def test_a_file_goes_with_the_next_question_alone(daemon: FakeDaemon, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("the notes\n")
    daemon.chat(answer("fine"))
    child = start()
    say(child, "/file", "file: .none.")
    say(child, f"/file {tmp_path / 'nope'}", "No such file")
    say(child, f"/file {file}", r"notes.md,\s+10\s+characters;\s+the\s+next")
    say(child, "/file -", "file: .none.")
    say(child, f"/file {file}", r"notes.md,\s+10\s+characters;\s+the\s+next")
    say(child, "sum it up", "fine")
    say(child, "go on", "fine")
    assert leave(child) == 0
    assert texts(daemon) == [
        ["sum it up\n\nthe notes\n"],
        ["sum it up\n\nthe notes\n", "fine", "go on"],
    ]


def test_a_conversation_is_saved_for_this_user_and_over_no_other_file(
    daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    other, file = tmp_path / "other.md", tmp_path / "talk.md"
    other.write_text("precious")
    daemon.chat(answer("fine"))
    child = start()
    say(child, f"/save {file}", "nothing to save")
    say(child, "one", "fine")
    say(child, f"/save {other}", "exists already")
    say(child, f"/save {file}", "saved to")
    assert file.read_text() == "## user\n\none\n\n## assistant\n\nfine\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    say(child, "two", "fine")
    say(child, "/save", "saved to")
    assert file.read_text().endswith("## user\n\ntwo\n\n## assistant\n\nfine\n")
    assert leave(child) == 0
    assert other.read_text() == "precious"


def test_local_and_smart_are_switched_for_what_follows(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    child = start()
    say(child, "/local", "local: on")
    say(child, "/smart 30%", "smart prefill: on, keeps 30% of a long prompt")
    say(child, "one", "fine")
    say(child, "/local maybe", "Say /local on or /local off")
    say(child, "/smart 7", "Say /smart on")
    say(child, "/smart on", "smart prefill: on")
    say(child, "two", "fine")
    say(child, "/local off", "local: off")
    say(child, "/smart", "smart prefill: off")
    say(child, "three", "fine")
    assert leave(child) == 0
    asked = [(body.get("local_only"), body.get("smart_prefill")) for body in daemon.chats]
    assert asked == [(True, {"target_ratio": 0.3}), (True, True), (None, None)]


def test_tab_completes_commands_models_and_paths(daemon: FakeDaemon, start: Start, tmp_path: Path) -> None:
    daemon.on("GET", "/v1/models", Reply({"data": [{"id": "smollm2-135m"}, {"id": "qwen3-4b"}]}))
    daemon.on("GET", "/v1/models/qwen3-4b", Reply({"id": "qwen3-4b"}))
    (tmp_path / "only-this-file.md").write_text("x")
    child = start()
    child.send("/sta\t")
    child.expect("ts")
    child.send("\r")
    child.expect("closing line: off")
    child.expect(PROMPT)
    child.send("/model qw\t")
    child.expect("en3-4b")
    child.send("\r")
    child.expect("model: qwen3-4b")
    child.expect(PROMPT)
    child.send(f"/file {tmp_path}/on\t")
    child.expect("ly-this-file.md")
    child.send("\r")
    child.expect(r"1\s+characters;\s+the\s+next")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_what_is_typed_while_an_answer_streams_is_not_shown_in_it(daemon: FakeDaemon, start: Start) -> None:
    typed, done = threading.Event(), threading.Event()
    daemon.chat(
        Reply(stream=[delta(content="Once "), typed, delta(content="upon"), done, *final()]), answer("fine")
    )
    child = start()
    child.send("one\r")
    child.expect("Once")
    child.send("two\r")
    typed.set()
    child.expect("upon")
    assert child.before == " "
    done.set()
    # It was sent as the next question.
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon)[-1] == ["one", "Once upon", "two"]


def test_a_draft_survives_ctrl_c_and_is_not_sent_unseen(daemon: FakeDaemon, start: Start) -> None:
    endless = Reply(stream=[delta(content="Once upon a time"), threading.Event()])
    daemon.chat(endless, answer("fine"))
    child = start()
    child.send("tell\r")
    child.expect("Once upon a time")
    child.send("a drafx\x7ft\rof two lines" + UP)
    once_it_waits(child.pid)
    child.send(CTRL_C)
    child.expect("stopped")
    child.expect("a draft.*of two lines")
    child.expect("\x1b\\[\\?25h")
    assert len(daemon.chats) == 1
    child.send("\r")
    child.expect("fine")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon)[-1][-1] == "a draft\nof two lines"


def test_the_terminal_echoes_again_afterwards(daemon: FakeDaemon, start: Start) -> None:
    daemon.chat(answer("fine"))
    child = start("one", ready=False)
    child.expect("fine")
    child.expect(pexpect.EOF)
    assert child.getecho()


def test_a_long_paste_is_folded_on_the_screen_and_whole_in_the_question(
    daemon: FakeDaemon, start: Start, env: dict[str, str]
) -> None:
    pasted = "".join(f"line {n}\n" for n in range(3000))
    daemon.chat(answer("fine"))
    child = start()
    child.send("what is this? \x1b[200~" + pasted + "\x1b[201~")
    child.expect_exact("[paste 1: 3,000 lines]")
    child.send("\r")
    child.expect("fine")
    assert "line 17" not in str(child.before)
    child.expect(PROMPT)
    assert leave(child) == 0
    assert texts(daemon) == [[f"what is this? {pasted}"]]
    history = Path(env["XDG_STATE_HOME"]) / "fleetctl" / "chat-history"
    assert "line 2999" in history.read_text()


def test_words_are_wrapped_and_the_closing_line_breaks_between_facts(
    daemon: FakeDaemon, start: Start
) -> None:
    daemon.chat(answer("The **well-being** of her faithful dog is what this girl cares about most of all."))
    child = start(ready=False)
    child.setwinsize(24, 60)
    child.expect(PROMPT)
    child.send("one\r")
    child.expect("\\(300 cached\\).*at 21.3 tok/s.*smollm2-135m")
    shown = _COLOURS.sub("", f"{child.before}{child.after}").splitlines()
    at = next(i for i, line in enumerate(shown) if line.startswith("The well-being"))
    assert shown[at : at + 2] == [
        "The well-being of her faithful dog is what this girl cares",
        "about most of all.",
    ]
    assert re.fullmatch(r"412 prompt tokens \(300 cached\) · first token [\d.]+ s", shown[at + 2])
    assert shown[at + 3] == "prefill 310 tok/s · 96 tokens at 21.3 tok/s · smollm2-135m"
    child.expect(PROMPT)
    assert leave(child) == 0


@pytest.mark.parametrize("given", [["--plain"], ["--schema", "any.json"]])
def test_an_answer_that_is_no_markdown_is_shown_as_it_was_written(
    daemon: FakeDaemon, start: Start, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "any.json").write_text('{"type": "object"}')
    daemon.chat(answer('{"a": "**b**"}'))
    child = start(*given, "one", ready=False)
    child.expect_exact('{"a": "**b**"}')
    child.expect(pexpect.EOF)


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
