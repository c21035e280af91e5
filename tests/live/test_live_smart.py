"""Smart prefill by a real daemon: a long prompt with one line that matters, scored by the model itself."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL = "smollm2-135m"
NEEDLE = "The access code of the harbour office is 48213."
QUESTION = "What is the access code of the harbour office? Answer with the code only."
SUBJECTS = ["garden", "market", "library", "railway", "museum", "bakery", "school", "theatre"]
DOINGS = ["opened late", "was painted blue", "ordered new chairs", "hosted a small fair", "closed for a week"]


def haystack(lines: int = 115, at: int = 70) -> str:
    """About 22 tokens a line."""
    told = [
        f"In week {n} the {SUBJECTS[n % 8]} {DOINGS[n % 5]}, and {n} {SUBJECTS[n * 3 % 8]} visitors approved."
        for n in range(lines)
    ]
    return "\n\n".join([*told[:at], NEEDLE, *told[at:]])


def post(
    daemon: LiveDaemon, path: str, body: dict[str, Any], status: int = 200
) -> tuple[dict[str, str], Any]:
    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), headers)
        with connection.getresponse() as response:
            reply = json.loads(response.read())
            assert response.status == status, reply
            return {name.lower(): value for name, value in response.getheaders()}, reply


def asked(**fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You answer with what the notes say."},
        {"role": "user", "content": haystack()},
        {"role": "user", "content": QUESTION},
    ]
    return {"model": SMOL, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def loaded(live: LiveDaemon) -> LiveDaemon:
    live.control("POST", "/fleet/v1/models/load", {"model": SMOL})
    return live


@pytest.mark.parametrize("mode", [pytest.param("text", marks=pytest.mark.long), "auto"])
def test_the_needle_is_found_in_what_is_left(loaded: LiveDaemon, mode: str) -> None:
    wanted = {"target_ratio": 0.15, "mode": mode, "compressor_model": SMOL}
    headers, reply = post(loaded, "/v1/chat/completions", asked(smart_prefill=wanted))
    report = reply["smart_prefill"]
    assert not report["skipped"], report
    assert "48213" in reply["choices"][0]["message"]["content"]
    assert headers["x-fleet-exactness"] == "lossy"
    assert headers["x-smartprefill-compressor"] == SMOL
    assert headers["x-smartprefill-mode"] == report["mode"]
    original, left = (int(headers[f"x-smartprefill-{n}-tokens"]) for n in ("original", "compressed"))
    assert 2000 < original < 4000
    assert left < 0.5 * original
    assert reply["usage"]["prompt_tokens"] > 0.9 * original
    assert reply["timings"]["prompt_n"] < 0.6 * original
    assert reply["timings"]["score_ms"] > 0


def test_the_next_turn_finds_the_shortened_one_in_the_cache(loaded: LiveDaemon) -> None:
    body = asked(smart_prefill={"target_ratio": 0.15, "mode": "text", "compressor_model": SMOL})
    headers, first = post(loaded, "/v1/chat/completions", body)
    body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "Say it again, please."}]
    _, second = post(loaded, "/v1/chat/completions", body)
    assert second["smart_prefill"]["mode"] == "text"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * int(headers["x-smartprefill-compressed-tokens"])
    assert second["timings"]["prompt_n"] < 200


def test_a_short_prompt_is_read_whole_and_says_why(loaded: LiveDaemon) -> None:
    body = asked(smart_prefill=True)
    del body["messages"][1]
    headers, _ = post(loaded, "/v1/chat/completions", body)
    assert headers["x-smartprefill-skipped"].startswith("short: ")
    assert headers["x-fleet-exactness"] == "exact"


@pytest.mark.long
def test_a_text_is_compressed_for_its_own_sake(loaded: LiveDaemon) -> None:
    body = {"prompt": haystack(), "question": QUESTION, "target_ratio": 0.2}
    _, reply = post(loaded, "/v1/compress", body)
    assert NEEDLE in reply["prompt"]
    assert len(reply["prompt"]) < 0.5 * len(haystack())
    kept = "".join(haystack()[a:b] for a, b in reply["kept"][0]["spans"])
    assert NEEDLE in kept
    done = loaded.fleetctl("compress", "-", "-r", "0.2", "-q", QUESTION, stdin=haystack())
    assert done.returncode == 0, done.stderr
    assert NEEDLE in done.stdout


def test_a_corpus_is_compressed_once_for_questions_that_come_later(loaded: LiveDaemon) -> None:
    """Without a question the model's own surprise decides, which a line unlike the others has."""
    _, reply = post(loaded, "/v1/compress", {"prompt": haystack(40, 20), "target_ratio": 0.3})
    assert (reply["scored"], reply["declined"]) == ("without question", "")
    assert NEEDLE in reply["prompt"]
    assert reply["usage"]["compressed_tokens"] < 0.6 * reply["usage"]["original_tokens"]
    _, whole = post(loaded, "/v1/compress", {"prompt": haystack(40, 20), "without_question": False})
    assert (whole["scored"], whole["prompt"]) == ("", haystack(40, 20))
    done = loaded.fleetctl("compress", "-", "-r", "0.3", stdin=haystack(40, 20))
    assert "scored without a question by" in done.stderr
    assert NEEDLE in done.stdout


