"""Two real daemons, one of which holds the default model's keys and values in 8 bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet, answer, body

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL = "smollm2-135m"
NAMES = ("alpha", "beta")
LOAD_S = 60.0
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they"]


@pytest.fixture(scope="module")
def pair(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    models = {name: [live_models / SMOL] for name in NAMES}
    settings = {"alpha": {"FLEETD_MODELS_KV_BITS": f"{SMOL}=8"}}
    with LiveFleet(short_dir / "quantised", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        for name, other in (NAMES, NAMES[::-1]):
            fleet.load(name, SMOL, seen_by=other)
        yield fleet


def prompt(seed: int, words: int = 250) -> str:
    draw = random.Random(seed)
    return f"{seed}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def ask(daemon: LiveDaemon, text: str, **fields: Any) -> tuple[dict[str, str], Any]:
    """The headers that tell how it ran, and what was said."""
    status, headers, got = answer(daemon, body(SMOL, text, max_tokens=8, logprobs=True, **fields))
    assert status == 200, got
    told = {name: headers.get(f"X-Fleet-{name}", "") for name in ("Plan", "Exactness", "KV-Bits", "Request")}
    return told, (got["choices"][0]["message"], got["choices"][0]["logprobs"])


def how(told: dict[str, str]) -> tuple[str, str, str]:
    """The plan, the label and the bits of an answer."""
    return told["Plan"], told["Exactness"], told["KV-Bits"]


def engine(daemon: LiveDaemon) -> dict[str, Any]:
    (found,) = daemon.status()["engines"]
    return found  # type: ignore[no-any-return]


def restored(daemon: LiveDaemon, told: dict[str, str]) -> int:
    """Tokens of a prompt that came from the disk."""
    return int(daemon.trace(told["Request"]).get("restored_tokens", 0))


def test_an_answer_says_in_how_many_bits_rows_were_held(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    mine, theirs = engine(alpha)["shape"], engine(beta)["shape"]
    assert (mine["kv_bits"], mine["kv_held"]) == (8, "8 bits")
    assert theirs.get("kv_bits", 0) == 0
    # 64 numbers of 32 bits: 16 words of packed numbers, a scale and a bias.
    assert mine["sizes"]["token_bytes"] * 64 == theirs["sizes"]["token_bytes"] * 18
    local = {"local_only": True}
    told, said = ask(alpha, prompt(1), **local)
    assert how(told) == ("local; nodes=this", "exact", "8")
    told, other = ask(beta, prompt(1), **local)
    assert how(told) == ("local; nodes=this", "exact", "")
    assert said != other
    chat = alpha.fleetctl("chat", "--local-only", "--max-tokens", "4", "Name a river.")
    assert "KV 8 bits" in chat.stderr, chat.stderr
    # Another machine's answer is labelled as that machine holds rows.
    told, there = ask(beta, prompt(1), placement=["alpha"])
    assert (told["Exactness"], told["KV-Bits"], there) == ("equivalent", "8", said)


def test_a_helper_without_the_setting_gives_the_answer_of_this_machine(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    text = prompt(2, 400)

    def planned() -> Any:
        return alpha.control("POST", "/fleet/v1/plan", {"model": SMOL, "tokens": 800})["options"][0]["nodes"]

    until(lambda: planned() == ["beta", "this"], LOAD_S)
    told, said = ask(alpha, text, placement=["this"])
    assert (told["Exactness"], told["KV-Bits"]) == ("exact", "8")
    trace = alpha.trace(told["Request"])
    assert (trace["kv_bits"], trace["outcome"]) == (8, "shared"), trace
    assert alpha.control("POST", "/fleet/v1/cache/clear", {})
    assert ask(alpha, text, local_only=True)[1] == said


def test_rows_on_the_disk_are_those_of_their_bits_alone(pair: LiveFleet) -> None:
    alpha, text = pair["alpha"], prompt(3)
    _, said = ask(alpha, text, local_only=True)
    until(lambda: engine(alpha)["disk_queued_bytes"] == 0)
    alpha.restart()
    told, again = ask(alpha, text, local_only=True)
    assert again == said
    assert restored(alpha, told) > 0
    alpha.restart(FLEETD_MODELS_KV_BITS=f"{SMOL}=4")
    told, fewer = ask(alpha, text, local_only=True)
    assert told["KV-Bits"] == "4"
    assert fewer != said
    assert restored(alpha, told) == 0
    alpha.restart(FLEETD_MODELS_KV_BITS=f"{SMOL}=8")
    assert ask(alpha, text, local_only=True)[1] == said
