"""Words and figures for people."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.render.text import duration, one_line, rough, size, table
from fleetd.text.terminal_text import json_text, printable


@pytest.mark.parametrize("category", ["Cc", "Cf", "Zl", "Zp"])
def test_escape_injection_no_unsafe_character_reaches_the_terminal(category: str) -> None:
    """Controls, and what turns the writing direction, breaks lines or shows nothing."""
    all_of_it = "".join(
        chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == category
    )
    for shown in (printable(all_of_it), json_text({all_of_it: all_of_it}), one_line(all_of_it)):
        assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) == category]
    assert json.loads(json_text({all_of_it: [all_of_it]}, indent=2)) == {all_of_it: [all_of_it]}


@given(st.text())
def test_escapes_read_back_and_other_text_stays(text: str) -> None:
    assert json.loads(json_text(text)) == text
    if all(c.isprintable() for c in text):
        assert printable(text) == text


def test_escape_injection_window_title_and_clipboard() -> None:
    assert printable("a\x1b]0;title\x07b") == "a\\x1b]0;title\\x07b"
    assert printable("\x9b31m") == "\\x9b31m"
    assert printable("safe\u202etxt.exe\u2066\u200b\ufeff") == "safe\\u202etxt.exe\\u2066\\u200b\\ufeff"
    assert printable("\U000e0041\xad") == "\\U000e0041\\xad"
    assert json_text("\x9b\u202e\U000e0041é") == '"\\u009b\\u202e\\udb40\\udc41é"'
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
