"""`fleetctl trace`: the list of past requests, one of them step by step, and how one is named."""

from __future__ import annotations

import json
import re
from typing import Any

import click
import msgspec
import pytest
from fake_daemon import FakeDaemon, Reply, Run
from hypothesis import given
from hypothesis import strategies as st
from shares import TRACES

from fleetctl.connection.replies import read
from fleetctl.exits import Exit
from fleetctl.render.trace_page import listing, page
from fleetd import limits
from fleetd.control.prefill_trace import GroupStage, SourceCounts, Speculated, Trace, TracesView

SHARED, FALLBACK, CANCELLED = TRACES["traces"]


def shown(value: dict[str, Any], width: int | None = 80) -> str:
    return click.unstyle(page(read(value, Trace), width))


def listed(values: list[dict[str, Any]], width: int | None = 80) -> list[str]:
    return click.unstyle(listing(read({"traces": values}, TracesView).traces, width)).splitlines()


# ---- The list --------------------------------------------------------------------------------------------


def test_predicted_against_actual_request_by_request() -> None:
    header, first, second, why, third = listed(TRACES["traces"], None)
    titles = "WHEN REQUEST MODEL TOKENS CACHED PLAN PLANNED ACTUAL MISS OUTCOME"
    assert re.split("  +", header) == titles.split()
    assert re.split("  +", first)[1:] == [
        "aaaa1111", "smollm2-135m", "4,000", "0", "layers: studio", "1.08 s", "1.15 s", "-", "shared",
    ]  # fmt: skip
    assert re.split("  +", second)[1:] == [
        "bbbb2222", "mlx-community/Qwen3-32B-4bit", "16,384", "1,024", "layers: studio, the big one upstairs",
        "1.06 s", "3.30 s", "+211 %", "fallback",
    ]  # fmt: skip
    assert why == "  studio went away in the middle of the prompt (peer_lost)"
    assert re.split("  +", third)[1:] == [
        "cccc3333", "smollm2-135m", "300", "0", "local", "1.92 s", "-", "-", "cancelled",
    ]  # fmt: skip


def test_eighty_columns_keep_what_was_planned_and_what_came_of_it() -> None:
    lines = listed(TRACES["traces"], 80)
    assert all(len(line) <= 80 for line in lines)
    assert {"REQUEST", "TOKENS", "PLAN", "ACTUAL", "MISS", "OUTCOME"} <= set(lines[0].split())
    assert "layers: studio +1" in lines[2]


def test_an_empty_list_says_what_would_be_in_it() -> None:
    assert listed([]) == ["No request has come yet."]


# ---- One request -----------------------------------------------------------------------------------------


def test_one_request_step_by_step() -> None:
    first, head, steps, losers = shown(SHARED, 100).split("\n\n")
    assert first == SHARED["summary"]
    assert head.splitlines()[1:] == [
        "model        smollm2-135m",
        "prompt       4,000 tokens",
        "plan         layers: studio 0 to 14, vm 15 to 29, in chunks of 256 tokens",
        "outcome      read by several machines · exact",
        "first token  1.08 s planned, 1.15 s actual",
    ]
    assert re.fullmatch(
        r"request      chatcmpl-0{20}aaaa1111 · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", head.splitlines()[0]
    )
    header, *rows = steps.splitlines()
    assert re.split("  +", header)[:6] == ["STEP", "MACHINE", "PLANNED", "ACTUAL", "MISS", "BYTES"]
    assert [re.split("  +", row.replace("█", "").replace("▒", "").strip()) for row in rows] == [
        ["waiting", "vm", "-", "30 ms", "-", "-"],
        ["reading", "vm", "1.06 s", "1.12 s", "-", "-"],
        ["writing", "vm", "-", "2.10 s", "-", "-"],
        ["waited", "vm", "0.12 s", "0.12 s", "-", "92.1 MB"],
        ["computed", "vm", "0.60 s", "0.93 s", "+55 %", "-"],
        ["computed", "studio", "-", "0.95 s", "-", "92.1 MB"],
        ["2 steps of less than 1 % not shown; --json has all."],
    ]
    # The bars have the begins and ends: writing begins where reading ends.
    reading, writing = (row.index("█") for row in rows[1:3])
    assert reading < rows[1].rindex("█") < writing
    assert losers.startswith("Alternatives:\n")
    # This machine alone is the measure of the others, wherever it stands.
    assert "tokens  studio + vm       1.12 s  1.71x\n     6 % slower" in losers


