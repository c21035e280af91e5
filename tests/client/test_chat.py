"""One-shot chat as a process: pipes, streams, statistics, errors, Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FLEETCTL, FakeDaemon, Reply, Run, answer, data, delta, final
from interrupting import interrupt

from fleetctl.chat.answer import Answer
from fleetctl.exits import Exit
from fleetd import limits
from fleetd.text import too_long

BEFORE = "412 prompt tokens (300 cached) · first token "
AFTER = " · prefill 310 tok/s · 96 tokens at 21.3 tok/s · smollm2-135m\n"


def user_text(body: Any) -> str:
    return str(body["messages"][-1]["content"])


def test_answer_on_stdout_statistics_on_stderr(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("Hello", ", world"))
    done = run("chat", "say", "hello", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "Hello, world\n")
    assert done.stderr.startswith(BEFORE)
    assert done.stderr.endswith(AFTER)
    assert daemon.chats == [
        {
            "messages": [{"role": "user", "content": "say hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_an_answer_with_its_own_newline_gets_no_second(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("line\n"))
    assert run("chat", "x", home=daemon.home).stdout == "line\n"


def test_piped_text_follows_the_instruction(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("ok"))
    run("chat", "summarise", home=daemon.home, stdin="the report\n")
    assert user_text(daemon.chats[-1]) == "summarise\n\nthe report\n"


def test_stdin_alone_is_the_prompt(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("ok"))
    run("chat", home=daemon.home, stdin="what is żółć?")
    assert user_text(daemon.chats[-1]) == "what is żółć?"


def test_an_empty_pipe_leaves_the_instruction(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("ok"))
    run("chat", "hello", home=daemon.home, stdin="")
    assert user_text(daemon.chats[-1]) == "hello"


@pytest.mark.parametrize("stdin", [None, "", " \n"])
def test_no_prompt_is_a_usage_error(run: Run, daemon: FakeDaemon, stdin: str | None) -> None:
    done = run("chat", home=daemon.home, stdin=stdin)
    assert (done.returncode, daemon.chats) == (Exit.USAGE, [])


def test_stdin_that_is_not_text(run: Run, daemon: FakeDaemon) -> None:
    done = run("chat", "x", home=daemon.home, stdin=b"ok\xff\xfe")
    assert (done.returncode, daemon.chats) == (Exit.ERROR, [])
    assert "not UTF-8 text (byte 3)" in done.stderr


def test_options_reach_the_daemon(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("ok"))
    flags = "--model m --system S --temperature 0 --top-p 0.5 --max-tokens 7 --seed 0 --stop A --stop B"
    done = run("chat", *flags.split(), "--local-only", "--no-stats", "hi", home=daemon.home)
    assert done.stderr == ""
    body = daemon.chats[-1]
    assert body["local_only"] is True
    assert body["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    chosen = {key: body[key] for key in ("model", "temperature", "top_p", "max_tokens", "seed", "stop")}
    assert chosen == {
        "model": "m",
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 7,
        "seed": 0,
        "stop": ["A", "B"],
    }


@pytest.mark.parametrize(
    "flags", [["--temperature", "3"], ["--top-p", "0"], ["--max-tokens", "0"], ["--seed", "x"]]
)
def test_impossible_options_never_reach_the_daemon(run: Run, daemon: FakeDaemon, flags: list[str]) -> None:
    assert run("chat", *flags, "hi", home=daemon.home).returncode == Exit.USAGE
    assert daemon.chats == []


SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}


def test_a_schema_from_a_file_or_stdin_reaches_the_daemon(
    run: Run, daemon: FakeDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "point.json"
    file.write_text(json.dumps(SCHEMA))
    for path, stdin in ((str(file), None), ("-", json.dumps(SCHEMA))):
        daemon.chat(answer('{"z": 1', ', "a": "b"}'))
        done = run("chat", "--schema", path, "a point", home=daemon.home, stdin=stdin)
        assert (done.returncode, done.stdout) == (0, '{"z": 1, "a": "b"}\n')
        form = daemon.chats[-1]["response_format"]
        assert form == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        }
        assert list(form["json_schema"]["schema"]["properties"]) == ["z", "a"]
        assert user_text(daemon.chats[-1]) == "a point"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"type": }', "is not valid JSON: Expecting value: line 1 column 10"),
        ('{"maximum": Infinity}', "is not valid JSON: Infinity is no number"),
        ("[" * 10_000, "is not valid JSON"),
        ("", "is not valid JSON"),
        ("true", "holds no JSON schema"),
        (None, "No such file"),
    ],
    ids=lambda value: None if value is None else value[:12],
)
def test_a_file_without_a_schema_is_named(
    run: Run, daemon: FakeDaemon, tmp_path: Path, text: str | None, says: str
) -> None:
    file = tmp_path / "point.json"
    if text is not None:
        file.write_text(text)
    done = run("chat", "--schema", str(file), "x", home=daemon.home)
    assert (done.returncode, daemon.chats) == (Exit.ERROR, [])
    assert says in done.stderr
    assert str(file) in done.stderr
    if text is not None:
        piped = run("chat", "--schema", "-", "x", home=daemon.home, stdin=text)
        assert (piped.returncode, daemon.chats) == (Exit.ERROR, [])
        assert f"stdin {says}" in piped.stderr


def test_a_schema_on_stdin_needs_a_prompt(run: Run, daemon: FakeDaemon) -> None:
    done = run("chat", "--schema", "-", home=daemon.home, stdin=json.dumps(SCHEMA))
    assert (done.returncode, daemon.chats) == (Exit.USAGE, [])
    assert "PROMPT has to be an argument" in done.stderr


def test_images_stand_before_the_prompt(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    files = [tmp_path / "one.png", tmp_path / "other"]
    for file in files:
        file.write_bytes(file.name.encode())
    daemon.chat(answer("A cat."))
    done = run("chat", "-i", str(files[0]), "--image", str(files[1]), "What is it?", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "A cat.\n")
    (message,) = daemon.chats[-1]["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,b25lLnBuZw=="}},
        {"type": "image_url", "image_url": {"url": "data:application/octet-stream;base64,b3RoZXI="}},
        {"type": "text", "text": "What is it?"},
    ]


def test_an_image_needs_a_prompt_and_a_file(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    done = run("chat", "--image", str(tmp_path / "none.png"), "What is it?", home=daemon.home)
    assert (done.returncode, daemon.chats) == (Exit.ERROR, [])
    assert "No such file" in done.stderr
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(limits.IMAGE_BYTES + 1)
    done = run("chat", "--image", str(large), "What is it?", home=daemon.home)
    assert (done.returncode, daemon.chats) == (Exit.ERROR, [])
    assert "large.png holds more than 20 MiB" in done.stderr


def test_a_schema_that_the_daemon_refuses_is_named_by_its_file(
    run: Run, daemon: FakeDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "point.json"
    file.write_text('{"not": {}}')
    error = {
        "code": "unsupported_parameter",
        "message": "response_format: 'not' at $ cannot be enforced.",
        "param": "response_format",
    }
    daemon.chat(Reply({"error": error}, 400))
    done = run("chat", "--schema", str(file), "x", home=daemon.home)
    assert done.returncode == Exit.REFUSED
    assert f"{file}: response_format: 'not' at $" in done.stderr


def test_json(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(Reply(stream=[delta(reasoning_content="hmm"), delta(content="4"), *final()]))
    done = run("chat", "2+2", "--json", home=daemon.home)
    value = json.loads(done.stdout)
    assert done.stderr == ""
    assert (value["content"], value["reasoning"], value["finish_reason"]) == ("4", "hmm", "stop")
    assert (value["plan"], value["exactness"], value["request"]) == ("local; nodes=this", "exact", "req-1")
    assert value["usage"]["prompt_tokens"] == 412
    assert value["timings"]["predicted_n"] == 96


def test_reasoning_goes_to_stderr(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(
        Reply(
            stream=[
                delta(reasoning_content="let me "),
                delta(reasoning="think"),
                delta(content="42"),
                *final(),
            ]
        )
    )
    done = run("chat", "x", "--no-stats", home=daemon.home)
    assert (done.stdout, done.stderr) == ("42\n", "let me think\n\n")


def test_a_pipe_gets_the_answer_byte_for_byte(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("\x1b[31mred\r\n", "żółć 🦊"))
    assert run("chat", "x", home=daemon.home).stdout == "\x1b[31mred\r\nżółć 🦊\n"


def test_a_cut_off_answer_says_so(run: Run, daemon: FakeDaemon) -> None:
    daemon.chat(answer("and so", reason="length"))
    assert "cut off at the token limit · 412 prompt" in run("chat", "x", home=daemon.home).stderr


def test_an_early_refusal(run: Run, daemon: FakeDaemon) -> None:
    fields = {
        "message": "9,000 tokens do not fit 8,192.",
        "code": "context_length_exceeded",
        "hint": "Shorten it.",
    }
    daemon.chat(Reply({"error": fields}, 400))
    done = run("chat", "x", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
    assert done.stderr == "error: 9,000 tokens do not fit 8,192.\nShorten it.\n"


def test_too_long_a_prompt_is_told_in_figures_and_with_what_takes_it(run: Run, daemon: FakeDaemon) -> None:
    hint = "smollm2-135m takes 8,192. qwen3.5-2b, which is on this machine, takes 65,536."
    message = f"{too_long.sentence(46_921, 8192)} {hint}"
    error = {"message": message, "code": "context_length_exceeded", "hint": hint}
    daemon.chat(Reply({"error": error}, 400))
    assert run("chat", "x", home=daemon.home).stderr == (
        "error: 46,921 tokens; smollm2-135m takes 8,192.\n"
        "qwen3.5-2b, which is on this machine, takes 65,536.\n"
    )


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("engine_died", Exit.FAILED), ("context_length_exceeded", Exit.REFUSED), ("new_in_2030", Exit.FAILED)],
)
def test_an_error_in_the_middle(run: Run, daemon: FakeDaemon, code: str, exit_code: Exit) -> None:
    error = {"error": {"message": "The engine died.", "code": code, "hint": "Ask again."}}
    daemon.chat(Reply(stream=[delta(content="Once upon"), data(error)]))
    done = run("chat", "x", home=daemon.home)
    assert (done.returncode, done.stdout) == (exit_code, "Once upon\n")
    assert done.stderr == "error: The engine died.\nAsk again.\n"


@pytest.mark.parametrize("tail", [["drop"], [], ["data: [DONE]\n\n"], ["data: {broken\n\n"]])
def test_an_answer_that_just_ends(run: Run, daemon: FakeDaemon, tail: list[str]) -> None:
    daemon.chat(Reply(stream=[delta(content="Once"), *tail]))
    done = run("chat", "x", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.FAILED, "Once\n")
    assert "Traceback" not in done.stderr


def test_ctrl_c_stops_the_answer_and_the_daemon_hears_of_it(daemon: FakeDaemon, env: dict[str, str]) -> None:
    reply = Reply(stream=[delta(content="Once"), threading.Event()])
    daemon.chat(reply)
    command = [*FLEETCTL, "--home", str(daemon.home), "chat", "x"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == b"Once"
        interrupt(process)
        rest, err = process.stdout.read(), process.stderr.read()
    assert (process.returncode, rest) == (Exit.INTERRUPTED, b"\n")
    assert b"Traceback" not in err
    assert reply.gone.wait(60)


def test_ctrl_c_before_the_first_token(daemon: FakeDaemon, env: dict[str, str]) -> None:
    reply = Reply(stream=[": keepalive 1/9\n\n", threading.Event()])
    daemon.chat(reply)
    command = [*FLEETCTL, "--home", str(daemon.home), "chat", "x"]
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not daemon.chats:
            threading.Event().wait(0.01)
        interrupt(process)
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == Exit.INTERRUPTED, err
    assert b"Traceback" not in err
    assert reply.gone.wait(60)


def test_progress_of_loading_and_prefill_in_a_log(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    from fleetctl.chat.answer import _show
    from fleetctl.render.progress_line import Progress

    log = StringIO()
    with Progress(log, show_after_s=0) as progress:
        for comment in (
            "loading downloading 1000000/90000000",
            "loading warming up 0/0",
            "keepalive 512/4096",
            "keepalive 4096/4096",
            "something new",
        ):
            _show(progress, comment)
    assert log.getvalue().splitlines() == [
        "model: downloading  1.0 MB of 90.0 MB",
        "model: warming up",
        "reading the prompt  512 of 4,096 tokens",
    ]


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({}, ""),
        ({"model": "m\x1b"}, "m\\x1b"),
        ({"timings": {"prompt_n": 5, "cache_n": 0, "predicted_n": 1}}, "5 prompt tokens · 1 token"),
        ({"usage": {"prompt_tokens": 12_000, "completion_tokens": 0}}, "12,000 prompt tokens · 0 tokens"),
    ],
)
def test_the_closing_line_says_only_what_is_known(known: dict[str, Any], line: str) -> None:
    assert " · ".join(Answer(**known).closing_facts()) == line


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        ("local; nodes=this", ""),
        ("remote; nodes=studio", " · on studio"),
        ("remote; nodes=studio,air", " · on studio, helped by air"),
        ("remote; nodes=studio,this", " · on studio, helped by this"),
        ("mixed; nodes=this,my%2Cmac", " · on this, my,mac"),
        ("layers; nodes=studio,my%2Cmac,this", " · prefill shared with studio and my,mac"),
        ("tokens; nodes=studio,this", " · prefill shared with studio"),
        ("whole; nodes=studio,this", " · prefill by studio"),
        ("unknown; nodes=studio,this", " · prefill shared with studio"),
        ("", ""),
    ],
)
def test_the_last_line_says_which_machine_answered(plan: str, where: str) -> None:
    said = " · ".join(Answer(model="m", headers={"x-fleet-plan": plan} if plan else {}).closing_facts())
    assert said == f"m{where}"


@pytest.mark.parametrize(
    ("exactness", "said"), [("exact", ""), ("equivalent", " · equivalent"), ("lossy", " · lossy"), ("", "")]
)
def test_the_last_line_has_the_label_of_an_answer_that_is_not_exact(exactness: str, said: str) -> None:
    facts = Answer(model="m", headers={"x-fleet-exactness": exactness}).closing_facts()
    assert " · ".join(facts) == f"m{said}"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"exactness": "exact", "kv-bits": "8", "plan": "local; nodes=this"}, "KV 8 bits"),
        (
            {"exactness": "equivalent", "wire-bits": "8", "plan": "tokens; nodes=studio,this"},
            "prefill shared with studio · equivalent · wire 8 bits",
        ),
        (
            {"exactness": "equivalent", "plan": "group; nodes=this,studio"},
            "on this, studio · equivalent",
        ),
        (
            {"exactness": "equivalent", "plan": "remote; nodes=studio", "kv-bits": "4", "wire-bits": "8"},
            "on studio · equivalent · KV 4 bits · wire 8 bits",
        ),
        ({"exactness": "lossy", "plan": "local; nodes=this"}, "lossy"),
    ],
    ids=["kv bits", "wire bits", "ranks", "routed", "left out"],
)
def test_the_last_line_has_every_kind_of_label(headers: dict[str, str], said: str) -> None:
    facts = Answer(model="m", headers={f"x-fleet-{name}": value for name, value in headers.items()})
    assert " · ".join(facts.closing_facts()) == f"m · {said}"


def test_bits_that_were_late_are_in_the_last_line(run: Run, daemon: FakeDaemon) -> None:
    told = ("plan tokens; nodes=studio,this", "exactness equivalent", "wire bits 8", "kv bits 4", "kv bits 0")
    late = "".join(f": {each}\n\n" for each in told)
    daemon.chat(Reply(stream=[late, delta(content="ok"), *final()]))
    assert run("chat", "x", home=daemon.home).stderr.endswith(" · equivalent · wire 8 bits\n")
    found = json.loads(run("chat", "x", "--json", home=daemon.home).stdout)
    assert (found["wire_bits"], found["kv_bits"]) == (8, None)


def test_a_change_of_plan_is_told_with_its_reason(run: Run, daemon: FakeDaemon) -> None:
    moved = ": plan local; nodes=this: studio went away.\n\n"
    daemon.chat(Reply(stream=[": keepalive 0/412\n\n", moved, delta(content="ok"), *final()]))
    done = run("chat", "x", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert done.stderr.splitlines()[0] == "studio went away."


def test_a_plan_that_was_late_is_the_plan(run: Run, daemon: FakeDaemon) -> None:
    """Where a model loads first, the headers go out before anybody knows."""
    late = ": plan layers; nodes=studio,this\n\n"
    daemon.chat(Reply(stream=[late, delta(content="ok"), *final()]))
    done = run("chat", "x", home=daemon.home)
    assert done.stderr.endswith(" · smollm2-135m · prefill shared with studio\n")
    assert len(done.stderr.splitlines()) == 1
    assert (
        json.loads(run("chat", "x", "--json", home=daemon.home).stdout)["plan"] == "layers; nodes=studio,this"
    )


def test_exactness_that_was_late_is_in_the_json(run: Run, daemon: FakeDaemon) -> None:
    late = ": plan remote; nodes=studio\n\n: exactness equivalent\n\n"
    daemon.chat(Reply(stream=[late, delta(content="ok"), *final()]))
    done = run("chat", "x", "--json", home=daemon.home)
    assert json.loads(done.stdout)["exactness"] == "equivalent"
    assert done.stderr == ""
