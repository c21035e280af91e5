"""`fleetctl plan`: what is asked of the daemon, and the table of candidates at every width."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from fake_daemon import FakeDaemon, Reply, Run
from hypothesis import given
from hypothesis import strategies as st
from shares import LAYERS, LOCAL, PLAN, TOKENS

from fleetctl.connection.replies import read
from fleetctl.exits import Exit
from fleetctl.render.added_page import added_page
from fleetctl.render.plan_words import deviation, division, prompt
from fleetctl.render.text import brief
from fleetctl.verbs.plan import render
from fleetd import limits
from fleetd.control.prefill_plan import AddedQuestion, AddedView, OptionView, PlanQuestion, PlanView


def page(value: dict[str, Any], width: int | None = 80) -> str:
    return click.unstyle(render(read(value, PlanView), width))


# ---- The page --------------------------------------------------------------------------------------------


def test_candidates_with_their_prices_and_why_not() -> None:
    assert page(PLAN) == (
        "smollm2-135m · a prompt of 4,000 tokens\n"
        "\n"
        "   PLAN    MACHINES       FIRST TOKEN  SPEED\n"
        "*  layers  studio + this       1.06 s  1.81x\n"
        "   tokens  studio + this       1.12 s  1.71x\n"
        "     6 % slower than layers with studio.\n"
        "   local   this                1.92 s  1.00x\n"
        "     81 % slower than layers with studio.\n"
        "   -       air                      -      -\n"
        "     air has no model with these files.\n"
        "\n"
        "* layers: studio 0 to 14, this 15 to 29, in chunks of 256 tokens\n"
        "  agreed              4.0 ms\n"
        "  prefix sent           0 ms\n"
        "  waited              0.12 s\n"
        "  computed            0.90 s\n"
        "  exposed hand-off     36 ms"
    )


def test_the_time_of_a_model_that_has_to_be_fetched_is_called_a_guess() -> None:
    pulled = {**LOCAL, "chosen": True, "predicted_s": 120.0, "steps": [{"name": "pulled", "seconds": 120.0}]}
    told = "The files of smollm2-135m are fetched first. The time is a guess for that alone"
    assert told in page({**PLAN, "options": [pulled]}, None)
    assert "guess" not in page(PLAN)


CAPPED = "liar claims prefill of 1e+12 tok/s, of which 32,000 are believed: its hardware can do no more."


def test_claims_that_are_not_believed_are_told() -> None:
    assert page({**PLAN, "capped": [CAPPED]}, None) == page(PLAN, None) + f"\n\n{CAPPED}"


def test_another_machine_that_answers_with_helpers_of_its_own_and_what_cannot() -> None:
    options = [
        {
            "kind": "remote",
            "nodes": ["studio", "mini"],
            "prefill": "layers",
            "predicted_s": 2.5,
            "chosen": True,
            "steps": [{"name": "loaded", "seconds": 1.5}, {"name": "computed", "seconds": 1.0}],
        },
        {"kind": "any", "nodes": ["this"], "code": "absent", "reason": "this does not have m."},
    ]
    assert page({"model": "m", "prompt_tokens": 4000, "options": options}) == (
        "m · a prompt of 4,000 tokens\n"
        "\n"
        "   PLAN             MACHINES       FIRST TOKEN  SPEED\n"
        "*  remote + layers  studio + mini       2.50 s      -\n"
        "   -                this                     -      -\n"
        "     this does not have m.\n"
        "\n"
        "* remote: studio answers, layers with mini\n"
        "  loaded      1.50 s\n"
        "  computed    1.00 s"
    )


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        (
            {"sources": ["suffix", "lookup"], "width": 16},
            "Drafting: on, up to 16 tokens at a time, same text. Sources: suffix, prompt lookup.",
        ),
        (
            {
                "sources": ["drafter", "suffix", "lookup"],
                "width": 4,
                "draft_model": "small",
                "drafters": ["studio", "this"],
            },
            "Drafting: on, up to 4 tokens at a time, same text. Sources: small on studio (else this), "
            "suffix, prompt lookup.",
        ),
        (
            {"sources": ["suffix", "lookup"], "width": 8, "draft_model": "small"},
            "Drafting: on, up to 8 tokens at a time, same text. Sources: suffix, prompt lookup. No "
            "machine can draft with small now.",
        ),
        (
            {
                "sources": ["lookup"],
                "width": 8,
                "draft_model": "small",
                "no_room": "small needs 4.0 GB beside m here; 1.5 GB are free.",
            },
            "Drafting: on, up to 8 tokens at a time, same text. Sources: prompt lookup. No machine can draft "
            "with small now. small needs 4.0 GB beside m here; 1.5 GB are free.",
        ),
        ({"reason": "declined: its kernels differ"}, "Drafting: off, declined: its kernels differ."),
    ],
)
def test_who_would_draft_for_the_answer(drafts: dict[str, Any], said: str) -> None:
    found = page({**PLAN, "drafts": {"verdict": "exact: for the test", **drafts}}, None)
    assert found.split("\n\n")[-1] == said
    assert "Drafts" not in page(PLAN)


def test_a_narrow_terminal_keeps_the_plans_and_their_prices() -> None:
    lines = page(PLAN, 30).splitlines()
    assert all(len(line) <= 30 for line in lines)
    assert re.findall(r"^[ *] +([\w-]+) +([\d.]+ s|-)$", page(PLAN, 30).split("\n\n")[1], re.MULTILINE) == [
        ("layers", "1.06 s"), ("tokens", "1.12 s"), ("local", "1.92 s"), ("-", "-"),
    ]  # fmt: skip


def test_a_prompt_that_is_known_in_part_says_so() -> None:
    said = page({**PLAN, "cached_tokens": 1024}).splitlines()[0]
    assert said == "smollm2-135m · a prompt of 4,000 tokens, 1,024 of them known already"


def test_where_what_is_not_computed_comes_from() -> None:
    told = {"cached_tokens": 3072, "restored_tokens": 1024, "fetched_tokens": 2048, "fetched_from": "studio"}
    shown = page({**PLAN, "options": [{**LOCAL, **told}, {**LOCAL, "cached_tokens": 512}]}, None)
    header, first, _, second, _ = shown.splitlines()[2:7]
    assert header.endswith("KNOWN  FROM")
    assert first.endswith("3,072  disk, studio")
    assert second.endswith("512")


def test_a_daemon_without_others_has_one_plan() -> None:
    assert page({**PLAN, "options": [{**LOCAL, "chosen": True, "reason": ""}]}).splitlines()[2:] == [
        "   PLAN   MACHINES  FIRST TOKEN  SPEED",
        "*  local  this           1.92 s  1.00x",
    ]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (LAYERS, "layers: studio 0 to 14, this 15 to 29, in chunks of 256 tokens"),
        (
            {"kind": "tokens", "nodes": ["a", "b", "this"], "cuts": [16, 2064, 4112, 8000], "chunk": 512},
            "tokens: a 16 to 2,063, b 2,064 to 4,111, this 4,112 to 7,999, in chunks of 512 tokens",
        ),
        ({"kind": "whole", "nodes": ["studio", "this"], "cuts": [0, 30, 30]}, "whole: all of it on studio"),
        (LOCAL, "local"),
        ({"kind": "remote", "nodes": ["studio"], "prefill": "local"}, "remote: studio answers"),
        (
            {"kind": "remote", "nodes": ["studio", "mini"], "prefill": "layers"},
            "remote: studio answers, layers with mini",
        ),
        ({"kind": "smart", "nodes": ["mini", "this"], "prefill": "local"}, "smart"),
        ({"kind": "smart", "nodes": ["mini", "studio"], "prefill": "remote"}, "smart + remote"),
        ({"kind": "smart", "nodes": ["this"], "prefill": "local", "form": "sparse"}, "smart sparse"),
        (
            {"kind": "smart", "nodes": ["a", "this"], "prefill": "tokens", "form": "text"},
            "smart text + tokens",
        ),
        ({**LAYERS, "cuts": [0, 1]}, "layers"),
        ({}, "-"),
    ],
)
def test_who_computes_what(option: dict[str, Any], said: str) -> None:
    assert division(read(option, OptionView)) == said


@pytest.mark.parametrize(
    ("actual_s", "predicted_s", "said"),
    [
        (1.1, 1.0, "+10 %"), (0.5, 1.0, "-50 %"), (1.0, 1.0, "+0 %"), (40.0, 1.0, "40x"),
        (None, 1.0, "-"), (1.0, None, "-"), (1.0, 0.0, "-"),
    ],
)  # fmt: skip
def test_actual_against_predicted(actual_s: float | None, predicted_s: float | None, said: str) -> None:
    assert deviation(actual_s, predicted_s) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0042, "4.2 ms"),
        (0.042, "42 ms"),
        (0.1, "0.10 s"),
        (10.93, "10.9 s"),
        (140, "2 min 20 s"),
    ],
)
def test_steps_are_told_in_milliseconds_where_they_are_short(seconds: float | None, said: str) -> None:
    assert brief(seconds) == said


@given(width=st.integers(1, 200), text=st.text(max_size=64), seconds=st.floats(0, 1e6) | st.none())
def test_any_plan_has_a_page_without_control_characters(width: int, text: str, seconds: float | None) -> None:
    """Names and reasons come from other machines."""
    option = {**LAYERS, "kind": text, "nodes": [text, "this"], "predicted_s": seconds, "reason": text}
    steps = [{"name": text, "seconds": 1.0, "machine": text}]
    value = {"model": text, "options": [option, {**LAYERS, "nodes": [text], "steps": steps}]}
    for each in (width, None):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", page(value, each))


# ---- The command -----------------------------------------------------------------------------------------


@pytest.fixture
def planning(daemon: FakeDaemon) -> FakeDaemon:
    daemon.on("POST", "/fleet/v1/plan", Reply(PLAN))
    return daemon


def asked(daemon: FakeDaemon) -> Any:
    """What was asked, which the daemon must understand."""
    body = daemon.seen[-1].body
    msgspec.convert(body, PlanQuestion)
    return body


def test_a_count_of_tokens(run: Run, planning: FakeDaemon) -> None:
    done = run("plan", "--tokens", "4000", "--cached", "16", "-m", "smollm2-135m", home=planning.home)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", page(PLAN, None) + "\n")
    assert asked(planning) == {"model": "smollm2-135m", "cached": 16, "tokens": 4000}


def test_a_file_or_a_pipe(run: Run, planning: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("żółć\n", encoding="utf-8")
    done = run("plan", str(tmp_path / "prompt.txt"), home=planning.home)
    # Only the engine can count tokens.
    assert (done.returncode, " a prompt of about 4,000 tokens\n" in done.stdout) == (0, True)
    assert asked(planning) == {"model": "", "cached": 0, "text": "żółć\n"}
    assert run("plan", "-", home=planning.home, stdin="piped").returncode == 0
    assert asked(planning) == {"model": "", "cached": 0, "text": "piped"}


def test_json_is_what_the_daemon_said(run: Run, planning: FakeDaemon) -> None:
    done = run("plan", "--tokens", "4000", "--json", home=planning.home)
    assert json.loads(done.stdout) == PLAN


@pytest.mark.parametrize(
    "arguments", [(), ("-", "--tokens", "5"), ("--tokens", "0"), ("--cached", "-1", "-")]
)
def test_what_cannot_be_asked_never_reaches_the_daemon(
    run: Run, planning: FakeDaemon, arguments: tuple[str, ...]
) -> None:
    assert run("plan", *arguments, home=planning.home, stdin="x").returncode == Exit.USAGE
    assert planning.seen == []


def test_a_file_that_is_missing_no_text_or_too_long(run: Run, planning: FakeDaemon, tmp_path: Path) -> None:
    done = run("plan", str(tmp_path / "none"), home=planning.home)
    assert (done.returncode, "No such file" in done.stderr) == (Exit.ERROR, True)
    (tmp_path / "photo").write_bytes(b"ok\xff\xfe")
    done = run("plan", str(tmp_path / "photo"), home=planning.home)
    assert (done.returncode, "photo is not UTF-8 text (byte 3)" in done.stderr) == (Exit.ERROR, True)
    with (tmp_path / "long").open("wb") as file:
        file.truncate(limits.HTTP_BODY_BYTES + 1)
    done = run("plan", str(tmp_path / "long"), home=planning.home)
    assert (done.returncode, "long holds more than" in done.stderr) == (Exit.ERROR, True)
    assert planning.seen == []


def test_a_daemon_without_plans_is_an_error(run: Run, daemon: FakeDaemon) -> None:
    done = run("plan", "--tokens", "4000", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.REFUSED, "")


def test_a_prompt_says_where_its_known_part_came_from() -> None:
    assert prompt(4000, 3072) == "4,000 tokens, 3,072 of them known already"
    assert prompt(4000, 3072, restored=1024, fetched=2048, fetched_from="studio").endswith(
        "known already (1,024 from the disk, 2,048 from studio)"
    )


def test_a_way_that_needs_a_load_first_stands_apart_without_a_speed() -> None:
    """The star stood on a row that was slower than the one below it, which was not possible."""
    cold = {
        **TOKENS,
        "predicted_s": 0.9,
        "code": "cold",
        "reason": "studio would have to load the model first.",
    }
    _, options, *_ = page({**PLAN, "options": [LAYERS, cold, LOCAL]}, None).split("\n\n")
    rows = options.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["*", "local"]
    assert rows[-2:] == [
        "Not now, as a machine would have to load the model first:",
        "   tokens: studio would have to load the model first.",
    ]
    assert "0.90 s" not in options


# ---- With one more machine -------------------------------------------------------------------------------

MINI = "Mac mini M4, 16 GB"
ADDED: dict[str, Any] = {
    "model": "smollm2-135m",
    "machine": MINI,
    "link": "wired",
    "layers_held": 30,
    "layers": 30,
    "points": [
        {"tokens": 1024, "alone_s": 1.0, "fleet_s": 1.0, "added_s": 1.0, "kind": "local", "nodes": ["this"]},
        {"tokens": 4096, "alone_s": 4.0, "fleet_s": 4.0, "added_s": 2.0, "kind": "layers"}
        | {"nodes": [MINI, "this"]},
        {
            "tokens": 16384,
            "alone_s": 40.0,
            "fleet_s": 40.0,
            "added_s": 10.0,
            "kind": "remote",
            "nodes": [MINI],
        },
    ],
}


def with_page(width: int | None = 80, **changes: Any) -> str:
    return added_page(read({**ADDED, **changes}, AddedView), width)


def test_what_one_more_machine_would_give_is_called_modelled() -> None:
    assert with_page() == (
        "smollm2-135m with Mac mini M4, 16 GB over gigabit Ethernet: modelled times to\n"
        "the first token\n"
        "\n"
        "PROMPT   ALONE  WITH IT   GAIN  HOW\n"
        " 1,024  1.00 s   1.00 s  1.00x  alone\n"
        " 4,096  4.00 s   2.00 s  2.00x  layers shared with Mac mini M4, 16 GB\n"
        "16,384  40.0 s   10.0 s  4.00x  all on Mac mini M4, 16 GB\n"
        "\n"
        "Modelled: by the published figures of Mac mini M4, 16 GB, this machine's speed\n"
        "as measured, the model loaded everywhere, and no other request. Real machines\n"
        "and networks differ."
    )


def test_a_gain_is_against_the_fleet_as_it_is() -> None:
    points = [{**point, "fleet_s": point["alone_s"] / 2} for point in ADDED["points"]]
    header, first, *_ = with_page(None, points=points).split("\n\n")[1].splitlines()
    assert header.split("  ")[:3] == ["PROMPT", " ALONE", "FLEET NOW"]
    assert first.split()[-2:] == ["0.50x", "alone"]


def test_a_machine_without_room_for_the_model_is_told_so() -> None:
    assert "has room for 12 of 30 layers of smollm2-135m: it can help" in with_page(None, layers_held=12)
    assert "has room for no layer of smollm2-135m: it cannot help." in with_page(None, layers_held=0)
    assert "modelled too" in with_page(None, modelled_here=True)
    assert "in doubt: other programs ran." in with_page(None, doubt="other programs ran")


def test_a_machine_is_added_by_its_name(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/fleet/v1/plan/added", Reply(ADDED))
    done = run("plan", "--with", "mac mini m4 16gb", "--link", "wifi", "-m", "x", home=daemon.home)
    assert daemon.seen[-1].body == {"model": "x", "machine": "mac mini m4 16gb", "link": "wifi"}
    assert msgspec.convert(daemon.seen[-1].body, AddedQuestion).link == "wifi"
    assert "2.00x  layers shared with Mac mini M4" in done.stdout
    assert json.loads(run("plan", "--with", MINI, "--json", home=daemon.home).stdout) == ADDED
    daemon.on("GET", "/fleet/v1/plan/machines", Reply({"machines": [MINI, "iMac M4, 16 GB"]}))
    assert run("plan", "--with", "list", home=daemon.home).stdout == f"{MINI}\niMac M4, 16 GB\n"
    assert run("plan", "--with", MINI, "--tokens", "5", home=daemon.home).returncode == Exit.USAGE