def test_claims_that_were_not_believed_are_told() -> None:
    said = "liar claims any speed: its hardware can do no more."
    assert f"not believed {said}" in shown({**SHARED, "capped": [said]}, None)


def test_a_fallback_says_where_it_went_on_and_why() -> None:
    said = " ".join(shown(FALLBACK, None).split())
    assert (
        "begun together, ended here alone, from 2,048 verified tokens on · exact · "
        "studio went away in the middle of the prompt (peer_lost)"
    ) in said
    assert "1.06 s planned, 3.30 s actual (+211 %)" in said


VECTORS: dict[str, Any] = {
    "id": "embd-dddd4444",
    "at_s": 1_000_000.0,
    "model": "all-minilm-l6-v2",
    "prompt_tokens": 64_000,
    "chosen": {"kind": "spread", "nodes": ["this", "studio"], "chosen": True},
    "outcome": "spread",
    "exactness": "exact",
    "code": "peer_lost",
    "reason": "mini: It went away.",
    "took_s": 12.0,
    "machine": "desk",
    "summary": "12 s: reading. 1,000 texts (64,000 tokens), by 2 machines.",
    "steps": [
        {"name": "request", "machine": "desk", "end_s": 12.0, "seconds": 12.0},
        {"name": "reading", "machine": "desk", "begin_s": 0.1, "end_s": 12.0, "seconds": 11.9, "parent": 0},
        {"name": "computed", "machine": "desk", "begin_s": 0.1, "end_s": 12.0, "seconds": 11.0, "parent": 0},
        {"name": "left to chats", "machine": "desk", "begin_s": 1, "end_s": 2, "seconds": 0.9, "parent": 0},
        {"name": "computed", "machine": "studio", "begin_s": 3.1, "end_s": 12, "seconds": 8.0, "parent": 0},
    ],
    "texts": {
        "route": "embeddings",
        "texts": 1000,
        "machines": [
            {"name": "this", "parts": 4, "texts": 400, "tokens": 25_600, "computed_s": 11.0},
            {
                "name": "studio",
                "parts": 6,
                "texts": 600,
                "tokens": 38_400,
                "computed_s": 8.0,
                "loaded_s": 3.0,
            },
            {"name": "mini", "code": "peer_lost", "reason": "It went away."},
        ],
    },
}


def test_a_request_for_vectors_says_which_machine_computed_how_much() -> None:
    text = shown(VECTORS, 110)
    assert "texts        1,000, 64,000 tokens" in text
    assert "machines     this machine: 400 texts, 25,600 tokens in 4 parts, 11.0 s (2,327 a second)" in text
    assert (
        "studio: 600 texts, 38,400 tokens in 6 parts, 8.00 s (4,800 a second), loaded the model for" in text
    )
    assert "mini: 0 texts, then left out: It went away (peer_lost)" in text
    assert "outcome      computed by several machines" in text
    assert "took         12.0 s" in text
    assert "first token" not in text
    assert re.search(r"left to chats +desk +- +0.90 s", text)
    assert re.search(r"computed +studio +- +8.00 s", text)
    (_, row, why) = listed([VECTORS], None)
    assert re.split("  +", row)[1:] == [
        "dddd4444", "all-minilm-l6-v2", "64,000", "0", "spread: studio", "-", "12.0 s", "-", "spread",
    ]  # fmt: skip
    assert "peer_lost" in why


def test_a_request_without_an_answer_has_no_time() -> None:
    said = shown(CANCELLED)
    assert "outcome      cancelled\nfirst token  1.92 s planned, - actual\n" in said


