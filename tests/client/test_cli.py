"""fleetctl as a process: exit codes, which stream gets what, every verb, --json everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from fake_daemon import FLEET, FLEETCTL, REPO, STATUS, FakeDaemon, Reply, Run, data
from interrupting import interrupt
from terminals import FakeTerminal

from fleetctl.cli import VERBS, fleetctl, main
from fleetctl.exits import Exit
from fleetctl.render.models_table import models_page, recommended_line
from fleetctl.verb_table import GROUPS, INSTEAD
from fleetctl.verbs import status, usage
from fleetd import errors
from fleetd.control import model_change
from fleetd.control.model_listing import InstalledModel, ModelListing
from fleetd.control.usage_report import UsageReport, UsageRow, UsageTotals

NOT_FOUND = Reply(
    {"error": {"message": "Unknown model foo.", "code": "model_not_found", "hint": "Try bar."}}, 404
)
FAILED = Reply({"error": {"message": "Bits flipped in a.bin.", "code": "model_corrupt", "hint": ""}}, 500)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with its words."""
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += leaves(child, (*path, name))
    return found


def groups(command: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command that has others."""
    context = click.Context(command)
    children = ((name, command.get_command(context, name)) for name in command.list_commands(context))
    return [
        found
        for name, child in children
        if isinstance(child, click.Group)
        for found in ((*path, name), *groups(child, (*path, name)))
    ]


# ---- The command line itself -----------------------------------------------------------------------------


def test_help_lists_verbs_and_exit_codes(run: Run) -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in shown.stdout
    for code in Exit:
        assert f" {code.value}  {code.meaning}" in shown.stdout


@pytest.mark.parametrize("path", [(), *groups(fleetctl)], ids=" ".join)
def test_no_line_of_the_help_is_cut_or_wider_than_80(
    run: Run, env: dict[str, str], path: tuple[str, ...]
) -> None:
    env["COLUMNS"] = "80"
    lines = run(*path, "--help").stdout.splitlines()
    assert not [line for line in lines[1:] if line.endswith("...") or len(line) > 80]


def test_the_exit_codes_of_the_help_are_broken_between_words(run: Run, env: dict[str, str]) -> None:
    env["COLUMNS"] = "60"
    lines = run("--help").stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert "    7  another machine is at fault, or none can run the" in lines


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pull", "That is `fleetctl models pull`."),
        ("logs", "journalctl --user -u fleetd"),
        ("stop", "Ctrl-C ends `fleetd run`"),
        ("config", "`fleetd config show`"),
        ("statuss", "Did you mean 'status'?"),
    ],
)
def test_what_is_no_verb_leads_to_what_is_meant(run: Run, word: str, said: str) -> None:
    done = run(word)
    assert done.returncode == Exit.USAGE
    assert f"No such command '{word}'. " in done.stderr
    assert said in done.stderr


def test_what_is_wrong_with_a_command_line_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["logs"]) == Exit.USAGE
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert "Try 'fleetctl --help' for help." in lines
    assert "Error: No such command 'logs'. The log is in the terminal of" in lines


def test_other_words_than_verbs_are_no_verbs_and_name_commands_that_there_are() -> None:
    context = click.Context(fleetctl)
    assert not set(INSTEAD) & set(VERBS)
    for said in INSTEAD.values():
        for verb, inner in re.findall(r"`fleetctl ([a-z]+)(?: ([a-z]+))?", said):
            command = fleetctl.get_command(context, verb)
            assert command is not None, said
            if inner:
                assert isinstance(command, click.Group)
                assert inner in command.commands, said


def test_the_help_says_of_each_verb_in_few_words_what_it_does() -> None:
    assert all(0 < len(what) < 50 for verbs in GROUPS.values() for what in verbs.values())


def test_alone_it_shows_the_state_and_three_next_steps(run: Run, daemon: FakeDaemon) -> None:
    done = run(home=daemon.home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "fleetd 0.1.0 is ready, up 2 h 2 min\n"
        "smollm2-135m is loaded\n"
        "5.0 GB of memory are free\n"
        "the fleet is off\n"
        "\n"
        "  fleetctl chat    ask something\n"
        "  fleetctl open    see the fleet in a browser\n"
        "  fleetctl models  see which larger models fit\n"
        "\n"
        "`fleetctl --help` lists all commands.\n"
    )
    assert json.loads(run("--json", home=daemon.home).stdout)["running"] is True


@pytest.mark.parametrize(
    ("peers", "context", "line", "step"),
    [
        ([], 0, "no other machine is paired", "fleetctl pair  let another machine help"),
        (
            [("studio", "usable")],
            40_960,
            "paired with studio",
            "fleetctl launch claude  start a coding agent",
        ),
        ([("studio", "usable")], 8_192, "paired with studio", "fleetctl models  see which larger models fit"),
        ([("studio", "usable")], 0, "paired with studio", "fleetctl models  see which larger models fit"),
        (
            [("studio", "usable"), ("air", "unreachable")],
            0,
            "paired with studio; air cannot be used now",
            "fleetctl peers  see why a machine cannot be used",
        ),
    ],
)
def test_the_next_steps_follow_from_the_fleet(
    run: Run, daemon: FakeDaemon, peers: list[tuple[str, str]], context: int, line: str, step: str
) -> None:
    fleet = {"enabled": True, "peers": [{"name": name, "state": state} for name, state in peers]}
    loaded = {"model": "m", "state": "ready", "shape": {"context_tokens": context}}
    state = {**STATUS, "engines": [loaded] if context else [], "fleet": fleet}
    daemon.on("GET", "/fleet/v1/status", Reply(state))
    shown = run(home=daemon.home).stdout
    said = "m is loaded" if context else "no model is loaded; smollm2-135m loads with the first question"
    assert f"\n{said}\n" in shown
    assert f"\n{line}\n" in shown
    assert step in shown


def test_alone_it_tells_loaded_from_loading_and_from_fetched(run: Run, daemon: FakeDaemon) -> None:
    part = {"model": "n~ab[0:4]", "part_of": "n", "state": "ready"}
    engines = [part, {"model": "m", "state": "loading"}, {"model": "gone", "state": "failed"}]
    pulls = [
        {"model": "q", "stage": "downloading q.safetensors", "done_bytes": 5, "total_bytes": 9},
        {"model": "r"},
    ]
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "engines": engines, "pulls": pulls}))
    shown = run(home=daemon.home).stdout.splitlines()
    assert shown[1:4] == ["a part of n is loaded", "m is being loaded", "q and r are being fetched"]
    told = run("status", home=daemon.home).stdout.splitlines()
    assert told[-2:] == ["q: downloading q.safetensors, 5 B of 9 B", "r: being fetched"]


def test_while_a_model_loads_status_says_why_once_more_and_not_that_it_is_loaded(
    run: Run, daemon: FakeDaemon
) -> None:
    steps = [{"name": "starting", "seconds": 2.0}]
    engine = {"model": "m", "state": "loading", "again": "studio left the group: it is stopping."}
    engine |= {"load_steps": steps, "restarts": 1}
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "engines": [engine]}))
    shown = run("status", home=daemon.home).stdout
    assert "m: loaded once more, as an answer goes on: studio left the group: it is stopping\n" in shown
    assert "m: loading took so far 2.00 s: starting 2.00 s" in shown
    assert shown.splitlines()[-3].endswith("  1 restart")


def test_status_says_how_far_running_requests_are(run: Run, daemon: FakeDaemon) -> None:
    reading = {"model": "m", "stage": "reading the prompt", "done": 1280, "total": 4367}
    reading["client"] = "claude-cli"
    vectors = {"model": "v", "stage": "making vectors", "done": 2, "total": 9}
    vectors["plan"] = {"kind": "remote", "nodes": ["air", "studio"]}
    running = [{**reading, "age_s": 12.0}, {**vectors, "age_s": 75.0}]
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "running": running}))
    shown = run("status", home=daemon.home).stdout
    assert shown.endswith(
        "\n\nRUNNING\n"
        "m: reading the prompt, 1,280 of 4,367, for claude-cli, since 12 s\n"
        "v: making vectors, 2 of 9, remote: air and studio, since 1 min 15 s\n"
    )


def test_alone_without_a_daemon_it_says_how_to_start_one(run: Run, short_dir: Path) -> None:
    done = run(home=short_dir / "nope")
    assert done.returncode == 0
    assert f"fleetd does not run here (home {short_dir / 'nope'})." in done.stdout
    assert "fleetctl service install" in done.stdout


def test_only_verbs_that_work_exist() -> None:
    assert set(VERBS) == {
        "cache", "chat", "completion", "compress", "doctor", "embed", "env", "join", "launch", "models",
        "open", "pair", "peers", "plan", "rerank", "service", "status", "trace", "unpair", "usage",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "command"), leaves(fleetctl), ids=lambda v: " ".join(v) if isinstance(v, tuple) else ""
)
def test_every_command_takes_json_and_explains_itself(path: tuple[str, ...], command: click.Command) -> None:
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{path}: {parameter.name}"


def test_version(run: Run) -> None:
    import fleetd

    assert run("--version").stdout == f"fleetctl {fleetd.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["--home", "/a", "--socket", "/b", "status"],
        ["usage", "--days", "0"],
    ],
)
def test_a_wrong_command_line_is_2(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == Exit.USAGE
    assert done.stdout == ""
    assert "Usage:" in done.stderr


def test_a_mistyped_verb_gets_the_nearest(run: Run) -> None:
    assert "Did you mean 'status'?" in run("statsu").stderr


@pytest.mark.parametrize("verb", ["settings", "config"])
def test_a_verb_of_another_program_is_named(run: Run, verb: str) -> None:
    assert "`fleetd config show` lists the settings" in run(verb).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["chat", "hello"],
        ["models"],
        ["models", "pull", "x"],
        ["models", "verify", "x"],
        ["models", "load", "x"],
        ["models", "unload", "x"],
        ["models", "pin", "x"],
        ["models", "remove", "-y", "x"],
        ["env"],
        ["usage"],
        ["peers"],
        ["peers", "--watch"],
        ["peers", "prompts", "x", "yes"],
        ["pair", "--yes"],
        ["join", "42-lusab-babad", "--yes"],
        ["unpair", "x", "--yes"],
    ],
)
def test_no_daemon_is_3_and_says_how_to_start_one(run: Run, short_dir: Path, arguments: list[str]) -> None:
    done = run(*arguments, home=short_dir / "nope")
    assert done.returncode == Exit.NO_DAEMON
    assert done.stdout == ""
    assert "does not exist" in done.stderr
    assert "fleetd run" in done.stderr
    assert "service install" in done.stderr


def test_errors_as_json_go_to_stderr(run: Run, short_dir: Path) -> None:
    done = run("status", "--json", home=short_dir / "nope")
    error = json.loads(done.stderr)["error"]
    assert (done.stdout, error["code"], error["exit"]) == ("", "no_daemon", 3)
    assert "fleetd run" in error["hint"]


def test_refused_is_4_and_failed_is_5(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/fleet/v1/models/load", NOT_FOUND, FAILED)
    refused = run("models", "load", "foo", home=daemon.home)
    assert (refused.returncode, refused.stderr) == (Exit.REFUSED, "error: Unknown model foo.\nTry bar.\n")
    failed = run("models", "load", "foo", home=daemon.home)
    assert (failed.returncode, failed.stderr) == (Exit.FAILED, "error: Bits flipped in a.bin.\n")


def test_pairing_is_6_and_another_machine_is_7(run: Run, daemon: FakeDaemon) -> None:
    kinds = (errors.PairingClosed, errors.NotPaired, errors.PeerUnreachable, errors.NoMachine)
    codes = []
    for kind in kinds:
        body = {"error": {"message": "It broke.", "code": kind.code, "hint": ""}}
        daemon.on("GET", "/fleet/v1/status", Reply(body, kind.status))
        codes.append(run("status", home=daemon.home).returncode)
    assert codes == [Exit.PAIRING, Exit.PAIRING, Exit.PEER, Exit.PEER]


def test_a_reader_that_leaves_is_not_a_traceback(daemon: FakeDaemon, env: dict[str, str]) -> None:
    many = {
        "installed": [{"name": "m" * 100 + str(i), "weights_bytes": 1} for i in range(5000)],
        "catalog": [],
    }
    daemon.on("GET", "/fleet/v1/models", Reply(many))
    command = [*FLEETCTL, "--home", str(daemon.home), "models"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
    assert b"Traceback" not in err
    assert process.returncode == Exit.ERROR


# ---- status ----------------------------------------------------------------------------------------------


def test_status_for_people(run: Run, daemon: FakeDaemon) -> None:
    done = run("status", home=daemon.home)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "fleetd 0.1.0 · ready · up 2 h 2 min",
        "http://127.0.0.1:8114/v1",
        "Test CPU, 2 cores · 8.0 GB memory, 5.0 GB free · tier tiny",
        "1 running, 2 waiting, 1,234 completed, 0 failed",
        "12.0 MB of 1.0 GB",
        "1 decoding, 2 waiting",
    ):
        assert part in done.stdout


@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_line_of_a_page_is_wider_than_the_terminal(width: int) -> None:
    steps = [{"name": "reading the tokenizer", "seconds": 0.98}] * 6
    engine = {**STATUS["engines"][0], "load_steps": steps, "error": "Out of memory: 12.5 GB needed."}
    page = status.render({**STATUS, "engines": [engine]}, width)
    assert max(map(len, page.splitlines())) <= width
    # What matters most of an engine stays, and no figure leaves its unit.
    assert "1 decoding, 2 waiting" in page
    assert not [line for line in page.splitlines() if line.startswith(("GB", "s,", "          GB"))]
    used = UsageRow(day="2026-11-27", model="smollm2-135m", requests=5, prompt_tokens=8937, saved_s=21.8)
    table = usage.render(UsageReport([used], UsageTotals(requests=5)), 7, max(width, 60))
    assert max(map(len, table.splitlines())) <= max(width, 60)
    assert "21.8 s" in table


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"ollama": {"host": "127.0.0.1", "port": 11434}}, "http://127.0.0.1:11434, without a token"),
        ({"ollama_missing": "another program listens"}, "not served: another program listens"),
    ],
)
def test_status_of_the_address_for_ollamas_clients(
    run: Run, daemon: FakeDaemon, fields: dict[str, Any], shown: str
) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, **fields}))
    assert f"ollama    {shown}" in run("status", home=daemon.home).stdout


@pytest.mark.parametrize("place", [("--json", "status"), ("status", "--json")])
def test_status_json_before_and_after_the_verb(run: Run, daemon: FakeDaemon, place: tuple[str, ...]) -> None:
    assert json.loads(run(*place, home=daemon.home).stdout) == STATUS


def test_status_by_socket(run: Run, daemon: FakeDaemon) -> None:
    assert run("--socket", str(daemon.socket), "status").returncode == 0


def engine(**changes: Any) -> Reply:
    return Reply({**STATUS, "engines": [{**STATUS["engines"][0], **changes}]})


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"state": "loading", "stage": "reading", "done": 1, "total": 4}, "loading: reading 25 %"),
        ({"progress_age_s": 42.0}, "no progress for 42 s"),
        ({"state": "failed", "error": "out of memory"}, "smollm2-135m: out of memory"),
        ({"decoding": 0, "waiting": 0, "idle_s": 75.0}, "idle 1 min 15 s"),
        ({"speed": {"prefill_tok_s": 1377.2, "decode_tok_s": 16.93}}, "1,377 tok/s  16.9 tok/s"),
        ({"speed": {"prefill_tok_s": 99.96}}, "100 tok/s       -"),
        ({"model": "\x1b[31mred"}, "\\x1b[31mred"),
        (
            {"speed": {"doubt": "CPU 60 % busy with other programs when measured"}},
            "smollm2-135m: speeds in doubt (CPU 60 % busy with other programs when measured); "
            "they will be measured again",
        ),
        (
            {"load_steps": [{"name": "reading", "seconds": 1.25}, {"name": "warming up", "seconds": 0.25}]},
            "smollm2-135m: loaded in 1.50 s: reading 1.25 s, warming up 0.25 s",
        ),
        (
            {"speculation": "declined: other bytes at width 2"},
            "smollm2-135m: decoded without drafts, declined: other bytes at width 2",
        ),
        (
            {"speculation": "exact: blocks of up to 9 tokens; single tokens are computed as 2 rows"},
            "smollm2-135m: drafts are exact: blocks of up to 9 tokens; single tokens are computed as 2 rows",
        ),
        (
            {"draft_head": "off: there is no memory for it"},
            "smollm2-135m: its head is off: there is no memory for it",
        ),
    ],
)
def test_status_of_an_engine(run: Run, daemon: FakeDaemon, changes: dict[str, Any], shown: str) -> None:
    daemon.on("GET", "/fleet/v1/status", engine(**changes))
    assert shown in run("status", home=daemon.home).stdout


def test_status_of_a_machine_with_a_gpu_of_its_own(run: Run, daemon: FakeDaemon) -> None:
    named = {"product": "NVIDIA DGX Spark", "cpu": "aarch64", "gpu": "NVIDIA GB10"}
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "machine": {**STATUS["machine"], **named}}))
    shown = run("status", home=daemon.home).stdout
    assert "· NVIDIA DGX Spark · aarch64, " in shown
    assert " cores · NVIDIA GB10 · " in shown
    mac = {"product": "Mac15,14", "cpu": "Apple M3 Ultra", "gpu": "Apple M3 Ultra"}
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "machine": {**STATUS["machine"], **mac}}))
    assert run("status", home=daemon.home).stdout.count("Apple M3 Ultra") == 1


@pytest.mark.parametrize(
    ("changes", "word"), [({"draining": True}, "stopping"), ({"ready": False}, "starting")]
)
def test_status_and_the_first_page_have_one_word_for_the_state(
    run: Run, daemon: FakeDaemon, changes: dict[str, Any], word: str
) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, **changes}))
    assert f" · {word} · " in run("status", home=daemon.home).stdout
    assert f" is {word}, " in run(home=daemon.home).stdout


def test_status_without_models_or_http(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "engines": [], "http": None}))
    shown = run("status", home=daemon.home).stdout
    assert "No model is loaded; smollm2-135m loads with the first request." in shown
    assert "http      off" in shown


def test_status_tells_of_the_fleet_and_of_what_cannot_be_used(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "fleet": {**FLEET, "local_only": True}}))
    shown = run("status", home=daemon.home).stdout.splitlines()
    at = next(i for i, line in enumerate(shown) if line.startswith("fleet "))
    assert shown[at].split(" · ") == [
        "fleet     mini (m1n1abc)",
        "port 8115",
        "1 of 2 peers usable",
        "mDNS running",
        "prompts stay here (fleet.local_only)",
    ]
    reason = "No address of it answers: 192.168.1.9 was silent for 3 s."
    assert shown[at + 1].strip() == f"air (q7w2e3r) unreachable: {reason}"
    assert shown[at + 2] == ""


@pytest.mark.parametrize(
    ("fleet", "shown"),
    [
        ({"enabled": False}, "fleet     off (fleet.enabled in fleetd.toml)"),
        ({**FLEET, "peers": [], "mdns": "off"}, "port 8115 · no peers · mDNS off"),
        ({**FLEET, "mdns": "no interface"}, "mDNS fails: no interface"),
        ({**FLEET, "pairing": True}, "pairing window open"),
        (
            {**FLEET, "removed_by": "studio"},
            "studio removed this machine from the fleet; `fleetctl pair` there",
        ),
        ({**FLEET, "name": "\x1b[2J"}, "fleet     \\x1b[2J (m1n1abc)"),
        (
            {**FLEET, "peers": [{**FLEET["peers"][0], "new": True, "through": "air"}]},
            "studio (k3f9a2b) is new: it is here on the word of air",
        ),
        ({**FLEET, "late": ["printer"]}, "these wait: printer."),
    ],
)
def test_status_of_a_fleet(run: Run, daemon: FakeDaemon, fleet: dict[str, Any], shown: str) -> None:
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "fleet": fleet}))
    assert shown in run("status", home=daemon.home).stdout


def test_status_imports_nothing_heavy(daemon: FakeDaemon, env: dict[str, str]) -> None:
    code = (
        f"import sys; from fleetctl.cli import main; main(['--home', {str(daemon.home)!r}, 'status']); "
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([FLEETCTL[0], "-c", code], env=env, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    heavy = {
        "rich",
        "prompt_toolkit",
        "platformdirs",
        "msgspec",
        "asyncio",
        "aiohttp",
        "mlx",
        "numpy",
        "psutil",
    }
    assert "fleetctl.verbs.status" in loaded
    assert not heavy & loaded
    assert not {"fleetctl.verbs.chat", "fleetctl.verbs.doctor", "fleetctl.verbs.service"} & loaded


# ---- models ----------------------------------------------------------------------------------------------

MODELS = {
    "installed": [
        {
            "name": "smollm2-135m",
            "source": "embedded",
            "architecture": "llama",
            "weights_bytes": 90_000_000,
            "context_tokens": 8192,
            "roles": ["chat"],
            "path": "/m",
            "loaded": True,
            "digest": None,
            "tools": "grammar",
            "thinking": False,
        }
    ],
    "catalog": [
        {"name": "smollm2-135m", "hub_id": "a/b", "roles": ["chat"], "memory_bytes": 1, "context_tokens": 1}
        | {"tier": "tiny", "installed": True},
        {"name": "qwen3.5-4b", "hub_id": "c/d", "roles": ["chat", "coding"], "memory_bytes": 4_300_000_000}
        | {"download_bytes": 3_000_000_000, "context_tokens": 262_144, "recommended": ["chat", "coding"]}
        | {"note": "a hybrid: its KV cache stays small, so long prompts fit 8 GB"},
        {"name": "qwen3-8b", "hub_id": "g/h", "roles": ["chat"], "memory_bytes": 7_500_000_000}
        | {"fit": {"where": "freed", "short_bytes": 2_500_000_000}, "note": "for 16 GB machines"},
        {"name": "qwen3-32b", "aliases": ["big"], "hub_id": "i/j", "roles": ["chat", "compressor"]}
        | {"fit": {"where": "elsewhere", "machines": ["studio"], "short_bytes": 12_000_000_000}}
        | {"memory_bytes": 24_000_000_000, "download_bytes": 18_400_000_000, "note": "dense"},
        {"name": "llama-3.3-70b", "hub_id": "k/l", "roles": ["chat"], "memory_bytes": 49_000_000_000}
        | {"fit": {"where": "none", "short_bytes": 37_000_000_000}},
        {"name": "vectors", "hub_id": "e/f", "roles": ["embedding"], "memory_bytes": 2_100_000_000}
        | {"context_tokens": 40960, "tier": "small", "fit": {"where": "none", "short_bytes": 1_000_000_000}},
    ],
    "memory": {"total_bytes": 16_000_000_000, "usable_bytes": 5_000_000_000, "largest_bytes": 12_000_000_000},
    "memory_reason": "On this machine's CPU weights take more.",
}


def test_models(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    listed = run("models", home=daemon.home)
    assert listed.stdout == run("models", "list", home=daemon.home).stdout
    installed, fits, freed, remarks = listed.stdout.strip().split("\n\n")
    assert installed.splitlines()[1].split()[:2] == ["smollm2-135m", "chat"]
    assert installed.splitlines()[1].split()[5:8] == ["8,192", "grammar", "-"]
    assert installed.splitlines()[1].endswith("loaded")
    assert [line.split()[:4] for line in fits.splitlines()[1:]] == [["*", "qwen3.5-4b", "chat,", "coding"]]
    assert "3.0 GB  4.3 GB  a hybrid: its KV cache stays small" in fits
    assert freed.startswith("   FITS WHEN MEMORY IS FREED")
    assert freed.splitlines()[1].endswith("  here, 2.5 GB to free  for 16 GB machines")
    assert remarks.startswith("* Recommended here: qwen3.5-4b for chat and coding.\n")
    assert remarks.count("On this machine's CPU weights take more.") == 1
    assert "3 more do not fit here: `fleetctl models --all`" in remarks
    everything = run("models", "--all", home=daemon.home).stdout
    assert everything == run("models", "list", "--all", home=daemon.home).stdout
    assert "  studio  dense" in everything
    assert "  no: 37.0 GB short" in everything
    assert json.loads(run("models", "--json", home=daemon.home).stdout) == MODELS
    assert json.loads(run("models", "list", "--json", home=daemon.home).stdout) == MODELS


def test_a_recommended_model_that_needs_memory_freed_is_said_to() -> None:
    listing = msgspec.convert(MODELS, ModelListing)
    catalog = [
        msgspec.structs.replace(entry, recommended=["chat"] if entry.fit.where == "freed" else [])
        for entry in listing.catalog
    ]
    said = recommended_line(msgspec.structs.replace(listing, catalog=catalog))
    assert said.endswith("for chat (free 2.5 GB first).")


@pytest.mark.parametrize("everything", [True, False])
def test_models_fit_a_narrow_terminal(everything: bool) -> None:
    lines = models_page(msgspec.convert(MODELS, ModelListing), 80, everything=everything).splitlines()
    assert max(len(line) for line in lines) <= 80
    (row,) = [line for line in lines if "qwen3.5-4b" in line and "GB" in line]
    assert "  a hybrid: its KV " in row
    assert row.endswith("…")


def test_the_hub_is_searched_by_words(run: Run, daemon: FakeDaemon) -> None:
    found = {
        "words": "qwen 8b",
        "others": 3,
        "models": [
            {"hub_id": "mlx-community/Qwen3-8B-4bit", "files": "mlx", "architecture": "qwen3"}
            | {"download_bytes": 4_600_000_000, "memory_bytes": 5_100_000_000, "installed": True},
            {"hub_id": "org/Big", "files": "gguf", "gated": True}
            | {"fit": {"where": "elsewhere", "machines": ["studio", "box"], "short_bytes": 1}},
        ],
    }
    daemon.on("GET", "/fleet/v1/models/search", Reply(found))
    listed = run("models", "search", "qwen", "8b", home=daemon.home).stdout
    assert daemon.seen[-1].path == "/fleet/v1/models/search?words=qwen%208b"
    _, first, second = listed.split("\n\n")[0].splitlines()
    assert first.split() == ["mlx-community/Qwen3-8B-4bit", "4.6", "GB", "5.1", "GB", "mlx", "installed"]
    assert second.endswith("gguf   fits on studio and box; accept its terms first")
    assert "3 more are of types or files that fleetd does not read." in listed
    assert json.loads(run("models", "search", "x", "--json", home=daemon.home).stdout) == found
    daemon.on("GET", "/fleet/v1/models/search", Reply({"words": "none", "models": []}))
    assert "nothing under 'none'" in run("models", "search", "none", home=daemon.home).stdout


# ---- pull ------------------------------------------------------------------------------------------------


def pulls(daemon: FakeDaemon) -> list[Any]:
    return [seen.body["model"] for seen in daemon.seen if seen.path == "/fleet/v1/models/pull"]


@pytest.mark.parametrize("name", ["qwen3-32b", "BIG", "i/j"])
def test_a_pull_asks_before_it_fetches_what_cannot_be_loaded(run: Run, daemon: FakeDaemon, name: str) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "qwen3-32b"})))
    refused = run("models", "pull", name, home=daemon.home)
    assert refused.returncode == Exit.USAGE
    told = f"{name} will not load here: it needs 24.0 GB, and models may take 12.0 GB. It fits on studio."
    assert told in " ".join(refused.stderr.split())
    assert pulls(daemon) == []
    done = run("models", "pull", name, "--yes", home=daemon.home)
    assert (done.returncode, pulls(daemon)) == (0, [name])
    assert told in done.stderr


PEERS = {"enabled": True, "manage": True, "name": "mini", "peers": []}


def elsewhere(daemon: FakeDaemon) -> None:
    """A daemon that manages other machines' models."""
    daemon.on("GET", "/fleet/v1/peers", Reply(PEERS))
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))


