"""When the progress line appears, what it says and that it goes away."""

from __future__ import annotations

import io
import threading
import time

import pytest
from terminals import FakeTerminal

from fleetctl.render.progress_line import Progress, bar, fitted_line


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_nothing_is_shown_for_what_is_quick() -> None:
    terminal = FakeTerminal()
    with Progress(terminal, show_after_s=60) as progress:
        progress.update("reading", 1, 2)
    assert terminal.getvalue() == ""


def test_shown_and_erased() -> None:
    terminal = FakeTerminal()
    with Progress(terminal, show_after_s=0) as progress:
        progress.update("reading the prompt", 1024, 4096, unit="tokens")
        assert terminal.painted.wait(60)
    shown = terminal.getvalue()
    assert "reading the prompt" in shown
    assert "1,024 of 4,096 tokens" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_stage_that_ends_by_itself_counts_down() -> None:
    terminal = FakeTerminal()
    with Progress(terminal, show_after_s=0) as progress:
        progress.update("waiting", left_s=299.9)
        assert terminal.painted.wait(60)
    assert "waiting  5 min 0 s left" in terminal.getvalue()
    late = io.StringIO()
    with Progress(late, show_after_s=0) as progress:
        progress.update("waiting", left_s=-1.0)
    assert late.getvalue() == "waiting  1 s left\n"


def test_ctrl_c_while_the_painter_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    terminal = FakeTerminal()
    with pytest.raises(KeyboardInterrupt), Progress(terminal, show_after_s=0) as progress:
        progress.update("reading", 1, 2)
    assert terminal.getvalue() == ""


def test_a_stage_name_cannot_escape() -> None:
    terminal = FakeTerminal()
    with Progress(terminal, show_after_s=0) as progress:
        progress.update("\x1b[2Jstage\nname")
        assert terminal.painted.wait(60)
    assert "\x1b[2J" not in terminal.getvalue()
    assert "stage name" in terminal.getvalue()


def test_a_log_gets_a_plain_line_per_stage() -> None:
    log = io.StringIO()
    with Progress(log, show_after_s=0) as progress:
        progress.update("downloading", 1_000_000, 90_000_000, unit="bytes")
        progress.update("downloading", 2_000_000, 90_000_000, unit="bytes")
        progress.update("loading", 3, 30)
    assert log.getvalue().splitlines() == ["downloading  1.0 MB of 90.0 MB", "loading  3 of 30"]


def test_a_log_gets_one_line_of_stages_that_take_turns_or_begin_anew() -> None:
    """Two answers of one request are read side by side; and after each remark the line begins anew."""
    log = io.StringIO()
    with Progress(log, show_after_s=0) as progress:
        for done in range(3):
            progress.update("loading a", done, 30)
            progress.update("loading b", done, 30)
        progress.clear()
        progress.update("loading b", 9, 30)
    assert log.getvalue().splitlines() == ["loading a  0 of 30", "loading b  0 of 30"]


def test_a_log_of_a_long_stage_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(threading.Thread, "join", lambda thread: None)
    log = io.StringIO()
    with Progress(log, show_after_s=0) as progress:
        for now[0] in range(600):
            progress.update("reading", int(now[0]), 600)
    read = [int(line.split()[1]) for line in log.getvalue().splitlines()]
    assert read == [0, 10, 30, 70, 150, 310]


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = FakeTerminal()
    with Progress(terminal, show_after_s=0) as progress:
        progress.update("loading", 3, 30)
    assert terminal.getvalue() == "loading  3 of 30\n"


@pytest.mark.parametrize(("share", "full"), [(0, 0), (0.5, 4), (1, 8), (-1, 0), (7, 8)])
def test_bar(share: float, full: int) -> None:
    assert bar(share, 8, utf8=True) == "━" * full + "─" * (8 - full)
    assert bar(share, 8, utf8=False) == "#" * full + "-" * (8 - full)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (120, f"reading the prompt  {'━' * 6}{'─' * 18}  1,024 of 4,096 tokens  100 tokens/s  31 s left"),
        (80, f"reading the prompt  {'━' * 2}{'─' * 6}  1,024 of 4,096 tokens  100 tokens/s  31 s left"),
        (70, f"reading the prompt  {'━' * 2}{'─' * 6}  1,024 of 4,096 tokens  31 s left"),
        (60, "reading the prompt  1,024 of 4,096 tokens  31 s left"),
        (48, "reading the …  1,024 of 4,096 tokens  31 s left"),
    ],
)
def test_a_line_fits_its_terminal_and_cuts_no_figure(columns: int, line: str) -> None:
    shown = fitted_line(
        ("reading the prompt", "1,024 of 4,096 tokens", "100 tokens/s", "31 s left", ""),
        0.25,
        columns - 1,
        utf8=True,
    )
    assert shown == line


def test_a_long_detail_is_cut_before_the_stage() -> None:
    detail = "(studio reading 1.2 GB of 8.0 GB, kitchen warming up, attic measuring)"
    shown = fitted_line(("loading m", "", "", "5 s", detail), None, 40, utf8=True)
    assert shown == "loading m  5 s  (studio reading 1.2 GB …"