def test_what_was_done_can_be_read_later(loaded: LiveDaemon) -> None:
    post(loaded, "/v1/chat/completions", asked(smart_prefill={"target_ratio": 0.15}))

    def kinds() -> set[str]:
        traces = loaded.control("GET", "/fleet/v1/traces?last=50")["traces"]
        return {trace["chosen"]["kind"] for trace in traces}

    until(lambda: "smart" in kinds())
    assert loaded.fleetctl("trace").returncode == 0
    assert 'fleetd_smart_total{mode="' in loaded.control("GET", "/metrics")


@pytest.mark.long
def test_a_text_is_scored_by_the_machine_that_has_a_compressor(
    live_models: Path, short_dir: Path, programs: Programs
) -> None:
    machines = {"alpha": [live_models / "chain"], "beta": [live_models / SMOL]}
    with LiveFleet(short_dir / "scoring", machines, programs=programs) as fleet:
        fleet.until_usable()
        fleet.load("beta", SMOL, seen_by="alpha")
        body = {"prompt": haystack(40, 25), "question": QUESTION, "target_ratio": 0.2}
        _, reply = post(fleet["alpha"], "/v1/compress", body)
        assert (reply["nodes"], reply["model"]) == (["beta"], SMOL)
        assert NEEDLE in reply["prompt"]

        def only_scored() -> list[bool]:
            rows = fleet["beta"].control("GET", "/fleet/v1/usage?days=1")["rows"]
            mine = [row for row in rows if row["model"] == SMOL]
            return [row["requests"] == 0 and row["scored_tokens"] > 0 for row in mine]

        until(lambda: only_scored() == [True])
        _, refused = post(fleet["alpha"], "/v1/compress", {**body, "local_only": True}, status=503)
        assert refused["error"]["code"] == "no_machine"


@pytest.mark.long
def test_two_machines_score_a_text_in_two_segments(
    live_models: Path, short_dir: Path, programs: Programs
) -> None:
    machines = {name: [live_models / SMOL] for name in ("beta", "gamma")} | {"alpha": [live_models / "chain"]}
    with LiveFleet(short_dir / "segments", machines, programs=programs) as fleet:
        fleet.until_usable()
        for name in ("beta", "gamma"):
            fleet.load(name, SMOL, seen_by="alpha")
        body = {"prompt": haystack(), "question": QUESTION, "target_ratio": 0.15}
        _, together = post(fleet["alpha"], "/v1/compress", body)
        assert sorted(together["nodes"]) == ["beta", "gamma"]
        _, alone = post(fleet["beta"], "/v1/compress", {**body, "local_only": True})
        for reply in (together, alone):
            assert NEEDLE in reply["prompt"]
        assert together["usage"]["original_tokens"] == alone["usage"]["original_tokens"]