def test_models_of_another_machine_are_listed_as_that_machine_judges(run: Run, daemon: FakeDaemon) -> None:
    elsewhere(daemon)
    listed = run("models", "--on", "my studio", home=daemon.home).stdout
    assert daemon.seen[-1].path == "/fleet/v1/models?on=my%20studio"
    assert listed == run("models", "list", "--on", "my studio", home=daemon.home).stdout
    for part in (
        "FITS ON MY STUDIO",
        "Recommended on my studio: qwen3.5-4b",
        "On my studio's CPU weights",
        "pull NAME --on my studio",
        "do not fit on my studio",
    ):
        assert part in listed, part
    assert " here" not in listed
    assert "FITS HERE" not in listed
    daemon.on("GET", "/fleet/v1/models", Reply({}))
    assert "No model is on studio yet." in run("models", "--on", "studio", home=daemon.home).stdout
    misplaced = run("models", "--on", "studio", "load", "x", home=daemon.home)
    assert misplaced.returncode == Exit.USAGE
    assert "load NAME --on MACHINE" in misplaced.stderr


def test_a_pull_on_another_machine_asks_by_what_fits_there(run: Run, daemon: FakeDaemon) -> None:
    elsewhere(daemon)
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "qwen3-32b"})))
    refused = run("models", "pull", "qwen3-32b", "--on", "air", home=daemon.home)
    assert refused.returncode == Exit.USAGE
    assert "qwen3-32b will not load on air: it needs 24.0 GB" in " ".join(refused.stderr.split())
    assert pulls(daemon) == []
    done = run("models", "pull", "qwen3-32b", "--on", "air", "--yes", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "qwen3-32b on air is ready to use.\n")
    assert daemon.seen[-1].body == {"model": "qwen3-32b", "on": "air"}


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("load", "m on air is loaded."),
        ("pin", "m on air stays loaded. `fleetctl models unpin m --on air` ends that."),
        ("unload", "m on air is not loaded any more."),
        ("unpin", "m on air is not pinned any more."),
        ("remove", "m on air is removed."),
    ],
)
def test_verbs_go_to_another_machine(run: Run, daemon: FakeDaemon, verb: str, told: str) -> None:
    elsewhere(daemon)
    streamed = verb in ("load", "pin")
    reply = pulling(data({"done": True, "name": "m"})) if streamed else Reply({"ok": True})
    daemon.on("POST", f"/fleet/v1/models/{verb}", reply)
    if verb == "remove":
        refused = run("models", verb, "m", "--on", "air", home=daemon.home)
        assert "m's files on air" in refused.stderr
    done = run("models", verb, "m", "--on", "air", *(["--yes"] if verb == "remove" else []), home=daemon.home)
    assert (done.returncode, done.stdout[: len(told)]) == (0, told)
    assert daemon.seen[-1].body == {"model": "m", "on": "air"} | ({"stream": True} if streamed else {})
    again = ["--yes", "--json"] if verb == "remove" else ["--json"]
    shown = run("models", verb, "m", "--on", "air", *again, home=daemon.home).stdout
    assert json.loads(shown) == {"ok": True}