@given(width=st.integers(1, 200), text=st.text(max_size=64), seconds=st.floats(0, 1e6) | st.none())
def test_any_trace_has_a_page_without_control_characters(
    width: int, text: str, seconds: float | None
) -> None:
    """Names and reasons come from other machines."""
    steps = [
        {"name": text, "end_s": 2.0, "seconds": 1.0, "machine": text, "parent": parent}
        for parent in (None, 0)
    ]
    planned = [{"name": text, "seconds": 1.0, "machine": text}]
    option = {**SHARED["chosen"], "kind": text, "nodes": [text, "b", "this"], "steps": planned}
    value = {
        **FALLBACK,
        "id": text, "model": text, "chosen": option, "losers": [{**option, "reason": text}], "steps": steps,
        "outcome": text, "exactness": text, "prefill_s": seconds, "ttft_s": seconds, "code": text,
        "reason": text, "answered_by": text, "asked_by": text, "summary": text, "machine": text,
        "took_s": 2.0,
    }  # fmt: skip
    value = {**value, "there": value, "earlier": [value], "drafter": {"model": text, "machine": text}}
    for each in (width, None):
        for said in (shown(value, each), "\n".join(listed([value], each))):
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)


REMOTE: dict[str, Any] = {
    "id": "chatcmpl-00000000000000000000dddd4444-0",
    "at_s": 1_780_000_004.0,
    "model": "smollm2-135m",
    "prompt_tokens": 4000,
    "chosen": {"kind": "remote", "nodes": ["studio", "mini"], "chosen": True},
    "outcome": "remote",
    "exactness": "equivalent",
    "prefill_s": 1.14,
    "ttft_s": 1.3,
    "completion_tokens": 84,
    "took_s": 3.42,
    "answered_by": "studio",
    "steps": [
        {"name": "request", "machine": "laptop", "end_s": 3.42, "seconds": 3.42},
        {"name": "reading", "machine": "studio", "end_s": 1.3, "seconds": 1.3, "parent": 0},
        {"name": "computed", "machine": "mini", "end_s": 1.0, "seconds": 0.95, "parent": 1},
        {"name": "computed", "machine": "studio", "end_s": 1.2, "seconds": 0.93, "parent": 1},
        {"name": "spot check", "machine": "studio", "end_s": 0.01, "seconds": 0.01, "parent": 1},
        {"name": "writing", "machine": "studio", "begin_s": 1.3, "end_s": 3.42, "seconds": 2.12, "parent": 0},
    ],
    "earlier": [
        {
            "id": "r", "chosen": {"kind": "remote", "nodes": ["beta"]}, "outcome": "failed", "took_s": 1.5,
            "answered_by": "beta", "code": "peer_lost", "reason": "beta: The connection broke.",
        }
    ],
    "there": {
        **SHARED,
        "id": "chatcmpl-00000000000000000000dddd4444-0.c0ffee123456",
        "chosen": {**SHARED["chosen"], "nodes": ["mini", "this"]},
        "losers": [],
        "steps": [],
        "speculation": {
            "width": 16,
            "passes": 60,
            "tokens": 84,
            "saved_s": 0.5,
            "sources": {"lookup": {"drafted": 40, "accepted": 24, "passes": 20}},
        },
        "drafter": {"model": "small", "machine": "this", "code": "", "reason": ""},
        "ttft_s": 1.28,
        "took_s": 3.4,
        "asked_by": "laptop",
    },
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_what_another_machine_answered_is_one_story(width: int) -> None:
    here, there, steps = shown(REMOTE, width).split("\n\n")
    assert here.splitlines()[1:] == [
        "model        smollm2-135m",
        "prompt       4,000 tokens",
        "tried first  beta, for 1.50 s: beta: The connection broke (peer_lost)",
        "plan         remote: studio answers, helped by mini",
        "outcome      answered by studio · equivalent",
        "first token  1.30 s, not planned, 1.28 s of it on studio",
        "answer       84 tokens, the last one after 3.42 s, 3.40 s of it on studio",
    ]
    assert " ".join(there.split()) == (
        "On studio: trace there chatcmpl-00000000000000000000dddd4444-0.c0ffee123456 "
        "plan layers: mini 0 to 14, studio 15 to 29, in chunks of 256 tokens "
        "outcome read by several machines "
        "drafts right: lookup 24 of 40 (60 %) in 20 passes; 1.40 tokens per pass of up to 16; saved 0.50 s"
    )
    rows = [re.split("  +", line) for line in steps.splitlines()]
    names = [(row[0].strip(), row[1]) if row[0] else (row[1], row[2]) for row in rows[1:-1]]
    assert {*names} == {
        ("reading", "studio"), ("computed", "mini"), ("computed", "studio"), ("writing", "studio"),
    }  # fmt: skip
    assert "this" not in steps.split()
    assert all(len(line) <= width for line in shown(REMOTE, width).splitlines())


def test_a_machine_that_told_no_steps_is_said_so() -> None:
    said = shown({**REMOTE, "there": None, "steps": []})
    assert said.endswith("studio told no steps of its own.")
    assert "first token  1.30 s, not planned\n" in said


def test_an_answer_that_broke_off_elsewhere_says_where() -> None:
    lost = {"outcome": "failed", "code": "peer_lost", "reason": "studio: It went away.", "there": None}
    assert "outcome      failed on studio · equivalent · studio: It went away (peer_lost)\n" in shown(
        {**REMOTE, **lost}
    )


def test_a_request_of_another_machine_says_whose_it_is() -> None:
    assert "asked by     laptop\n" in shown(REMOTE["there"])
    assert re.split("  +", listed([REMOTE], None)[1])[5] == "remote: studio, mini"


# ---- The command -----------------------------------------------------------------------------------------


@pytest.fixture
def tracing(daemon: FakeDaemon) -> FakeDaemon:
    daemon.on("GET", "/fleet/v1/traces", Reply(TRACES))
    return daemon


def test_the_newest_ones(run: Run, tracing: FakeDaemon) -> None:
    done = run("trace", "--last", "3", home=tracing.home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == listed(TRACES["traces"], None)
    assert tracing.seen[-1].path == "/fleet/v1/traces?last=3"
    assert json.loads(run("trace", "--json", home=tracing.home).stdout) == TRACES
    assert tracing.seen[-1].path == "/fleet/v1/traces?last=20"


@pytest.mark.parametrize("part", ["bbbb2222", "000bbbb", FALLBACK["id"]])
def test_one_by_a_part_of_its_id(run: Run, tracing: FakeDaemon, part: str) -> None:
    done = run("trace", part, home=tracing.home)
    assert (done.returncode, done.stdout) == (0, shown(FALLBACK, None) + "\n")
    assert tracing.seen[-1].path == f"/fleet/v1/traces?last={limits.TRACES}"
    assert json.loads(run("trace", part, "--json", home=tracing.home).stdout) == FALLBACK


def test_one_by_the_id_that_the_client_was_told(run: Run, tracing: FakeDaemon) -> None:
    """An answer's own id goes on after it, and more so where another machine asked for it."""
    mine = {**SHARED, "id": f"{SHARED['id']}-0.4f2a7e6f90b5"}
    tracing.on("GET", "/fleet/v1/traces", Reply({"traces": [FALLBACK, mine]}))
    assert run("trace", SHARED["id"], home=tracing.home).stdout == shown(mine, None) + "\n"


def test_a_part_that_two_have_names_neither(run: Run, tracing: FakeDaemon) -> None:
    twins = [{**SHARED, "id": f"{SHARED['id']}-{i}"} for i in range(2)]
    tracing.on("GET", "/fleet/v1/traces", Reply({"traces": twins}))
    done = run("trace", SHARED["id"], home=tracing.home)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
    assert f"Several requests are called like that: {SHARED['id']}-0, {SHARED['id']}-1." in done.stderr


def test_a_prompt_that_was_shortened_and_then_shared_has_two_pages(run: Run, tracing: FakeDaemon) -> None:
    smart = {**SHARED, "chosen": {**SHARED["chosen"], "kind": "smart"}, "outcome": "smart"}
    shared = {**SHARED, "kept_tokens": 1200, "exactness": "lossy"}
    tracing.on("GET", "/fleet/v1/traces", Reply({"traces": [smart, shared]}))
    done = run("trace", SHARED["id"], home=tracing.home)
    assert done.stdout == f"{shown(smart, None)}\n\n{shown(shared, None)}\n"
    assert json.loads(run("trace", SHARED["id"], "--json", home=tracing.home).stdout) == {
        "traces": [smart, shared]
    }


def test_of_a_prompt_in_part_it_says_how_much_was_read() -> None:
    sparse = {**SHARED, "kept_tokens": 1200, "exactness": "lossy"}
    said = shown(sparse)
    assert "prompt       4,000 tokens, 1,200 of them kept\n" in said
    assert "read by several machines · lossy" in said
    assert re.split("  +", listed([sparse], None)[1])[3] == "1,200 of 4,000"


@pytest.mark.parametrize("request_id", ["nobody-knows-it", "111", ""])
def test_a_request_without_a_trace(run: Run, tracing: FakeDaemon, request_id: str) -> None:
    done = run("trace", request_id, home=tracing.home)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
    assert "There is no trace of a request" in done.stderr


def test_counts_that_make_no_sense_never_reach_the_daemon(run: Run, tracing: FakeDaemon) -> None:
    for last in ("0", str(limits.TRACES + 1), "x"):
        assert run("trace", "--last", last, home=tracing.home).returncode == Exit.USAGE
    assert tracing.seen == []


# ---- Drafts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved_s", "said"), [(0.35, "saved 0.35 s"), (-0.02, "lost 20 ms")])
def test_what_drafts_did_is_told_source_by_source(saved_s: float, said: str) -> None:
    told = Speculated(
        16, 20, 12, 30, 42, saved_s, {"lookup": SourceCounts(8, 5, 2), "drafter": SourceCounts(12, 7, 3)}
    )
    drafted = {**SHARED, "speculation": msgspec.to_builtins(told)}
    lookup, rest = "lookup 5 of 8 (62 %) in 2 passes", f"1.40 tokens per pass of up to 16; {said}"
    assert f"right: drafter 7 of 12 (58 %) in 3 passes, {lookup}; {rest}" in shown(drafted, None)
    drafted["drafter"] = {"model": "small", "machine": "studio"}
    assert f"right: drafter (small on studio) 7 of 12 (58 %) in 3 passes, {lookup}; {rest}" in shown(
        drafted, None
    )
    assert "drafts" not in shown(SHARED)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (SourceCounts(9, 9, 3, 256, 256), "from 256 tokens' hidden states on"),
        (SourceCounts(9, 9, 3, 12, 256), "from 12 of 256 tokens' hidden states on"),
        (SourceCounts(9, 9, 3), "9 of 9 (100 %) in 3 passes;"),
    ],
)
def test_a_source_says_with_how_much_of_the_prompt_it_began(counts: SourceCounts, said: str) -> None:
    told = Speculated(16, 9, 9, 10, 42, 0.5, {"mtp": counts})
    assert said in shown({**SHARED, "speculation": msgspec.to_builtins(told)}, None)


