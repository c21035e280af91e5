"""Two real daemons with the default model, of which one asks its helper for keys and values in 8 bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import set_speeds
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet, answer, body

from fleetd.plan.prefill import step_names

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL = "smollm2-135m"
NAMES = ("alpha", "beta")
LOAD_S = 60.0
# Of a link over which rows as they are computed take longer than their tokens.
SLOW, FAST = "2e7", "2e9"
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they"]


@pytest.fixture(scope="module")
def pair(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    models = {name: [live_models / SMOL] for name in NAMES}
    settings = {"alpha": {"FLEETD_FLEET_WIRE_BITS": "8", set_speeds.LINKS: SLOW}}
    with LiveFleet(short_dir / "wire", models, settings=settings, programs=programs) as fleet:
        ready(fleet, 8)
        yield fleet


def ready(fleet: LiveFleet, wire_bits: int) -> None:
    fleet.until_usable()
    for name, other in (NAMES, NAMES[::-1]):
        fleet.load(name, SMOL, seen_by=other)

    def shared() -> bool:
        way = planned(fleet["alpha"])
        return (way["nodes"], way["wire_bits"]) == (["beta", "this"], wire_bits)

    until(shared, LOAD_S)


def planned(daemon: LiveDaemon) -> Any:
    return daemon.control("POST", "/fleet/v1/plan", {"model": SMOL, "tokens": 800})["options"][0]


def prompt(seed: int, words: int = 700) -> str:
    draw = random.Random(seed)
    return f"{seed}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def ask(daemon: LiveDaemon, text: str, **fields: Any) -> tuple[dict[str, str], str]:
    """The headers that tell how it ran, and what was said."""
    status, headers, got = answer(daemon, body(SMOL, text, max_tokens=8, temperature=0, **fields))
    assert status == 200, got
    told = {name: headers.get(f"X-Fleet-{name}", "") for name in ("Exactness", "Wire-Bits", "Request")}
    return told, got["choices"][0]["message"]["content"]


def how(told: dict[str, str]) -> tuple[str, str]:
    """The label and the bits of an answer."""
    return told["Exactness"], told["Wire-Bits"]


def received(told: Any) -> int:
    """Bytes that came from helpers, by this machine's own account."""
    return sum(step.get("n_bytes", 0) for step in told["steps"] if step["name"] == step_names.WAITED)


def test_rows_come_in_8_bits_over_a_slow_link_and_the_answer_says_so(pair: LiveFleet) -> None:
    alpha, text = pair["alpha"], prompt(1)
    assert "rows sent in 8 bits" in alpha.fleetctl("plan", "--tokens", "800").stdout
    told, said = ask(alpha, text, placement=["this"])
    assert how(told) == ("equivalent", "8")
    seen = alpha.trace(told["Request"])
    assert (seen["outcome"], seen["exactness"], seen["wire_bits"]) == ("shared", "equivalent", 8), seen
    assert seen["chosen"]["wire_bits"] == 8
    assert "wire 8 bits" in alpha.fleetctl("trace", seen["id"]).stdout
    # The first tokens are those of this machine alone.
    assert alpha.control("POST", "/fleet/v1/cache/clear", {})
    alone, plain = ask(alpha, text, local_only=True)
    assert how(alone) == ("exact", "")
    assert said == plain
    # 64 numbers of 32 bits become 16 words, a scale and a bias: 18 of 64 words.
    cuts, kind = seen["chosen"]["cuts"], seen["chosen"]["kind"]
    layers, tokens = 30, seen["prompt_tokens"] - 1
    share = cuts[1] / layers if kind == "layers" else cuts[1] / tokens
    token_bytes = alpha.status()["engines"][0]["shape"]["sizes"]["token_bytes"]
    rows = share * tokens * token_bytes if kind != "whole" else tokens * token_bytes
    hidden = 4 * 576 * tokens if kind == "layers" else 0
    assert received(seen) == pytest.approx(rows * 18 / 64 + hidden, rel=0.02)


def test_the_last_line_of_a_chat_says_so(pair: LiveFleet) -> None:
    chat = pair["alpha"].fleetctl("chat", "--max-tokens", "4", stdin=prompt(5))
    assert "equivalent · wire 8 bits" in chat.stderr, chat.stderr


def test_a_request_that_has_to_be_exact_gets_rows_as_they_are(pair: LiveFleet) -> None:
    alpha, text = pair["alpha"], prompt(2)
    told, said = ask(alpha, text, placement=["this"], exactness="exact")
    assert how(told) == ("exact", "")
    assert alpha.trace(told["Request"])["wire_bits"] == 0
    assert alpha.control("POST", "/fleet/v1/cache/clear", {})
    assert ask(alpha, text, local_only=True)[1] == said


def test_what_was_rounded_is_not_the_beginning_of_an_exact_answer(pair: LiveFleet) -> None:
    alpha, text = pair["alpha"], prompt(3)
    assert ask(alpha, text, placement=["this"])[0]["Wire-Bits"] == "8"
    further = text + " " + prompt(4, 20)
    told, said = ask(alpha, further, local_only=True, exactness="exact")
    seen = alpha.trace(told["Request"])
    # What all prompts begin with may be there.
    assert told["Exactness"] == "exact"
    assert seen["cached_tokens"] < 50
    assert alpha.control("POST", "/fleet/v1/cache/clear", {})
    assert ask(alpha, further, local_only=True)[1] == said


def test_over_a_fast_link_nothing_is_rounded(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    alpha.restart(**{set_speeds.LINKS: FAST})
    ready(pair, 0)
    told, _ = ask(alpha, prompt(6), placement=["this"])
    assert how(told) == ("exact", "")
    seen = alpha.trace(told["Request"])
    assert (seen["outcome"], seen["wire_bits"], seen["chosen"]["wire_bits"]) == ("shared", 0, 0), seen