@pytest.mark.parametrize("words", [["load", "m"], ["remove", "m", "--yes"], ["pull", "m"], ["list"]])
def test_attack_an_older_daemon_does_nothing_here_that_was_meant_for_another_machine(
    run: Run, daemon: FakeDaemon, words: list[str]
) -> None:
    """It would not know `on`, and do it to its own models."""
    daemon.on("GET", "/fleet/v1/peers", Reply({"enabled": True, "name": "mini", "peers": []}))
    refused = run("models", *words, "--on", "air", home=daemon.home)
    assert refused.returncode != 0
    assert "older than this fleetctl" in refused.stderr
    assert [seen.path for seen in daemon.seen] == ["/fleet/v1/peers"]


def test_ctrl_c_during_a_load_on_another_machine_leaves_it(run: Run, daemon: FakeDaemon) -> None:
    elsewhere(daemon)
    waiting = pulling(threading.Event())
    daemon.on("POST", "/fleet/v1/models/load", waiting)
    command = [*FLEETCTL, "--home", str(daemon.home), "models", "load", "m", "--on", "air"]
    with subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True) as loading:
        assert loading.stderr is not None
        shown = loading.stderr.readline()
        assert shown.startswith("loading m on air: downloading model.gguf"), shown
        interrupt(loading)
        assert loading.wait(30) == Exit.INTERRUPTED
    assert waiting.gone.wait(30)


