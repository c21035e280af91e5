"""A prompt that one machine has read is not read again by another: its keys and values are fetched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrid
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet, answer, body

# The engine's and the daemon's sides are tested quickly elsewhere; these start and end daemons several times.
pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.long, pytest.mark.timeout(1200)]

SMOL, HYBRID = "smollm2-135m", tiny_hybrid.NAME
NAMES = ("alpha", "beta")
WRITTEN_S = 120.0
# Thousands of tokens, on a machine that does other things as well.
ANSWERED_S = 400.0
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they"]


@pytest.fixture(scope="module")
def pair(
    live_models: Path, short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """Two machines that have the same models, of which neither has loaded one."""
    hybrid = tiny_hybrid.build(tmp_path_factory.mktemp("models") / HYBRID)
    models = {name: [live_models / SMOL, hybrid] for name in NAMES}
    with LiveFleet(short_dir / "fetching", models, programs=programs) as fleet:
        fleet.until_usable()
        yield fleet


def prompt(seed: int, words: int) -> str:
    """Begins with what no other one begins with."""
    draw = random.Random(seed)
    return f"{seed}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def ask(
    daemon: LiveDaemon, text: str, model: str = SMOL, max_tokens: int = 8, **fields: Any
) -> dict[str, Any]:
    request = body(model, text, max_tokens=max_tokens, logprobs=True, **fields)
    status, _, got = answer(daemon, request, ANSWERED_S)
    assert status == 200, got
    return got


def essence(got: dict[str, Any]) -> Any:
    return got["choices"][0]["message"], got["choices"][0]["logprobs"]


def read_by_alpha(fleet: LiveFleet, text: str, model: str = SMOL, **fields: Any) -> dict[str, Any]:
    """Its answer, while it is alone; then its engine ends, so that only beta can answer, and alone."""
    fleet["beta"].stop()
    fleet["alpha"].control("POST", "/fleet/v1/models/load", {"model": model})
    before = kept_tokens(fleet["alpha"])
    got = ask(fleet["alpha"], text, model, **fields)
    whole_blocks = (got["usage"]["prompt_tokens"] - 1) // 256 * 256
    until(lambda: kept_tokens(fleet["alpha"]) >= before + whole_blocks, WRITTEN_S)
    fleet["alpha"].control("POST", "/fleet/v1/models/unload", {"model": model})
    fleet.start("beta")
    fleet.until_usable()
    fleet.load("beta", model, seen_by="alpha")
    return got


def kept_tokens(daemon: LiveDaemon) -> int:
    models = daemon.control("GET", "/fleet/v1/cache")["models"]
    return sum(model["block_tokens"] for model in models)


@pytest.mark.parametrize("model", [SMOL, HYBRID])
def test_what_another_machine_has_read_is_fetched(pair: LiveFleet, model: str) -> None:
    text = prompt(1, 620)
    first = read_by_alpha(pair, text, model)
    # What lies on alpha's disk is known before, by the text.
    planned = pair["beta"].control("POST", "/fleet/v1/plan", {"model": model, "text": text})["options"]
    assert any(option["restored_tokens"] or option["fetched_from"] == "alpha" for option in planned), planned
    second = ask(pair["beta"], text, model)
    assert second["timings"]["fetched_n"] >= 512
    assert second["timings"]["fetched_from"] == "alpha"
    assert essence(first) == essence(second)


def test_what_may_not_leave_a_machine_is_not_found_there(pair: LiveFleet) -> None:
    text = prompt(2, 620)
    read_by_alpha(pair, text, local_only=True)
    second = ask(pair["beta"], text)
    assert "fetched_n" not in second["timings"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_4000_tokens_of_the_default_model_restored_or_fetched_give_the_bytes_that_computing_gives(
    pair: LiveFleet,
) -> None:
    text = prompt(3, 3950)
    asked: dict[str, Any] = {"max_tokens": 64, "top_logprobs": 5}
    computed = read_by_alpha(pair, text, **asked)
    assert 3900 < computed["usage"]["prompt_tokens"] <= 4032
    assert computed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    fetched = ask(pair["beta"], text, **asked)
    assert fetched["timings"]["fetched_n"] > 3584
    # Every logprob is told in full: 64 tokens whose six best have the same are the same to the last bit.
    assert essence(fetched) == essence(computed)
    pair["beta"].stop()
    pair["alpha"].stop()
    pair.start("alpha")
    pair["alpha"].control("POST", "/fleet/v1/models/load", {"model": SMOL})
    restored = ask(pair["alpha"], text, **asked)
    assert restored["timings"]["restored_n"] > 3584
    assert essence(restored) == essence(computed)
    pair.start("beta")
    pair.until_usable()


def cached(got: dict[str, Any]) -> int:
    found: int = got["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


# The last one: the two are strangers after it.
def test_what_an_unpaired_machine_sent_is_gone_from_memory_and_disk_also_after_a_restart(
    pair: LiveFleet,
) -> None:
    text, own = prompt(4, 620), prompt(5, 620)
    first = read_by_alpha(pair, text)
    assert ask(pair["beta"], text)["timings"]["fetched_n"] >= 512
    # Here for sure.
    ask(pair["beta"], own, local_only=True)
    assert cached(ask(pair["beta"], text)) > 512
    pair["beta"].control("POST", "/fleet/v1/unpair", {"peer": "alpha"})
    gone = ask(pair["beta"], text)
    assert (cached(gone), gone["timings"].get("restored_n", 0)) == (0, 0)
    assert essence(gone) == essence(first)
    assert cached(ask(pair["beta"], own, local_only=True)) > 512, "its own stays"
    pair["beta"].stop()
    pair.start("beta")
    pair["beta"].control("POST", "/fleet/v1/models/load", {"model": SMOL})
    assert essence(ask(pair["beta"], text)) == essence(first)
