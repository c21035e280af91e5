"""One prompt prefilled by two real daemons: the answer is one machine's own, whatever befalls the helper."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrid
from forked_programs import Programs
from live_daemon import LiveDaemon, frozen, until
from live_fleet import LiveFleet, StreamedAnswer, answer, body, heard
from test_live_smart import asked, haystack, post
from timelines import check_steps

from fleetd import limits
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.split import TOKEN_BYTES

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL, HYBRID = "smollm2-135m", tiny_hybrid.NAME
NAMES = ("alpha", "beta")
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they"]
LOAD_S = 60.0
TRIES = 5
# No prompt begins as another one.
SEEDS = itertools.count(100)


@pytest.fixture(scope="module")
def pair(
    live_models: Path, short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """Two machines that have the same models."""
    hybrid = tiny_hybrid.build(tmp_path_factory.mktemp("models") / HYBRID)
    models = {name: [live_models / SMOL, hybrid] for name in NAMES}
    with LiveFleet(short_dir / "sharing", models, programs=programs) as fleet:
        fleet.until_usable()
        yield fleet


@pytest.fixture
def ready(pair: LiveFleet) -> LiveFleet:
    """Nobody is avoided for what happened a while ago."""
    return loaded(pair, SMOL)


def loaded(pair: LiveFleet, model: str) -> LiveFleet:
    """Both have loaded it, and know it of each other."""
    for name, other in (NAMES, NAMES[::-1]):
        pair.load(name, model, seen_by=other)
    until(lambda: planned(pair["alpha"], model)["nodes"] == ["beta", "this"], LOAD_S)
    return pair


def planned(daemon: LiveDaemon, model: str = SMOL) -> dict[str, Any]:
    """What it would do with a prompt of 800 tokens."""
    found = daemon.control("POST", "/fleet/v1/plan", {"model": model, "tokens": 800})
    assert (found["model"], found["prompt_tokens"]) == (model, 800)
    best: dict[str, Any] = found["options"][0]
    return best


def prompt(seed: int, words: int) -> str:
    """Begins with what no other one begins with, so that no cache helps."""
    draw = random.Random(seed)
    return f"{seed}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def ask(daemon: LiveDaemon, text: str, model: str = SMOL, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The plan, and the body."""
    request = body(model, text, max_tokens=8, logprobs=True, **fields)
    status, headers, got = answer(daemon, request)
    assert status == 200, got
    return f"{headers['X-Fleet-Plan']}; {headers['X-Fleet-Exactness']}", got


def essence(got: dict[str, Any]) -> Any:
    return got["choices"][0]["message"], got["choices"][0]["logprobs"]


def trace_of(fleet: LiveFleet, request_id: str) -> tuple[str, dict[str, Any]]:
    """Which machine answered, and what it wrote down."""
    found: list[tuple[str, dict[str, Any]]] = []

    def written() -> bool:
        for name in NAMES:
            traces = fleet[name].control("GET", "/fleet/v1/traces?last=20")["traces"]
            # A job that was sent to another machine has its id there, with an ending of its own.
            mine = [trace for trace in traces if not trace["answered_by"]]
            found.extend((name, trace) for trace in mine if trace["id"].startswith(request_id))
        return bool(found)

    until(written)
    return found[0]