def test_a_pull_says_what_has_to_be_freed_and_goes_on(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "qwen3-8b"})))
    done = run("models", "pull", "qwen3-8b", home=daemon.home)
    assert done.returncode == 0
    assert "qwen3-8b loads here once 2.5 GB more of memory are free." in done.stderr


def test_a_pull_with_its_drafter_gets_the_small_model_first(run: Run, daemon: FakeDaemon) -> None:
    offered = [{"name": "qwen3-8b", "draft": "qwen3-0.6b"}, {"name": "lone"}]
    daemon.on("GET", "/fleet/v1/models", Reply({"catalog": offered}))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "m"})))
    assert run("models", "pull", "qwen3-8b", "--with-drafter", home=daemon.home).returncode == 0
    assert pulls(daemon) == ["qwen3-0.6b", "qwen3-8b"]
    refused = run("models", "pull", "lone", "--with-drafter", home=daemon.home)
    assert refused.returncode != 0
    assert "names no model that drafts for lone" in refused.stderr
    assert len(pulls(daemon)) == 2


def test_models_tell_what_drafts_for_them_and_why_a_head_does_not(run: Run, daemon: FakeDaemon) -> None:
    installed = [
        {"name": "one", "drafter": "head"},
        {"name": "two", "drafter": "sidecar", "drafter_off": "it is another model's"},
        {"name": "three", "drafter": "qwen3-0.6b"},
        {
            "name": "four",
            "drafter": "a-DFlash",
            "drafter_off": "its layers are others; the model's own head does",
        },
        {"name": "five"},
    ]
    daemon.on("GET", "/fleet/v1/models", Reply({"installed": installed}))
    shown = run("models", home=daemon.home).stdout
    for words in ("own head", "head beside it, off", "qwen3-0.6b", "two does not draft: it is another"):
        assert words in " ".join(shown.split())
    assert "a-DFlash does not draft for four: its layers are others;" in " ".join(shown.split())
    assert "five" in shown
    assert "for five" not in shown


