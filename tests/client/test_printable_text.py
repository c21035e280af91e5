"""Words and figures for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.render.text import duration, one_line, printable, rough, size, table


@given(st.text())
def test_escape_injection_no_control_character_reaches_the_terminal(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_escape_injection_window_title_and_clipboard() -> None:
    assert printable("a\x1b]0;title\x07b") == "a\\x1b]0;title\\x07b"
    assert printable("\x9b31m") == "\\x9b31m"
    assert printable("kept\n\tas\r\n it is żółć 🦊") == "kept\n\tas\n it is żółć 🦊"
    assert one_line("a\nb\tc") == "a b c"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99949, "99.9 kB"),
        (99950, "100 kB"),
        (999499, "999 kB"),
        (999500, "1.0 MB"),
        (538000000.0, "538 MB"),
        (5100000000000000.0, "5100 TB"),
        (None, "-"),
    ],
)
def test_size(value: float | None, shown: str) -> None:
    assert size(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.84, "0.84 s"),
        (9.99, "9.99 s"),
        (9.996, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3599.6, "1 h 0 min"),
        (7325, "2 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_rough_estimates_never_promise_no_time() -> None:
    assert (rough(0.01), rough(4.4), rough(61)) == ("1 s", "4 s", "1 min 1 s")


def test_table_aligns_and_keeps_rows_on_one_line() -> None:
    shown = table(("NAME", "N"), [("a\nb", "1"), ("c", "100")], right=(1,))
    assert shown == "NAME    N\na b     1\nc     100"