def test_a_shared_answer_is_the_answer_of_one_machine(ready: LiveFleet) -> None:
    text = prompt(1, 400)
    plan, got = ask(ready["alpha"], text)
    home, trace = trace_of(ready, got["id"])
    (helper,) = {*NAMES} - {home}
    assert trace["outcome"] == "shared", trace
    assert trace["chosen"]["nodes"] == [helper, "this"]
    assert trace["exactness"] == "exact"
    assert trace["chosen"]["kind"] in ("layers", "tokens", "whole")
    check_steps(trace)
    assert {step["machine"] for step in trace["steps"]} == {helper, home}
    assert (trace["machine"], trace["planned_ttft_s"] > 0, trace["alone_s"] > 0) == (home, True, True)
    assert "reading together" in trace["summary"]
    assert sum(step.get("n_bytes", 0) for step in trace["steps"]) > 0
    assert "local" in {loser["kind"] for loser in trace["losers"]}
    if home == "alpha":
        assert plan == f"{trace['chosen']['kind']}; nodes=beta,this; exact"
    else:
        assert plan == "remote; nodes=beta,alpha; exact"
    _, there = ask(ready[helper], text, local_only=True)
    assert there["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert essence(got) == essence(there)
    shown = ready[home].control("GET", "/metrics")
    assert f'fleetd_share_total{{kind="{trace["chosen"]["kind"]}",outcome="shared"}} 1.0' in shown
    # The helper counts its part once it is over there.
    served = 'fleetd_served_total{kind="assist",outcome="done"} 1.0'
    until(lambda: served in ready[helper].control("GET", "/metrics"))


def test_a_prompt_is_shortened_as_a_text_that_two_machines_read_sooner(ready: LiveFleet) -> None:
    alpha, wanted = ready["alpha"], {"target_ratio": 0.3, "compressor_model": SMOL}
    headers, got = post(alpha, "/v1/chat/completions", asked(model=SMOL, smart_prefill=wanted))
    assert (headers["x-smartprefill-mode"], headers["x-fleet-exactness"]) == ("text", "lossy")
    assert "48213" in got["choices"][0]["message"]["content"]
    trace = alpha.trace(headers["x-fleet-request"])
    assert (trace["outcome"], trace["chosen"]["form"]) == ("smart", "text"), trace
    assert trace["answered_by"] or trace["chosen"]["prefill"] in ("layers", "tokens", "whole")
    (passed,) = [loser for loser in trace["losers"] if loser["form"] == "sparse"]
    # Which machine would have read it sparsely goes by what beta has loaded.
    assert passed["code"] == "slower"
    # Without others it is read at its own places.
    request = asked(model=SMOL, smart_prefill=wanted, local_only=True)
    request["messages"][1]["content"] = haystack(114, 50)
    headers, _ = post(alpha, "/v1/chat/completions", request)
    assert headers["x-smartprefill-mode"] == "sparse"


def test_a_hybrids_shared_prompt_is_not_read_again_where_its_end_is_edited(pair: LiveFleet) -> None:
    loaded(pair, HYBRID)
    # A token for each character.
    text = prompt(3, 320)
    _, got = ask(pair["alpha"], text, HYBRID)
    home, trace = trace_of(pair, got["id"])
    (helper,) = {*NAMES} - {home}
    assert (trace["outcome"], trace["exactness"]) == ("shared", "exact"), trace
    _, there = ask(pair[helper], text, HYBRID, local_only=True)
    assert there["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert essence(got) == essence(there)
    edited = text[:-100] + text[-100:][::-1]
    _, again = ask(pair[home], edited, HYBRID, local_only=True)
    usage = again["usage"]
    read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert read <= 100 + limits.CHECKPOINT_BLOCK_TOKENS
    _, cold = ask(pair[helper], edited, HYBRID, local_only=True)
    assert essence(again) == essence(cold)


def layers_and_tokens(chosen: dict[str, Any], layers: int, tokens: int) -> tuple[range, int]:
    """Of the first machine of a plan: its layers, and the tokens whose rows it has of them."""
    _, first, _ = chosen["cuts"]
    return (range(first), tokens) if chosen["kind"] != "tokens" else (range(layers), first)


def test_a_helper_keeps_the_rows_of_the_turn_before(ready: LiveFleet) -> None:
    """In the next turn only new rows cross, and the answer is one machine's own."""
    for _ in range(TRIES):
        said = [{"role": "user", "content": prompt(next(SEEDS), 400)}]
        _, first = ask(ready["alpha"], "", messages=said)
        home, trace = trace_of(ready, first["id"])
        if trace["outcome"] != "shared":
            continue
        before = trace
        (helper,) = {*NAMES} - {home}
        reply = first["choices"][0]["message"]["content"]
        said += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": prompt(next(SEEDS), 400)},
        ]
        _, second = ask(ready[home], "", messages=said)
        again, trace = trace_of(ready, second["id"])
        if (again, trace["outcome"]) == (home, "shared"):
            break
    else:
        pytest.fail("no two turns were shared")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    (engine,) = (one for one in ready[home].status()["engines"] if one["model"] == SMOL)
    layers, token_bytes = engine["shape"]["layers"], engine["shape"]["sizes"]["token_bytes"]
    computed = layers_and_tokens(before["chosen"], layers, first["usage"]["prompt_tokens"] - 1)
    wanted = layers_and_tokens(trace["chosen"], layers, cached)
    there = len(set(wanted[0]) & set(computed[0])) * computed[1]
    assert there > 0
    rows = token_bytes // layers * (len(wanted[0]) * cached - there)
    sent = sum(step["n_bytes"] for step in trace["steps"] if step["name"] == step_names.PREFIX_SENT)
    assert sent == rows + TOKEN_BYTES * (second["usage"]["prompt_tokens"] - 1), trace
    _, alone = ask(ready[helper], "", messages=said, local_only=True)
    # Of its own prompts it has the template's beginning at most.
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] < 64
    assert essence(second) == essence(alone)