@pytest.mark.parametrize("width", [80, 200, None])
def test_a_narrow_terminal_says_what_drafts_below_the_table(width: int | None) -> None:
    installed = [
        InstalledModel(name="nemotron-3-nano-30b-a3b", context_tokens=262_144, drafter="head"),
        InstalledModel(name="one", roles=["chat", "coding"], tools="qwen3_coder", drafter="org/small"),
        InstalledModel(name="two", drafter="org/small"),
        InstalledModel(name="three", drafter="sidecar", drafter_off="it is another model's"),
        InstalledModel(name="four"),
    ]
    shown = models_page(ModelListing(installed=installed), width)
    said = "Drafts for nemotron-3-nano-30b-a3b: own head. Drafts for one and two: org/small."
    assert (said in " ".join(shown.split())) == ("DRAFTS" not in shown) == (width == 80)
    assert "The head of three does not draft: it is another model's." in shown
    assert all(len(line) <= (width or 1000) for line in shown.splitlines())


def test_a_model_of_the_hub_is_judged_by_what_the_hub_tells(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "org/Big"})))
    too_large = {"hub_id": "org/Big", "memory_bytes": 99_000_000_000, "fit": {"where": "none"}}
    daemon.on("GET", "/fleet/v1/models/search", Reply({"models": [too_large]}))
    refused = run("models", "pull", "org/Big", home=daemon.home)
    assert refused.returncode == Exit.USAGE
    assert "it needs 99.0 GB" in " ".join(refused.stderr.split())
    # Without an answer of the hub's the download says what is wrong.
    daemon.on("GET", "/fleet/v1/models/search", FAILED)
    assert run("models", "pull", "org/Big", home=daemon.home).returncode == 0
    assert pulls(daemon) == ["org/Big"]


