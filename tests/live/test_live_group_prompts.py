"""Long prompts of a model over two real daemons: chosen tokens of them, and what the disks keep."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL, SCORER = "smollm2-135m", "scorer"
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}
NEEDLE = "The access code of the harbour office is 48213."
QUESTION = "What is the access code of the harbour office? Answer with the code only."
SMART = {"target_ratio": 0.15, "mode": "sparse", "compressor_model": SCORER, "min_prompt_tokens": 200}


def haystack(lines: int) -> str:
    """About 22 tokens a line."""
    things = ("garden", "market", "library", "railway", "museum")
    told = [
        f"In week {n} the {things[n % 5]} opened late, and {n + 3} visitors approved." for n in range(lines)
    ]
    return "\n\n".join([*told[: lines // 2], NEEDLE, *told[lines // 2 :]])


@pytest.fixture(scope="module")
def scorer(live_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model under another name, which finds what matters in prompts."""
    folder = tmp_path_factory.mktemp("models") / SCORER
    folder.mkdir()
    for file in (live_models / SMOL).iterdir():
        os.link(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def pair(live_models: Path, scorer: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    models = {"alpha": [live_models / SMOL, scorer], "beta": [live_models / SMOL]}
    settings = dict.fromkeys(models, COMMON)
    with LiveFleet(short_dir / "prompts", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", SMOL)
        for name in (SMOL, SCORER):
            assert fleet["alpha"].fleetctl("models", "verify", name).returncode == 0
        yield fleet


def post(daemon: LiveDaemon, body: dict[str, Any]) -> tuple[dict[str, str], Any]:
    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            reply = json.loads(response.read())
            assert response.status == 200, reply
            return {name.lower(): value for name, value in response.getheaders()}, reply


def asked(lines: int, *where: str, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You answer with what the notes say."},
        {"role": "user", "content": haystack(lines)},
        {"role": "user", "content": QUESTION},
    ]
    fixed = {"model": SMOL, "max_tokens": 16, "temperature": 0, "logprobs": True}
    return {**fixed, "messages": messages, "placement": list(where), **fields}


def said(reply: Any) -> list[tuple[str, float]]:
    """The answer's tokens and their probabilities, to the bit."""
    return [(each["token"], each["logprob"]) for each in reply["choices"][0]["logprobs"]["content"]]


def test_chosen_tokens_of_a_prompt_are_read_over_two_machines_as_by_one(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    headers, together = post(alpha, asked(80, "this", "beta", smart_prefill=SMART))
    assert headers.get("x-smartprefill-mode") == "sparse", headers
    assert headers["x-smartprefill-compressor"] == SCORER
    assert headers["x-fleet-plan"] == "group; nodes=this,beta"
    assert headers["x-fleet-exactness"] == "lossy"
    assert int(headers["x-smartprefill-compressed-tokens"]) < 0.5 * int(
        headers["x-smartprefill-original-tokens"]
    )
    assert together["timings"]["score_ms"] > 0
    assert "48213" in together["choices"][0]["message"]["content"]
    whole_headers, alone = post(alpha, asked(80, "this", smart_prefill=SMART))
    assert whole_headers["x-fleet-plan"] != headers["x-fleet-plan"]
    compared = [name for name in headers if name.startswith("x-smartprefill-") and name.endswith("-tokens")]
    assert [headers[name] for name in compared] == [whole_headers[name] for name in compared]
    assert said(together) == said(alone)


def test_a_prompt_comes_back_from_both_disks_when_a_machine_was_restarted(pair: LiveFleet) -> None:
    alpha, body = pair["alpha"], asked(40, "this", "beta")
    _, first = post(alpha, body)
    assert first["timings"].get("restored_n", 0) == 0
    alpha.control("POST", "/fleet/v1/models/unload", {"model": SMOL})
    until(lambda: not pair["beta"].status()["engines"], 60)
    pair["beta"].stop()
    pair.revive()
    pair.until_usable()
    pair.until_has("alpha", "beta", SMOL)
    _, again = post(alpha, body)
    (over,) = [engine["members"] for engine in alpha.status()["engines"] if engine["model"] == SMOL]
    assert [held["name"] for held in over] == ["beta"]
    assert said(again) == said(first)
    assert again["timings"]["restored_n"] > 500
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["timings"]["restored_n"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        }
    },
    "seeded schema": {
        "response_format": {"type": "json_object"},
        "temperature": 1.0,
        "seed": 3,
    },
    "tool": {"tools": [WEATHER], "tool_choice": "required"},
}


def held(daemon: LiveDaemon, where: list[str]) -> dict[str, tuple[Any, Any, Any]]:
    """What is answered under each form: text, calls, and why it ended."""
    found = {}
    for name, fields in FORMS.items():
        body = {
            "model": SMOL,
            "messages": [{"role": "user", "content": "Who is Ada, and how is the weather in Oslo?"}],
            "max_tokens": 48,
            "temperature": 0,
            "placement": where,
            **fields,
        }
        _, reply = post(daemon, body)
        (choice,) = reply["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
        found[name] = choice["message"]["content"], calls, choice["finish_reason"]
    return found


def test_answers_that_are_held_to_a_form_are_those_of_one_machine(pair: LiveFleet) -> None:
    together = held(pair["alpha"], ["this", "beta"])
    assert set(json.loads(together["schema"][0])) == {"name", "age"}
    assert json.loads(together["tool"][1][0]["arguments"])["city"] in ("Oslo", "Rome")
    assert held(pair["alpha"], ["this"]) == together