def test_a_plan_is_shown_before_it_is_needed(ready: LiveFleet) -> None:
    best = planned(ready["alpha"])
    assert best["chosen"]
    assert best["nodes"] == ["beta", "this"]


def test_what_has_to_stay_is_not_shared(ready: LiveFleet) -> None:
    plan, got = ask(ready["alpha"], prompt(2, 300), local_only=True)
    assert plan == "local; nodes=this; exact"
    home, trace = trace_of(ready, got["id"])
    assert (home, trace["outcome"], trace["chosen"]["nodes"]) == ("alpha", "local", ["this"])
    # Nothing was planned, so nothing was passed over, and the other machine has heard nothing of it.
    assert trace["losers"] == []
    traces = ready["beta"].control("GET", "/fleet/v1/traces")["traces"]
    assert not [trace for trace in traces if trace["id"].startswith(got["id"])]


@contextlib.contextmanager
def shared(daemon: LiveDaemon, words: int = 1000) -> Iterator[tuple[StreamedAnswer, str, str]]:
    """An answer, the machine that helps with its prompt, and that.

    Before both have agreed a helper may be lost without anybody counting on it; and they may not, on a busy
    machine, in the time that sharing would save.
    """
    for _ in range(TRIES):
        text = prompt(next(SEEDS), words)
        with heard(daemon, SMOL, text, max_tokens=8) as stream:
            if helper := stream.shared_with():
                yield stream, helper, text
                return
    pytest.fail("no prompt was shared")


@pytest.mark.long
def test_a_client_whose_time_out_is_too_short_loses_nothing(ready: LiveFleet) -> None:
    """It leaves while another machine helps with its prompt, and asks again."""
    for _ in range(TRIES):
        with shared(ready["alpha"], 500) as (_, helper, text):
            pass
        _, got = ask(ready["alpha"], text)
        _, there = ask(ready[helper], text, local_only=True)
        assert essence(got) == essence(there)
        usage = got["usage"]
        # On a busy machine the helpers may have been given up.
        if usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1:
            return
    pytest.fail("each try was read anew")


@pytest.mark.long
@pytest.mark.parametrize("harm", ["engine killed", "engine stopped"])
def test_a_helper_that_is_lost_in_mid_prefill_changes_no_answer(ready: LiveFleet, harm: str) -> None:
    with shared(ready["alpha"]) as (stream, helper, text):
        engine = ready[helper].engine_pid(SMOL)
        if harm == "engine killed":
            os.kill(engine, signal.SIGKILL)
            got = stream.text()
        else:
            with frozen(engine):
                got = stream.text()
    home, trace = trace_of(ready, stream.response.headers["X-Fleet-Request"])
    assert home != helper
    assert trace["outcome"] == "fallback", trace
    assert trace["code"]
    assert trace["reason"]
    assert trace["reason"] in stream.plans()[-1]
    assert "fleetd_fallback_total{" in ready[home].control("GET", "/metrics")
    with heard(ready[helper], SMOL, text, max_tokens=8, local_only=True) as stream:
        assert got == stream.text()