def test_a_pull_without_a_name_recommends_one(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "qwen3.5-4b"})))
    refused = run("models", "pull", home=daemon.home)
    assert refused.returncode == Exit.USAGE
    assert "Recommended here: qwen3.5-4b for chat and coding." in refused.stderr
    assert "fleetctl models pull qwen3.5-4b" in refused.stderr
    assert pulls(daemon) == []
    assert run("models", "pull", "--yes", home=daemon.home).returncode == 0
    assert pulls(daemon) == ["qwen3.5-4b"]


def pulling(*tail: str | threading.Event) -> Reply:
    report = {
        "file": "model.gguf",
        "done_bytes": 1_000_000,
        "total_bytes": 90_000_000,
        "stage": "downloading",
    }
    return Reply(stream=[data(report), ": keepalive\n\n", *tail])


def test_pull(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "smollm2-135m"})))
    done = run("models", "pull", "smollm2-135m", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "smollm2-135m is ready to use.\n")
    assert daemon.seen[-1].body == {"model": "smollm2-135m"}
    shown = run("models", "pull", "smollm2-135m", "--json", home=daemon.home).stdout
    assert json.loads(shown) == {"done": True, "name": "smollm2-135m"}


def test_a_folder_is_used_where_it_lies_by_its_path(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data({"done": True, "name": "/models/mine"})))
    shown = run("models", "pull", "/models/mine", home=daemon.home).stdout
    assert "fleetctl chat -m /models/mine" in shown
    assert "fleetctl models add /models/mine" in shown