def test_the_machines_of_a_model_over_several_are_told_with_what_a_step_takes_there() -> None:
    stages = [
        GroupStage("", 0, 11, 0.024, 0.0, 40),
        GroupStage("studio", 11, 30, 0.031, 0.0004, 40),
        GroupStage("kitchen", 30, 40, relayed=True),
    ]
    found = shown({**SHARED, "machine": "laptop", "stages": msgspec.to_builtins(stages)}, None)
    assert "stages       layers 0-10 on laptop, 24 ms a step\n" in found
    assert f"{'':13}layers 11-29 on studio, 31 ms a step, 0.4 ms on the way\n" in found
    assert f"{'':13}layers 30-39 on kitchen, reached through this machine\n" in found
    assert "stages" not in shown(SHARED)


def test_a_drafter_that_came_too_late_is_named_all_the_same() -> None:
    found = shown({**SHARED, "drafter": {"model": "small", "machine": "studio"}}, None)
    assert ("drafts       small on studio was asked; none of its drafts was verified\n") in found


def test_a_drafter_elsewhere_has_its_steps_and_one_that_was_lost_its_reason() -> None:
    drafter = {"model": "small", "machine": "studio"}
    drafted = {"name": "drafted", "machine": "studio", "begin_s": 1.0, "end_s": 1.5, "seconds": 0.49}
    steps = [*SHARED["steps"], {**drafted, "parent": 0}]
    assert re.search(
        "\n  drafted +studio +- +0.49 s", shown({**SHARED, "steps": steps, "drafter": drafter}, None)
    )
    lost = {**drafter, "code": "peer_lost", "reason": "studio: It went away."}
    assert "small on studio did not draft to the end: studio: It went away (peer_lost)" in shown(
        {**SHARED, "drafter": lost}, None
    )
