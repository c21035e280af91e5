"""A daemon without room for a model loads some of its layers, and shares another one's prompts with them."""

from __future__ import annotations

import itertools
import random
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet, answer, body
from sharing import write

from fleetd.models.memory_need import WORKING_BYTES

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.timeout(600)]

NAME = "random"
LAYERS = 8
LOAD_S = 60.0
# Characters, and so many tokens.
LENGTH = 3000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Some 120 MiB, nearly all of it in the layers; it takes seconds to prefill what the tests ask."""
    return write(
        tmp_path / NAME,
        num_hidden_layers=LAYERS,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


def prompt(seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=LENGTH))


def ask(daemon: LiveDaemon, text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The plan, and the body."""
    status, headers, got = answer(daemon, body(NAME, text, max_tokens=8, logprobs=True, **fields))
    assert status == 200, got
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return headers["X-Fleet-Plan"], got


def part(fleet: LiveFleet) -> tuple[int, int]:
    """The layers that beta says it has, as alpha sees it; none while it tries whether it has room for all."""
    (seen,) = [found for found in fleet.peers("alpha")["beta"]["models"] if found["name"] == NAME]
    return (seen["part_first"], seen["part_last"]) if seen["state"] == "installed" else (0, 0)


def trace_of(daemon: LiveDaemon, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def written() -> bool:
        traces = daemon.control("GET", "/fleet/v1/traces")["traces"]
        found.extend(trace for trace in traces if trace["id"].startswith(request_id))
        return bool(found)

    until(written)
    return found[0]


def asked_until_shared(fleet: LiveFleet) -> tuple[str, str, dict[str, Any]]:
    """A prompt whose plan is not to stay at home, that plan, and the body.

    Beside other programs beta's layers may be measured as so slow that their help does not pay. Then they are
    loaded and measured again: what a load found out is thrown away.
    """
    for seed in itertools.count(1):
        text = prompt(seed)
        plan, got = ask(fleet["alpha"], text)
        if plan != "local; nodes=this":
            return text, plan, got
        fleet["beta"].control("POST", "/fleet/v1/models/unload", {"model": NAME})
        until(lambda: not part(fleet)[1], LOAD_S)
        shutil.rmtree(fleet["beta"].home / "cache" / "loads", ignore_errors=True)
        # It helps the next time: this prompt finds it without its layers.
        ask(fleet["alpha"], prompt(1000 + seed))
        until(lambda: part(fleet)[1], LOAD_S)
    raise AssertionError("unreachable")


def test_a_machine_that_has_room_for_half_of_a_model_shares_its_prompts(model: Path, make_fleet: Any) -> None:
    weights = (model / "model.safetensors").stat().st_size
    most = WORKING_BYTES + weights * 3 // 4
    settings = {
        # Nothing is known already, and each has a processor of its own.
        "alpha": {"FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1", "FLEETD_ENGINE_THREADS": "1"},
        "beta": {"FLEETD_ENGINE_MAX_MEMORY_BYTES": str(most), "FLEETD_ENGINE_THREADS": "1"},
    }
    fleet = make_fleet({"alpha": [model], "beta": [model]}, settings=settings)
    fleet.until_usable()
    fleet.load("alpha", NAME, seen_by="beta")
    fleet.until_has("alpha", "beta", NAME)

    plan, _ = ask(fleet["alpha"], prompt(0))
    assert plan == "local; nodes=this"
    until(lambda: part(fleet)[1], LOAD_S)
    first, last = part(fleet)
    assert first == 0
    assert 2 <= last <= 6
    (engine,) = fleet["beta"].status()["engines"]
    assert (engine["part_of"], engine["first_layer"], engine["last_layer"]) == (NAME, first, last)
    assert engine["shape"]["weights_bytes"] == pytest.approx(weights * last / LAYERS, rel=0.05)
    assert engine["speed"]["prefill_tok_s"] > 0

    text, plan, shared = asked_until_shared(fleet)
    assert plan == "layers; nodes=beta,this"
    first, last = part(fleet)
    plan, alone = ask(fleet["alpha"], text, local_only=True)
    assert plan == "local; nodes=this"
    assert shared["choices"] == alone["choices"]
    trace = trace_of(fleet["alpha"], shared["id"])
    assert (trace["outcome"], trace["exactness"]) == ("shared", "exact"), trace
    assert trace["chosen"]["cuts"][1] <= last
    # Still nothing but its part is there, to help again.
    assert [e["part_of"] for e in fleet["beta"].status()["engines"]] == [NAME]
    assert f"layers 0-{last - 1}" in fleet["beta"].fleetctl("status").stdout
    assert f"{NAME} (layers 0-{last - 1})" in fleet["alpha"].fleetctl("peers").stdout