def test_add_sends_whole_paths_and_names_as_they_are(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.on("POST", "/fleet/v1/models/add", pulling(data({"done": True, "name": "mine"})))
    (tmp_path / "Folder").mkdir()
    relative = os.path.relpath(tmp_path / "Folder")
    done = run("models", "add", relative, "--name", "mine", home=daemon.home)
    assert (done.returncode, done.stdout) == (0, "mine is ready to use.\n")
    assert daemon.seen[-1].body == {"path": str(tmp_path / "Folder"), "name": "mine"}
    run("models", "add", "qwen3:4b", home=daemon.home)
    assert daemon.seen[-1].body == {"path": "qwen3:4b", "name": ""}


def test_models_lists_files_of_other_programs(run: Run, daemon: FakeDaemon) -> None:
    found = {"name": "qwen3:4b", "program": "Ollama", "path": "/blobs/sha256-1", "size_bytes": 2_600_000_000}
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS | {"importable": [found]}))
    listed = run("models", home=daemon.home).stdout
    assert "OF OTHER PROGRAMS" in listed
    assert "qwen3:4b" in listed
    assert "fleetctl models add NAME" in listed


def test_models_says_what_is_not_listed_and_what_is_not_used(run: Run, daemon: FakeDaemon) -> None:
    tuned = {"name": "tuned", "ignored": ["adapters.safetensors"]}
    unlisted = [{"path": "/models/my model", "reason": "It is no name."}]
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS | {"installed": [tuned], "unlisted": unlisted}))
    listed = run("models", home=daemon.home).stdout
    assert "tuned answers without adapters.safetensors" in listed
    assert "Not listed: 1 more. `fleetctl doctor` says why." in listed


def test_models_lists_what_is_here_in_part(run: Run, daemon: FakeDaemon) -> None:
    part = {"name": "org/big", "layers": 31, "of_layers": 94, "disk_bytes": 44 * 10**9}
    own = {**part, "weights_bytes": 132 * 10**9, "own": True, "from_hub": True, "loaded": True}
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS | {"in_part": [own, {**part, "name": "org/other"}]}))
    listed = run("models", home=daemon.home).stdout
    (line,) = [line for line in listed.splitlines() if line.startswith("org/big")]
    assert "31 of 94" in line
    assert "here, with others" in line
    assert line.rstrip().endswith("loaded")
    (line,) = [line for line in listed.splitlines() if line.startswith("org/other")]
    assert "another machine" in line


def test_pull_that_fails_in_the_middle(run: Run, daemon: FakeDaemon) -> None:
    error = {"error": {"message": "The hub answered 503.", "code": "download_failed", "hint": "Try later."}}
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling(data(error)))
    done = run("models", "pull", "x", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.FAILED, "")
    assert "The hub answered 503.\nTry later." in done.stderr


