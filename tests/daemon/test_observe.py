"""The log: JSON for machines, short lines, and no local variables in tracebacks."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
import structlog
from terminals import FakeTerminal

from fleetd.process import observe


def test_json_lines_carry_event_level_and_context() -> None:
    out = io.StringIO()
    observe.configure("info", "auto", stream=out, environ={})
    with structlog.contextvars.bound_contextvars(request="r1"):
        observe.get_logger("fleetd.x").info("model.loaded", tokens=5)
    line = json.loads(out.getvalue())
    assert line["event"] == "model.loaded"
    assert (line["level"], line["logger"], line["request"], line["tokens"]) == ("info", "fleetd.x", "r1", 5)


def test_libraries_log_in_the_same_format() -> None:
    out = io.StringIO()
    observe.configure("warning", "json", stream=out, environ={})
    logging.getLogger("some.library").warning("odd %s", "thing")
    logging.getLogger("some.library").info("dropped")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["odd thing"]


@pytest.mark.parametrize(
    ("environ", "json_expected"),
    [({}, False), ({"INVOCATION_ID": "x"}, True), ({"JOURNAL_STREAM": "8:1"}, True)],
)
def test_a_terminal_gets_text_unless_a_service_manager_reads(
    environ: dict[str, str], json_expected: bool
) -> None:
    out = FakeTerminal()
    observe.configure("info", "auto", stream=out, environ=environ)
    observe.get_logger("x").info("hello")
    assert out.getvalue().startswith("{") is json_expected
    assert "hello" in out.getvalue()


def test_a_line_on_a_terminal_begins_with_the_time_of_day_and_has_no_padding() -> None:
    out = io.StringIO()
    observe.configure("info", "console", stream=out, environ={})
    observe.get_logger("fleetd.engine.x").info("peer.gone", peer="mini")
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info\] peer\.gone peer=mini\n", out.getvalue())


def test_long_values_are_cut() -> None:
    out = io.StringIO()
    observe.configure("info", "json", stream=out, environ={})
    observe.get_logger("x").info("e", **{f"k{number}": "y" * 10_000 for number in range(20)})
    assert len(out.getvalue()) < 2 * observe.LINE_CHARS
    assert "10000 characters" in out.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_escape_injection_by_a_name_in_the_log(log_format: observe.LogFormat) -> None:
    out = io.StringIO()
    observe.configure("info", log_format, stream=out, environ={})
    observe.get_logger("x").info("hello\x9b2J", id="\x1b[2J\u202e", why="a b\u2066")
    assert not set(out.getvalue()) & set("\x1b\x9b\u202e\u2066")
    assert "u202e" in out.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(log_format: observe.LogFormat) -> None:
    out = io.StringIO()
    observe.configure("info", log_format, stream=out, environ={})
    prompt = "canary" + "-in-a-local"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        observe.get_logger("x").exception("request.bug")
    assert "ValueError" in out.getvalue()
    assert prompt not in out.getvalue()
