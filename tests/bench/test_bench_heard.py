"""What is read off a stream's clock."""

from __future__ import annotations

import pytest

from bench.harness.client import Frame, Heard


def test_the_rate_runs_from_the_first_token_to_the_last() -> None:
    heard = Heard(0.0, 0.01, "abc", text_s=[2.0, 2.5, 4.0], usage={"completion_tokens": 5})
    assert heard.rate == 2.0  # four steps in two seconds, although two tokens came in one piece


def test_one_long_pause_does_not_change_the_steady_rate() -> None:
    assert Heard(0.0, 0.01, text_s=[1.0, 1.5, 2.0, 5.0, 5.5]).steady_rate == 2.0


@pytest.mark.parametrize(
    ("headers_s", "byte_s", "gap_s"),
    [(0.5, [1.0, 1.25], 0.5), (0.25, [0.5, 4.5, 5.0], 4.0), (3.0, [3.0], 3.0)],
)
def test_the_longest_silence_counts_the_wait_for_headers(
    headers_s: float, byte_s: list[float], gap_s: float
) -> None:
    assert Heard(0.0, headers_s, byte_s=byte_s).gap_s == gap_s


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"delta": {"content": "b"}}]}, "b"),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, ""),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, ""),
        ({"choices": [], "usage": {}}, ""),
        (None, ""),
    ],
)
def test_only_text_counts_as_a_token(data: dict[str, object] | None, text: str) -> None:
    assert Frame(0.0, "", data).text == text