def test_pull_that_ends_early(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", pulling())
    done = run("models", "pull", "x", home=daemon.home)
    assert done.returncode == Exit.FAILED
    assert "before it was complete" in done.stderr


def test_ctrl_c_stops_a_pull(daemon: FakeDaemon, env: dict[str, str]) -> None:
    reply = pulling(threading.Event())
    daemon.on("GET", "/fleet/v1/models", Reply(MODELS))
    daemon.on("POST", "/fleet/v1/models/pull", reply)
    command = [*FLEETCTL, "--home", str(daemon.home), "models", "pull", "x"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        # The plain progress line says that the stream is being read.
        assert b"downloading" in process.stderr.readline()
        interrupt(process)
        err = process.stderr.read()
    assert process.returncode == Exit.INTERRUPTED, err
    assert b"continues" in err
    assert b"Traceback" not in err
    assert reply.gone.wait(60)


@pytest.mark.parametrize("verb", ["verify", "load", "unload", "pin", "unpin"])
def test_verbs_on_one_model(run: Run, daemon: FakeDaemon, verb: str) -> None:
    answer = {"ok": True, "digest": "abc"} if verb == "verify" else {"ok": True}
    followed = {"stream": True} if verb in ("load", "pin") else {}
    reply = Reply(stream=[data({"done": True, "name": "m"})]) if followed else Reply(answer)
    daemon.on("POST", f"/fleet/v1/models/{verb}", reply)
    done = run("models", verb, "m", home=daemon.home)
    assert (done.returncode, daemon.seen[-1].body) == (0, {"model": "m", **followed})
    assert done.stdout.startswith("m stays " if verb == "pin" else "m is ")
    assert json.loads(run("models", verb, "m", "--json", home=daemon.home).stdout) == answer


def test_remove_asks_where_it_can_and_demands_yes_where_not(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/fleet/v1/models/remove", Reply({"ok": True}))
    refused = run("models", "remove", "m", home=daemon.home)
    assert refused.returncode == Exit.USAGE
    assert not [seen for seen in daemon.seen if seen.method == "POST"]
    assert run("models", "remove", "m", "--yes", home=daemon.home).stdout == "m is removed.\n"
    assert daemon.seen[-1].body == {"model": "m"}


# ---- env and usage ---------------------------------------------------------------------------------------


def test_env_survives_eval(daemon: FakeDaemon, run: Run, env: dict[str, str]) -> None:
    key = "k'e y$(touch /nope)"
    daemon.on("GET", "/fleet/v1/env", Reply({"base_url": "http://127.0.0.1:8114/v1", "api_key": key}))
    shown = run("env", home=daemon.home).stdout
    script = f'{shown}\nprintf "%s|%s" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
    evaluated = subprocess.run(
        ["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert evaluated == f"http://127.0.0.1:8114/v1|{key}"
    assert json.loads(run("env", "--json", home=daemon.home).stdout)["api_key"] == key


def test_env_for_anthropics_clients(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/fleet/v1/env", Reply({"base_url": "http://127.0.0.1:8114/v1", "api_key": "k"}))
    assert run("env", "--anthropic", home=daemon.home).stdout == (
        "export ANTHROPIC_BASE_URL=http://127.0.0.1:8114\nexport ANTHROPIC_AUTH_TOKEN=k\n"
    )


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", "export OLLAMA_HOST=http://127.0.0.1:8114\nexport OLLAMA_API_KEY=k\n"),
        ("http://127.0.0.1:11434", "export OLLAMA_HOST=http://127.0.0.1:11434\n"),
    ],
)
def test_env_for_ollamas_clients(daemon: FakeDaemon, run: Run, address: str, shown: str) -> None:
    given = {"base_url": "http://127.0.0.1:8114/v1", "api_key": "k", "ollama_url": address}
    daemon.on("GET", "/fleet/v1/env", Reply(given))
    assert run("env", "--ollama", home=daemon.home).stdout == shown
    assert run("env", "--ollama", "--anthropic", home=daemon.home).returncode == 2


@pytest.mark.parametrize("kind", [[], ["--anthropic"], ["--ollama"]])
def test_env_keeps_prompts_and_the_key_from_a_proxy(
    daemon: FakeDaemon, run: Run, env: dict[str, str], kind: list[str]
) -> None:
    daemon.on("GET", "/fleet/v1/env", Reply({"base_url": "http://127.0.0.1:8114/v1", "api_key": "k"}))
    assert "proxy" not in run("env", *kind, home=daemon.home).stdout.lower()
    env |= {"http_proxy": "http://10.9.9.9:3128", "NO_PROXY": "corp.example"}
    script = f'{run("env", *kind, home=daemon.home).stdout}\nprintf "%s|%s" "$NO_PROXY" "$no_proxy"'
    evaluated = subprocess.run(
        ["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert evaluated == "corp.example,127.0.0.1,localhost|corp.example,127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("kind", "name"), [([], "OPENAI_CUSTOM_HEADERS"), (["--anthropic"], "CLAUDE_CODE_USE_BEDROCK")]
)
def test_env_unsets_what_would_send_requests_elsewhere(
    daemon: FakeDaemon, run: Run, env: dict[str, str], kind: list[str], name: str
) -> None:
    daemon.on("GET", "/fleet/v1/env", Reply({"base_url": "http://127.0.0.1:8114/v1", "api_key": "k"}))
    env[name] = "of-the-users"
    done = run("env", *kind, home=daemon.home)
    assert done.stdout.splitlines()[-1] == f"unset {name}"
    assert name in done.stderr
    assert "of-the-users" not in done.stdout + done.stderr


def test_env_without_http(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/fleet/v1/env", Reply({"base_url": None, "api_key": "k"}))
    done = run("env", home=daemon.home)
    assert (done.returncode, done.stdout) == (Exit.ERROR, "")
    assert "--http" in done.stderr


def test_usage(daemon: FakeDaemon, run: Run) -> None:
    row = {
        "day": "2026-11-20",
        "model": "m",
        "node": "this",
        "requests": 3,
        "failed": 1,
        "prompt_tokens": 4100,
    }
    row |= {
        "cached_tokens": 100,
        "completion_tokens": 210,
        "prefill_s": 10.0,
        "decode_s": 10.0,
        "scored_tokens": 7,
        "first_tokens": 2,
        "first_s": 5.0,
        "saved_s": 61.0,
    }
    daemon.on("GET", "/fleet/v1/usage", Reply({"rows": [row], "totals": {**row, "day": None}}))
    shown = run("usage", "--days", "30", home=daemon.home).stdout.splitlines()
    assert daemon.seen[-1].path == "/fleet/v1/usage?days=30"
    assert " ".join(shown[1].split()) == "2026-11-20 m 3 1 4,100 100 210 400 tok/s 21 tok/s 7 2.50 s 61.0 s"
    assert shown[2].split()[0] == "total"
    assert json.loads(run("usage", "--json", home=daemon.home).stdout)["rows"] == [row]


def test_usage_of_nothing(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/fleet/v1/usage", Reply({"rows": [], "totals": {}}))
    assert run("usage", "--days", "1", home=daemon.home).stdout == "No requests in the last 1 day.\n"


def test_home_from_the_environment(daemon: FakeDaemon, run: Run, env: dict[str, str]) -> None:
    env["FLEETD_HOME"] = str(daemon.home)
    assert run("status").returncode == 0
    assert os.environ.get("FLEETD_HOME") != str(daemon.home)


def test_status_says_who_holds_which_layers(run: Run, daemon: FakeDaemon) -> None:
    front = {"model": "m", "state": "ready", "members": [{"name": "kitchen", "first": 15, "last": 30}]}
    part = {"model": "n[0:4]", "part_of": "n", "state": "ready", "first_layer": 0, "last_layer": 4}
    part |= {"shape": {"layers": 8}, "asked_by": ["garage", "studio"]}
    daemon.on("GET", "/fleet/v1/status", Reply({"engines": [front, part]}))
    shown = run("status", home=daemon.home).stdout
    assert "m: layers 0-14 here, layers 15-29 on kitchen" in shown
    assert "n: layers 0-3 of 8, asked by garage and studio" in shown


def test_status_says_how_far_each_machine_of_a_group_is(run: Run, daemon: FakeDaemon) -> None:
    held = {"name": "kitchen", "first": 15, "last": 30, "stage": "reading"}
    held |= {"done_bytes": 1_200_000_000, "total_bytes": 8_000_000_000}
    other = {"name": "attic", "first": 30, "last": 31, "stage": "warming up"}
    front = {"model": "m", "state": "loading", "members": [held, other]}
    divided = {"model": "d", "state": "loading", "ranks": 2, "members": [held]}
    daemon.on("GET", "/fleet/v1/status", Reply({"engines": [front, divided]}))
    shown = run("status", home=daemon.home).stdout
    far = "(reading 1.2 GB of 8.0 GB)"
    assert f"m: layers 0-14 here, layers 15-29 on kitchen {far}, layer 30 on attic (warming up)" in shown
    assert f"d: a part of every layer here and on kitchen {far}" in shown
    assert model_change.FETCHING | {model_change.READING} == status._IN_BYTES


def test_loading_over_several_machines_names_them(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/fleet/v1/models/load", pulling(data({"done": True, "name": "m"})))
    done = run("models", "load", "m", "--on", "this, kitchen", home=daemon.home)
    assert "m is loaded on this machine and kitchen." in done.stdout
    assert daemon.seen[-1].body == {"model": "m", "placement": ["this", "kitchen"], "stream": True}
    refused = run("models", "load", "m", "--on", "kitchen,", home=daemon.home)
    assert "commas" in refused.stderr
