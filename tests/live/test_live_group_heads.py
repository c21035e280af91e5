"""A model over two real daemons with an MTP head or a block drafter: one drafts, and no byte changes."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import block_drafters
import chain_model
import mlx.core as mx
import pytest
from forked_programs import Programs
from hidden_drafters import nemotron_chain, right_head, write_head
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet
from mlx_lm.utils import load_model

from fleetd.engine.heads.mtp_head import MtpHead

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

RIGHT, RANDOM = "right", "random"
# A hybrid, whose head of two layers lies among its own weights.
HYBRID = "hybrid"
# A model over both machines, and what drafts for it from states of layers on both.
TAPPED, BLOCKS, LAYERS = "tapped", "blocks", [1, 2]
# What drafts bring depends on what else a machine does; whether they are right does not.
SETTINGS = {"FLEETD_ENGINE_THREADS": "1", "FLEETD_SPECULATION_MODE": "on"}
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def pair(
    short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """Both have models whose head is right by construction, and one whose head is random."""
    root = tmp_path_factory.mktemp("heads")
    folders = []
    for name, head_of in ((RIGHT, right_head), (RANDOM, MtpHead)):
        folder = chain_model.build(root / name)
        model, _ = load_model(folder)
        # By chance a random head may be right so often that it stays on: this one is not.
        mx.random.seed(1)
        folders.append(write_head(folder, head_of(model)))
    folders.append(nemotron_chain(root / HYBRID))
    models = dict.fromkeys(("alpha", "beta"), folders)
    settings = dict.fromkeys(models, SETTINGS)
    with LiveFleet(short_dir / "group-heads", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        for name in (RIGHT, RANDOM, HYBRID):
            fleet.until_has("alpha", "beta", name)
            # Until a machine has hashed its own files, it does not know whether others have the same.
            assert fleet["alpha"].fleetctl("models", "verify", name).returncode == 0
            fleet.until_has("beta", "alpha", name)
        yield fleet


@pytest.fixture(scope="module")
def tapped(
    short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """Both have a model of four layers; one has a block drafter for it that is right by construction."""
    root = tmp_path_factory.mktemp("blocks")
    folder = chain_model.build(root / TAPPED, layers=4)
    model, _ = load_model(folder)
    config = block_drafters.config_for(model, "dspark", LAYERS)
    drafter = block_drafters.right_drafter(model, "dspark", config)
    named = block_drafters.saved(root / BLOCKS, drafter, config)
    models = {"alpha": [folder, named], "beta": [folder]}
    settings = {"alpha": {**SETTINGS, "FLEETD_SPECULATION_DRAFT_MODEL": BLOCKS}, "beta": SETTINGS}
    with LiveFleet(short_dir / "group-blocks", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", TAPPED)
        assert fleet["alpha"].fleetctl("models", "verify", TAPPED).returncode == 0
        fleet.until_has("beta", "alpha", TAPPED)
        yield fleet


def ask(daemon: LiveDaemon, model: str, *where: str, **fields: Any) -> tuple[str, list[tuple[str, float]]]:
    """The plan of an answer, and its tokens with their probabilities, to the bit."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "<count>"}],
        "max_tokens": 80,
        "temperature": 0,
        "logprobs": True,
        "placement": [*where],
        **fields,
    }
    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            reply = json.loads(response.read())
            assert response.status == 200, reply
            plan = response.headers["X-Fleet-Plan"]
    content = reply["choices"][0]["logprobs"]["content"]
    return plan, [(each["token"], each["logprob"]) for each in content]


def last_trace(daemon: LiveDaemon) -> dict[str, Any]:
    traces = daemon.control("GET", "/fleet/v1/traces?last=1")["traces"]
    return next(iter(traces), {})


def head_of(daemon: LiveDaemon, model: str) -> str:
    (found,) = [engine["draft_head"] for engine in daemon.status()["engines"] if engine["model"] == model]
    return str(found)


def drafted(
    daemon: LiveDaemon, model: str, source: str = "mtp", **fields: Any
) -> tuple[list[tuple[str, float]], dict[str, Any]]:
    """An answer over both machines that only this source drafts for, and what the trace says of it."""
    before = last_trace(daemon).get("id")
    plan, found = ask(daemon, model, "this", "beta", speculate={"sources": [source]}, **fields)
    assert plan == "group; nodes=this,beta"
    until(lambda: last_trace(daemon).get("id") != before, WITHIN_S)
    speculation = last_trace(daemon)["speculation"]
    return found, {} if speculation is None else speculation["sources"][source]


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_a_right_head_drafts_over_two_machines_and_is_always_right(
    pair: LiveFleet, fields: dict[str, Any]
) -> None:
    alpha = pair["alpha"]
    found, counts = drafted(alpha, RIGHT, **fields)
    assert head_of(alpha, RIGHT).startswith("mtp: ")
    _, plain = ask(alpha, RIGHT, "this", "beta", speculate={"enabled": False}, **fields)
    _, whole = ask(alpha, RIGHT, "this", speculate={"enabled": False}, **fields)
    assert found == plain == whole
    assert counts["drafted"] > 40
    if not fields:
        assert counts["accepted"] == counts["drafted"]
        assert [token for token, _ in found[:3]] == [" 1", " 2", " 3"]


def test_a_random_head_changes_nothing_and_is_switched_off(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    _, plain = ask(alpha, RANDOM, "this", "beta", speculate={"enabled": False})
    for _ in range(2):
        found, _ = drafted(alpha, RANDOM)
        assert found == plain
    until(lambda: head_of(alpha, RANDOM).startswith("off: "), WITHIN_S)
    assert "drafts were right" in head_of(alpha, RANDOM)
    found, counts = drafted(alpha, RANDOM)
    assert (found, counts) == (plain, {})


@pytest.mark.parametrize("where", [("this",), ("this", "beta")])
def test_a_head_of_several_layers_drafts_for_a_hybrid(pair: LiveFleet, where: tuple[str, ...]) -> None:
    alpha = pair["alpha"]
    _, plain = ask(alpha, HYBRID, *where, speculate={"enabled": False})
    before = last_trace(alpha).get("id")
    _, found = ask(alpha, HYBRID, *where, speculate={"sources": ["mtp"]})
    assert found == plain
    assert "".join(token for token, _ in found).startswith(" 1 2 3")
    assert head_of(alpha, HYBRID).startswith("mtp: ")
    until(lambda: last_trace(alpha).get("id") != before, WITHIN_S)
    counts = last_trace(alpha)["speculation"]["sources"]["mtp"]
    assert counts["accepted"] == counts["drafted"] > 40


def test_a_block_drafter_reads_layers_of_both_machines_and_is_always_right(tapped: LiveFleet) -> None:
    alpha = tapped["alpha"]
    found, counts = drafted(alpha, TAPPED, "dflash")
    assert head_of(alpha, TAPPED).startswith("dflash: ")
    _, plain = ask(alpha, TAPPED, "this", "beta", speculate={"enabled": False})
    assert found == plain
    assert counts["drafted"] > 40
    assert counts["accepted"] == counts["drafted"]
    # It says of how many tokens it knew the states when it began, and of how many it would have.
    assert 0 < counts["known_tokens"] == counts["wanted_tokens"]
