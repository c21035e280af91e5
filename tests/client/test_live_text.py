"""Answers as they grow on a terminal: words wrapped, light Markdown, and nothing painted that stays wrong."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from small_screen import SmallScreen

from fleetctl.render.answer_markdown import AnswerMarkdown, complete_block
from fleetctl.render.live_text import LiveText, live_dim, live_markdown

TEXT = """# A title

The **well-being** of her `faithful` dog is what the girl in this story cares about most of all.
A line that is meant so, with snake_case_name, \\(x^2\\), 5 &lt; 6, <b>no tag</b> and ![a picture](http://x).

- one item that is rather long and goes on until it reaches the edge of the window
- two
  1. nested

```python
def f(x):

    return x
```

> quoted

| a | b |
|---|---|
| 1 | 2 |

The end.
"""
SHOWN = """A title

The well-being of her faithful dog is
what the girl in this story cares about
most of all.
A line that is meant so, with
snake_case_name, \\(x^2\\), 5 &lt; 6,
<b>no tag</b> and !a picture (http://x).

 • one item that is rather long and goes
   on until it reaches the edge of the
   window
 • two
    1 nested

  def f(x):

      return x

▌ quoted

 a  b
 ────
 1  2

The end.
"""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> SmallScreen:
    monkeypatch.setenv("COLUMNS", "41")
    monkeypatch.setenv("LINES", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return SmallScreen(41)


def test_words_are_wrapped_and_markdown_is_light(screen: SmallScreen) -> None:
    live = live_markdown(screen)
    live.feed(TEXT)
    live.end()
    assert screen.text == SHOWN


@pytest.mark.usefixtures("screen")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, len(TEXT)), max_size=60))
def test_the_screen_is_the_same_however_the_text_arrives(cuts: list[int]) -> None:
    screen = SmallScreen(41)
    live = live_markdown(screen)
    at = 0
    for cut in [*sorted(cuts), len(TEXT)]:
        live.feed(TEXT[at:cut])
        at = cut
    live.end()
    assert screen.text == SHOWN


@pytest.mark.parametrize("levels", [3, 12, 30, 3000])
@pytest.mark.parametrize("mark", [">", "> ", "- ", "1. ", "> - "])
def test_attack_nothing_that_stands_in_marks_in_marks_is_dropped(mark: str, levels: int) -> None:
    """A small model that repeats itself writes such answers, too."""
    out = io.StringIO()
    Console(file=out, width=80).print(AnswerMarkdown(f"{mark * levels}the end"))
    assert "the end" in out.getvalue()


def test_a_line_that_grows_is_not_painted_again(screen: SmallScreen) -> None:
    live = live_markdown(screen)
    live._monotonic = lambda: 0.0
    for letter in "word by word":
        live.feed(letter)
    assert "".join(screen.written) == "word by word"


def test_what_begins_as_stars_becomes_bold_where_it_stands(screen: SmallScreen) -> None:
    live = live_markdown(screen)
    live._monotonic = lambda: 0.0
    live.feed("so **bold")
    assert screen.text == "so **bold"
    live.feed("** and on")
    assert screen.text == "so bold and on"
    assert "\x1b[1mbold\x1b[0m" in screen.written[-1]


def test_thoughts_are_dim_and_keep_their_lines(screen: SmallScreen) -> None:
    live = live_dim(screen)
    for piece in ("First **this**.\n", "Then a sentence that is longer than the window", " is wide.\n"):
        live.feed(piece)
    live.end()
    assert screen.text == "First **this**.\nThen a sentence that is longer than the\nwindow is wide.\n"
    assert "\x1b[2m" in screen.written[0]


def test_control_characters_are_shown_and_not_obeyed(screen: SmallScreen) -> None:
    live = live_markdown(screen)
    live.feed("\x1b[2J red \x9b")
    live.end()
    assert screen.text == "\\x1b[2J red \\x9b\n"


def test_several_answers_on_one_painter_begin_at_their_own_lines(screen: SmallScreen) -> None:
    live = live_markdown(screen)
    for text in ("one", "two"):
        live.feed(text)
        live.end()
    live.end()
    assert screen.text == "one\ntwo\n"


def test_after_a_resize_the_open_block_is_painted_at_the_new_width(
    screen: SmallScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = live_markdown(screen)
    live.feed("A paragraph that is complete.\n\nThe girl cares about her dog")
    screen.columns = 21
    monkeypatch.setenv("COLUMNS", "21")
    # As a terminal does that wraps its rows anew.
    screen.rows[-1:] = ["", "The girl cares about ", "her dog"]
    del screen.rows[1]
    screen.row, screen.column = len(screen.rows) - 1, 7
    live.feed(" most of all.")
    live.end()
    assert screen.text == "A paragraph that is complete.\n\nThe girl cares about\nher dog most of all.\n"


@pytest.mark.parametrize("took_s", [0.01, 1000.0])
def test_painting_rests_in_proportion_to_what_it_took(screen: SmallScreen, took_s: float) -> None:
    now_s, rendered = [0.0], threading.Semaphore(0)

    def render(text: str) -> str:
        now_s[0] += took_s
        rendered.release()
        return text

    live = LiveText(screen, render, lambda text: (0, 0), lambda: now_s[0])
    live.feed("one")
    assert rendered.acquire(timeout=60)
    live.feed(" two")
    if took_s < 1:
        # Nothing more comes for now, and what came is painted all the same.
        assert rendered.acquire(timeout=60)
    else:
        assert screen.text == "one"
    live.end()
    assert screen.text == "one two\n"


def test_a_block_without_an_end_is_not_rendered_again_for_ever(screen: SmallScreen) -> None:
    rendered: list[int] = []

    def render(text: str) -> str:
        rendered.append(len(text))
        return text

    live = LiveText(screen, render, lambda text: (0, 0))
    for _ in range(50):
        live.feed("word " * 200)
    live.end()
    assert max(rendered) < 20_000
    assert screen.text.count("word") == 10_000


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", ""),
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("- a\n  - b\n\n- c", "- a\n  - b\n\n"),
        ("- a\n  - b", ""),
        ("```\na\n\nb", ""),
        ("```\na\n```\nb", "```\na\n```\n"),
        ("one\n\ntwo\n\nthree", "one\n\n"),
    ],
)
def test_blocks_are_complete_once_the_next_one_begins(text: str, complete: str) -> None:
    assert text[: complete_block(text)[0]] == complete
