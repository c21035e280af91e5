"""Sparse prefill by real daemons: a machine scores what another one answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon
from live_fleet import LiveFleet
from test_live_smart import SMOL, asked, haystack, post

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(400)]

# The default model under a name that is in no catalog: it answers, and scores for nobody.
TELLER = "teller"


@pytest.fixture(scope="module")
def teller(embedded_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teller") / TELLER
    shutil.copytree(embedded_model.path, folder)
    return folder


def test_a_small_machine_scores_what_a_large_one_answers_sparsely(
    live_models: Path, teller: Path, short_dir: Path, programs: Programs
) -> None:
    machines = {"small": [live_models / SMOL], "large": [teller]}
    with LiveFleet(short_dir / "sparse", machines, programs=programs) as fleet:
        fleet.until_usable()
        fleet["small"].control("POST", "/fleet/v1/models/load", {"model": SMOL})
        fleet.load("large", TELLER, seen_by="small")
        wanted = {"target_ratio": 0.15, "mode": "sparse"}
        body = asked(model=TELLER, smart_prefill=wanted)
        headers, reply = post(fleet["small"], "/v1/chat/completions", body)
        report = reply["smart_prefill"]
        assert (report["mode"], report["nodes"], report["compressor"]) == ("sparse", ["this"], SMOL), report
        assert headers["x-fleet-plan"] == "remote; nodes=large"
        assert headers["x-fleet-exactness"] == "lossy"
        assert headers["x-smartprefill-mode"] == "sparse"
        assert headers["x-smartprefill-nodes"] == "this"
        original, left = (int(headers[f"x-smartprefill-{n}-tokens"]) for n in ("original", "compressed"))
        assert left < 0.5 * original == 0.5 * reply["usage"]["prompt_tokens"]
        assert reply["timings"]["prompt_n"] <= left
        assert "48213" in reply["choices"][0]["message"]["content"]

        # Without a scorer the machine that answers reads all of it, and the client is told why.
        fleet["small"].control("POST", "/fleet/v1/models/unload", {"model": SMOL})
        shutil.rmtree(fleet.models_dir("small") / SMOL)

        # Another text: what was chosen of the first one is remembered.
        body["messages"][1]["content"] = haystack(40, 20)
        body["smart_prefill"] = {**wanted, "min_prompt_tokens": 300}
        headers, reply = post(fleet["small"], "/v1/chat/completions", body)
        assert reply["smart_prefill"]["mode"] == "full"
        assert headers["x-smartprefill-skipped"].startswith("no_compressor: ")
        assert headers["x-fleet-exactness"] != "lossy"
        # All but what both texts begin with, of which the sparse prompt has left rows.
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert reply["timings"]["prompt_n"] + cached == usage["prompt_tokens"]
        assert cached < left


WANTED = {"target_ratio": 0.15, "compressor_model": SMOL}
TOOL = {
    "type": "function",
    "function": {
        "name": "open_door",
        "description": "Opens a door.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


def test_the_next_turn_of_a_sparse_conversation_finds_the_first_one(
    live: LiveDaemon, loaded_smol: str
) -> None:
    """And the answers of one request share its prefill."""
    body = asked(smart_prefill=WANTED, n=2)
    body["messages"][1]["content"] = haystack(113, 37)
    headers, first = post(live, "/v1/chat/completions", body)
    assert first["smart_prefill"]["mode"] == "sparse", first["smart_prefill"]
    kept = int(headers["x-smartprefill-compressed-tokens"])
    # Of both answers together; less if other tests had a text read that begins alike.
    assert first["timings"]["prompt_n"] < 1.2 * kept
    assert len({choice["message"]["content"] for choice in first["choices"]}) == 1
    answer = first["choices"][0]["message"]
    body["messages"] += [answer, {"role": "user", "content": "Say it again, please."}]
    _, second = post(live, "/v1/chat/completions", {**body, "n": 1})
    assert second["smart_prefill"]["mode"] == "sparse"
    assert second["smart_prefill"]["nodes"] == []
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * kept
    assert second["timings"]["prompt_n"] < 100


def test_tools_are_kept_whole_in_front_of_a_sparse_prompt(live: LiveDaemon, loaded_smol: str) -> None:
    """What every request of an agent begins with is found in the cache, and read by the sparse one."""
    body = asked(tools=[TOOL], tool_choice="none")
    del body["messages"][1]
    post(live, "/v1/chat/completions", body)
    body = asked(tools=[TOOL], tool_choice="none", smart_prefill={**WANTED, "mode": "sparse"})
    body["messages"][1]["content"] = haystack(116, 60)
    headers, reply = post(live, "/v1/chat/completions", body)
    assert reply["smart_prefill"]["mode"] == "sparse", reply["smart_prefill"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert "48213" in reply["choices"][0]["message"]["content"]
    assert headers["x-fleet-exactness"] == "lossy"


def test_a_sparse_answer_is_drafted_for(make_daemon: Callable[..., LiveDaemon]) -> None:
    """It says its line twice: the second time it is foretold."""
    with_drafts = make_daemon(FLEETD_SPECULATION_MODE="on")
    with_drafts.control("POST", "/fleet/v1/models/load", {"model": SMOL})
    wanted = {**WANTED, "mode": "sparse"}
    body = asked(smart_prefill=wanted, max_tokens=64, ignore_eos=True)
    _, reply = post(with_drafts, "/v1/chat/completions", body)
    assert reply["smart_prefill"]["mode"] == "sparse", reply["smart_prefill"]
    assert "48213" in reply["choices"][0]["message"]["content"]
    assert reply["timings"]["draft_n"] > 0
