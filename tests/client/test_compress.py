"""`fleetctl compress` and `fleetctl chat --smart-prefill`: what is asked for, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from fake_daemon import FakeDaemon, Reply, Run, answer, data, delta, final
from hypothesis import given
from hypothesis import strategies as st
from shares import PLAN

from fleetctl.chat import smart_prefill
from fleetctl.connection.replies import read
from fleetctl.exits import Exit
from fleetctl.render import kept_text as view
from fleetd.control.compression_reply import Compression, CompressUsage, KeptSpan

TEXT = "First line.\nSecond line.\nThird line.\n"
REPLY: dict[str, Any] = {
    "id": "compress-1",
    "object": "compression",
    "created": 1,
    "model": "smollm2-135m",
    "prompt": "First line.\n[... 4 tokens omitted ...]\nThird line.\n",
    "kept": [{"index": 0, "spans": [[0, 12], [25, 37]]}],
    "declined": "",
    "scored": "by question",
    "nodes": ["studio"],
    "usage": {"original_tokens": 1200, "compressed_tokens": 300, "total_tokens": 1300},
    "timings": {"score_ms": 1234.0, "select_ms": 2.0},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT)
    return path


def test_the_example_is_what_a_daemon_would_send() -> None:
    assert msgspec.to_builtins(msgspec.convert(REPLY, Compression)).keys() == REPLY.keys()


def test_a_pipe_gets_the_compressed_text_and_nothing_else(daemon: FakeDaemon, run: Run, file: Path) -> None:
    daemon.on("POST", "/v1/compress", Reply(REPLY))
    done = run("compress", str(file), "--ratio", "0.25", "-q", "Which?", home=daemon.home)
    assert done.returncode == Exit.OK
    assert done.stdout == REPLY["prompt"]
    assert "1,200 tokens to 300 (25 %) · scored by smollm2-135m on studio in 1.23 s" in done.stderr
    assert daemon.seen[-1].body == {"prompt": TEXT, "question": "Which?", "target_ratio": 0.25}


def test_every_option_reaches_the_daemon(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("POST", "/v1/compress", Reply(REPLY))
    options = ["-m", "qwen3-0.6b", "--min-keep", "10", "--max-keep", "90", "--break-lines", "--local-only"]
    assert run("compress", "-", *options, home=daemon.home, stdin=TEXT).returncode == Exit.OK
    assert daemon.seen[-1].body == {
        "prompt": TEXT,
        "compressor_model": "qwen3-0.6b",
        "min_keep_tokens": 10,
        "max_keep_tokens": 90,
        "preserve_boundaries": False,
        "local_only": True,
    }


def test_json_is_what_the_daemon_said(daemon: FakeDaemon, run: Run, file: Path) -> None:
    daemon.on("POST", "/v1/compress", Reply(REPLY))
    assert json.loads(run("compress", str(file), "--json", home=daemon.home).stdout) == REPLY


def test_an_empty_text_is_not_sent(daemon: FakeDaemon, run: Run) -> None:
    assert run("compress", "-", home=daemon.home, stdin=" \n").returncode == Exit.USAGE
    assert not daemon.seen


def test_no_compressor_is_said_with_what_to_do(daemon: FakeDaemon, run: Run, file: Path) -> None:
    error = {"message": "No machine has one.", "code": "no_machine", "hint": "Get one."}
    daemon.on("POST", "/v1/compress", Reply({"error": error}, 503))
    done = run("compress", str(file), home=daemon.home)
    assert done.returncode == Exit.PEER
    assert "Get one." in done.stderr


# ---- The page --------------------------------------------------------------------------------------------


def test_what_is_dropped_is_struck_through() -> None:
    shown = view.page(TEXT, read(REPLY, Compression))
    assert click.unstyle(shown) == TEXT
    assert shown.startswith("First line.\n")
    assert click.style("Second line.", dim=True, strikethrough=True) in shown
    assert shown.endswith("Third line.\n")


def test_a_text_cannot_take_over_the_terminal() -> None:
    assert "\x1b]" not in view.page("\x1b]0;title\x07 hi", Compression(kept=[KeptSpan(0, [(0, 5)])]))


def test_nothing_left_out_is_said_with_the_reason() -> None:
    found = Compression(declined="it asks for a summary", usage=CompressUsage(900, 900, 950))
    assert view.summary(found) == "nothing was left out of 900 tokens: it asks for a summary"


def test_a_text_that_seems_to_ask_and_stays_whole_names_the_way_out(
    daemon: FakeDaemon, run: Run, file: Path
) -> None:
    usage = {"original_tokens": 16, "compressed_tokens": 16, "total_tokens": 16}
    declined = {**REPLY, "declined": "the task is about the whole text (summarise)", "usage": usage}
    daemon.on("POST", "/v1/compress", Reply(declined))
    done = run("compress", str(file), home=daemon.home)
    assert "(summarise) (--without-question chooses by the text alone)" in done.stderr
    asked = run("compress", str(file), "-q", "Sum it up.", home=daemon.home)
    assert "nothing was left out of 16 tokens: the task is about the whole text" in asked.stderr
    assert "--without-question" not in asked.stderr
    scored = {**REPLY, "scored": "without question"}
    daemon.on("POST", "/v1/compress", Reply(scored))
    done = run("compress", str(file), "--without-question", home=daemon.home)
    assert daemon.seen[-1].body["without_question"] is True
    assert "scored without a question by" in done.stderr


@given(st.text(max_size=60), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=6))
def test_pieces_are_the_text_whatever_the_spans(text: str, spans: list[tuple[int, int]]) -> None:
    assert "".join(piece for _, piece in view.pieces(text, spans)) == text


# ---- In a conversation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "asked"),
    [(["--smart-prefill"], True), (["--keep-ratio", "0.3"], {"target_ratio": 0.3}), ([], None)],
)
def test_chat_asks_for_it(daemon: FakeDaemon, run: Run, option: list[str], asked: Any) -> None:
    daemon.chat(answer("Yes."))
    assert run("chat", *option, "hi", home=daemon.home).returncode == Exit.OK
    assert daemon.chats[-1].get("smart_prefill") == asked


def test_chat_says_how_much_was_read(daemon: FakeDaemon, run: Run) -> None:
    report = {"mode": "text", "compressor": "smollm2-135m", "compressed_tokens": 80, "original_tokens": 412}
    pieces = final()
    pieces.insert(1, data({"choices": [], "smart_prefill": report}))
    daemon.chat(Reply(stream=[delta(content="Yes."), *pieces]))
    done = run("chat", "--smart-prefill", "hi", home=daemon.home)
    assert "80 of them read, chosen by smollm2-135m" in done.stderr


DECLINED = "declined: the task is about the whole text (summarise)"
SHORT = "short: The prompt has about 40 tokens; smart prefill begins at 2000."
SAID = {
    DECLINED: "smart prefill: not used, because the task is about the whole text (summarise)",
    SHORT: "smart prefill: not used, because the prompt has about 40 tokens; smart prefill begins at 2000",
    "slower: Scoring takes 3.1 s.": "smart prefill: not used, because scoring takes 3.1 s",
    "no_form: qwen3-4b cannot.": "smart prefill: not used, because qwen3-4b cannot",
}


@pytest.mark.parametrize("skipped", list(SAID))
@pytest.mark.parametrize("told", ["header", "comment", "last chunk", "all of them"])
def test_chat_says_once_why_all_of_it_is_read(daemon: FakeDaemon, run: Run, skipped: str, told: str) -> None:
    comment = [f": smart prefill skipped: {skipped}\n\n"] if told in ("comment", "all of them") else []
    report = {"mode": "full", "skipped": skipped}
    last = [data({"choices": [], "smart_prefill": report})] if told in ("last chunk", "all of them") else []
    headers = {"X-SmartPrefill-Skipped": skipped} if told in ("header", "all of them") else {}
    stream = [*comment, delta(content="Yes."), *last, *final()]
    daemon.chat(Reply(stream=stream, headers=headers))
    done = run("chat", "--smart-prefill", "hi", home=daemon.home)
    assert [line for line in done.stderr.splitlines() if "smart prefill" in line] == [SAID[skipped]]
    assert done.stdout == "Yes.\n"


def test_a_reason_in_a_header_may_be_percent_encoded() -> None:
    assert smart_prefill.told_by_headers({"x-smartprefill-skipped": "failed: caf%C3%A9 100%25 busy"}) == (
        "failed: café 100% busy"
    )


@pytest.mark.parametrize(("option", "asked"), [(["--smart"], 0), (["--ratio", "0.3"], 0.3), ([], None)])
def test_plan_asks_for_it(daemon: FakeDaemon, run: Run, option: list[str], asked: Any) -> None:
    smart = {"kind": "smart", "nodes": ["mini", "this"], "predicted_s": 2.0, "chosen": True}
    daemon.on("POST", "/fleet/v1/plan", Reply({**PLAN, "options": [smart, *PLAN["options"]]}))
    done = run("plan", "--tokens", "9000", *option, home=daemon.home)
    assert done.returncode == Exit.OK, done.stderr
    assert daemon.seen[-1].body.get("smart") == asked
    assert "smart   mini + this" in done.stdout
