"""Sparse prefill by real daemons: a machine scores what another one answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forked_programs import Programs
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
        body["messages"][1]["content"] = haystack(110, 40)
        headers, reply = post(fleet["small"], "/v1/chat/completions", body)
        assert reply["smart_prefill"]["mode"] == "full"
        assert headers["x-smartprefill-skipped"].startswith("no_compressor: ")
        assert headers["x-fleet-exactness"] != "lossy"
        assert reply["timings"]["prompt_n"] > 0.9 * reply["usage"]["prompt_tokens"]
