"""`fleetctl peers`: the table at every width, changes over time, and the live page on a real terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pexpect
import psutil
import pytest
from fake_daemon import FLEET, FLEETCTL, FakeDaemon, Reply, Run
from hypothesis import given
from hypothesis import strategies as st
from interrupting import interrupt

from fleetctl.connection.replies import read
from fleetctl.exits import DaemonFailed, Exit
from fleetctl.render import live_page
from fleetctl.render.fleet_words import state_word
from fleetctl.render.peers_table import render
from fleetctl.verbs.peers import _essence
from fleetd.control.fleet_view import FleetView, PeerState, UnansweredAddress

Start = Callable[..., "pexpect.spawn[str]"]


def changed(**fields: Any) -> dict[str, Any]:
    return {**FLEET, **fields}


def peer(**fields: Any) -> dict[str, Any]:
    return {**FLEET["peers"][0], **fields}


def page(value: dict[str, Any], width: int | None = 100) -> str:
    return click.unstyle(render(read(value, FleetView), width))


# ---- What the daemon says --------------------------------------------------------------------------------


def test_an_answer_of_another_kind_is_an_error_and_more_fields_are_not() -> None:
    assert read(changed(colour="blue"), FleetView) == read(FLEET, FleetView)
    assert read({}, FleetView) == FleetView()
    with pytest.raises(DaemonFailed, match=r"Expected `array`, got `int` - at `\$\.peers`"):
        read(changed(peers=1), FleetView)


# ---- The table -------------------------------------------------------------------------------------------


def test_everything_is_shown_where_there_is_room() -> None:
    lines = page(FLEET, None).splitlines()
    assert lines[0] == "mini (m1n1abc) · port 8115 · 1 of 2 peers usable · mDNS running"
    header = "NAME STATE ID TIER FREE/MEMORY LOAD RTT BANDWIDTH PROMPTS MODELS"
    assert " ".join(lines[2].split()) == header
    assert " ".join(lines[3].split()) == "air unreachable q7w2e3r tiny -/16.0 GB - - - no (fleet) ?"
    assert lines[4] == "  No address of it answers: 192.168.1.9 was silent for 3 s."
    assert lines[5] == "  → See that it is switched on and on this network."
    assert re.split("  +", lines[6]) == [
        "studio", "usable", "k3f9a2b", "large", "210/256 GB", "1+2", "0.42 ms", "1.1 GB/s", "yes",
        "mlx-community/Qwen3-32B-4bit*, mlx-community/Qwen3-0.6B-4bit (loading), smollm2-135m",
    ]  # fmt: skip
    assert lines[7] == "LOAD: running+waiting · * loaded"
    assert lines[9].startswith("Seen on this network, not paired: pro (z9y8x7w). Pair with `fleetctl pair`")


@pytest.mark.parametrize(
    ("state", "word"),
    [("usable", "usable"), ("quiet", "silent"), ("draining", "stopping"), ("incompatible", "other version")],
)
def test_states_have_the_words_that_all_pages_use(state: str, word: str) -> None:
    header, row = page(changed(peers=[peer(state=state)]), None).splitlines()[2:4]
    assert row[header.index("STATE") :].startswith(f"{word}  ")


def test_the_page_in_the_browser_has_the_same_words_for_states() -> None:
    units = Path(__file__).parents[2] / "fleetd/api/page/static/units.js"
    found = re.search(r"const STATES = \{(.*)\};", units.read_text(encoding="utf-8"))
    assert found
    words = dict(re.findall(r'(\w+): "([^"]+)"', found[1]))
    assert {state: words.get(state, state) for state in get_args(PeerState)} == {
        state: state_word(state) for state in get_args(PeerState)
    }


def test_speeds_and_links_measured_beside_other_work_are_marked() -> None:
    held = [{"name": "m", "state": "loaded", "speed": {"doubt": "busy"}}, {"name": "n", "state": "installed"}]
    lines = page(changed(peers=[peer(models=held, bytes_per_s=21e6, link_doubtful=True)]), None).splitlines()
    assert "~21.0 MB/s" in lines[3]
    assert lines[3].endswith("m*~, n")
    assert lines[4] == "LOAD: running+waiting · * loaded · ~ measured beside other work"
    assert "~" not in page(FLEET, None)


def test_speeds_that_are_not_believed_are_marked() -> None:
    lines = page(changed(peers=[peer(models=[{"name": "m", "capped": True}])]), None).splitlines()
    assert lines[3].endswith(" m!")
    assert lines[4].endswith("· ! claims speeds that its hardware cannot have; they are not believed")
    assert "!" not in page(FLEET, None)


def test_columns_go_by_importance_when_there_is_no_room() -> None:
    headers = {}
    for width in range(200, 20, -1):
        for line in page(FLEET, width).splitlines():
            if line.startswith("NAME"):
                headers[width] = line.split()
    gone: list[str] = []
    for width in sorted(headers, reverse=True):
        before = headers.get(width + 1, headers[200])
        gone += [column for column in before if column not in headers[width]]
    assert gone == ["MODELS", "BANDWIDTH", "ID", "TIER", "PROMPTS", "RTT", "FREE/MEMORY", "LOAD"]
    assert headers[21] == ["NAME", "STATE"]
    assert "Qwen3-32B-4bit*" in page(FLEET, 40)  # the models moved below their machine


@pytest.mark.parametrize("width", [80, 120])
def test_the_usual_terminals_get_whole_lines(width: int) -> None:
    many = changed(
        peers=[
            *FLEET["peers"],
            peer(name="a-machine-with-a-name-that-does-not-end", node_id="X", state="incompatible"),
        ]
    )
    lines = page(many, width).splitlines()
    assert max(len(line) for line in lines) <= width
    header = next(line for line in lines if line.startswith("NAME"))
    assert {"STATE", "TIER", "FREE/MEMORY", "LOAD", "RTT", "PROMPTS"} <= set(header.split())


def test_ids_stay_where_names_are_alike() -> None:
    twins = changed(peers=[peer(), peer(node_id="OTHER", short_id="abcdefg")])
    assert " ID " in page(twins, 60)
    assert " ID " not in page(FLEET, 60)


@given(
    width=st.integers(1, 200),
    names=st.lists(st.text(max_size=64), max_size=5),
    models=st.lists(st.tuples(st.text(max_size=80), st.sampled_from(["loaded", "loading", "installed"]))),
    reason=st.text(max_size=200),
)
def test_any_fleet_has_a_page_without_control_characters(
    width: int, names: list[str], models: list[tuple[str, str]], reason: str
) -> None:
    """Names, reasons and models come from other machines."""
    held = [{"name": name, "state": state} for name, state in models]
    fleet = changed(
        peers=[
            peer(name=name, models=held, state="quiet", reason=reason, hint=reason, new=True, through=name)
            for name in names
        ],
        late=names,
        neighbours=[{"name": name, "short_id": name, "pairing": True} for name in names],
        mdns=reason,
        removed_by=reason,
    )
    for each in (width, None):
        shown = page(fleet, each)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


def test_models_that_do_not_fit_are_counted() -> None:
    held = [{"name": f"org/model-{i}", "state": "loaded" if i == 3 else "installed"} for i in range(9)]
    shown = page(changed(peers=[peer(models=held)]), 60)
    assert "\n  model-3*, model-0, model-1, model-2, model-4, model-5, +3\n" in shown
    long = page(changed(peers=[peer(models=[{"name": "m" * 90, "state": "loaded"}, held[0]])]), 40)
    assert f"\n  {'m' * 33}…, +1\n" in long


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (changed(peers=[], neighbours=[]), "No other machine is paired with this one.\nPair one: `fleetctl"),
        ({"enabled": False}, "The fleet is off (fleet.enabled in fleetd.toml): this machine works alone."),
        (changed(removed_by="studio"), "studio removed this machine from the fleet;"),
        (
            changed(
                peers=[peer(name="printer", short_id="z9y8x7w", new=True, through="air", sees_prompts=False)]
            ),
            "\n  printer (z9y8x7w) is new: it is here on the word of air, and sees no prompts typed here.\n"
            "  → If it is yours, `fleetctl peers prompts z9y8x7w yes`; else `fleetctl unpair z9y8x7w`.\n",
        ),
        (changed(peers=[peer(new=True, sees_prompts=False)]), "not yet"),
        (
            changed(late=[f"p{i}" for i in range(7)]),
            "A member adds more machines than one may in a day; these wait: p0, p1, p2, p3, p4 and 2 more.",
        ),
        (
            changed(neighbours=[{"name": "pro", "short_id": "z9y8x7w", "pairing": True}]),
            "Showing a code: pro (z9y8x7w). Join with `fleetctl join CODE` here.",
        ),
    ],
)
def test_what_to_type_next(value: dict[str, Any], said: str) -> None:
    assert said in page(value)


def test_a_machine_alone_has_lines_of_the_terminals_width() -> None:
    lines = page(changed(peers=[], neighbours=[]), 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-2:] == ["Pair one: `fleetctl pair` here, then `fleetctl join CODE`", "there."]


# ---- The command -----------------------------------------------------------------------------------------


def test_peers_once(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    done = run("peers", home=daemon.home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == page(FLEET, None) + "\n"
    assert json.loads(run("peers", "--json", home=daemon.home).stdout) == FLEET


@pytest.mark.parametrize(
    ("here", "fleet", "shown", "said"),
    [
        (True, True, "yes", "may see prompts typed here."),
        (False, True, "not from here", "sees no prompts typed here. This machine alone does not allow it."),
        (True, False, "no (fleet)", "sees no prompts typed here. The fleet does not allow it; `--fleet`"),
        (False, False, "no (both)", "sees no prompts typed here. The fleet does not allow it; `--fleet`"),
    ],
)
def test_prompts_and_who_does_not_allow_them(
    run: Run, daemon: FakeDaemon, here: bool, fleet: bool, shown: str, said: str
) -> None:
    found = peer(sees_prompts=here and fleet, allowed_here=here, allowed_by_fleet=fleet)
    daemon.on("POST", "/fleet/v1/peers/prompts", Reply(found))
    for options, whole in (([], False), (["--fleet"], True)):
        done = run("peers", "prompts", "studio", "no", *options, home=daemon.home)
        assert done.returncode == 0
        assert done.stdout.startswith(f"studio (k3f9a2b) {said}")
        assert daemon.seen[-1].body == {"peer": "studio", "allowed": False, "fleet": whole}
    assert shown in page(changed(peers=[found]), None)


def test_prompts_wants_a_clear_word(run: Run, daemon: FakeDaemon) -> None:
    assert run("peers", "prompts", "studio", "maybe", home=daemon.home).returncode == Exit.USAGE
    assert daemon.seen == []


# ---- Over time -------------------------------------------------------------------------------------------


def test_figures_that_always_differ_are_no_change() -> None:
    later = peer(rtt_ms=0.5, bytes_per_s=1.0, heard_s=9.0, available_bytes=7, paths=[])
    before = peer(paths=[])
    assert _essence(before) == _essence(later)
    waits = [peer(state="quiet", reason=f"Nothing was heard of it for {s} s.") for s in ("2.5", "13")]
    assert _essence(waits[0]) == _essence(waits[1])
    for happened in (
        {"state": "quiet"}, {"running": 9}, {"models": []}, {"sees_prompts": False}, {"reason": "Other."},
    ):  # fmt: skip
        assert _essence(before) != _essence({**before, **happened})


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pipe_gets_each_change_once(daemon: FakeDaemon, env: dict[str, str], as_json: bool) -> None:
    gone = changed(peers=[])
    replies = [FLEET, changed(peers=[peer(rtt_ms=9.0), FLEET["peers"][1]]), gone, FLEET]
    daemon.on("GET", "/fleet/v1/peers", *(Reply(reply) for reply in replies))
    command = [*FLEETCTL, "--home", str(daemon.home), "peers", "--watch", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout is not None
        if as_json:
            seen = [json.loads(done.stdout.readline()) for _ in range(3)]
            assert seen == [FLEET, gone, FLEET]
        else:
            text = ""
            while text.count("peers usable") < 2:
                text += done.stdout.readline()
            assert text.count("No other machine is paired") == 1
            assert "\x1b" not in text
        interrupt(done)
        done.communicate(timeout=60)
    assert done.returncode == Exit.INTERRUPTED


@pytest.fixture
def start(daemon: FakeDaemon, env: dict[str, str]) -> Iterator[Start]:
    children: list[pexpect.spawn[str]] = []

    def _start(rows: int = 30, columns: int = 90) -> pexpect.spawn[str]:
        child = pexpect.spawn(
            "sh",
            # The shell stays, so that the terminal can be looked at afterwards.
            ["-c", 'before=$(stty -g); "$@"; echo "exit $?"; test "$before" = "$(stty -g)" && echo same', "-",
             *FLEETCTL, "--home", str(daemon.home), "peers", "--watch"],
            env={**env, "PROMPT_TOOLKIT_NO_CPR": "1"},
            encoding="utf-8",
            timeout=60,
            dimensions=(rows, columns),
        )  # fmt: skip
        child.delaybeforesend = None
        children.append(child)
        return child

    yield _start
    for child in children:
        child.close(force=True)


ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 0)])
def test_the_live_page_changes_in_place_and_leaves_the_terminal_as_it_was(
    daemon: FakeDaemon, start: Start, key: str, code: int
) -> None:
    # Only cells that differ are painted, so the new name has no letter where the old one had it.
    later = changed(peers=[peer(name="QQQQQQ")])
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET), Reply(FLEET), Reply(later))
    child = start()
    child.logfile_read = io.StringIO()
    child.expect_exact(ALTERNATE)
    child.expect_exact("1 of 2 peers usable")
    child.expect_exact("QQQQQQ")
    child.send(key)
    child.expect_exact(BACK)
    child.expect(f"exit {code}")
    child.expect("same")
    painted = child.logfile_read.getvalue()
    assert painted.rindex(SHOW_CURSOR) > painted.rindex(HIDE_CURSOR)


def test_a_terminated_live_page_leaves_the_terminal_as_it_was(daemon: FakeDaemon, start: Start) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    child = start()
    child.expect_exact("1 of 2 peers usable")
    [fleetctl] = psutil.Process(child.pid).children()
    fleetctl.terminate()
    child.expect_exact(BACK)
    child.expect("exit 143")
    child.expect("same")


def test_the_live_page_outlives_a_daemon_that_restarts(daemon: FakeDaemon, start: Start) -> None:
    broken = Reply({"error": {"message": "It is stopping.", "code": "draining", "hint": "Wait."}}, 503)
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET), Reply(FLEET), broken, broken, Reply(FLEET))
    child = start()
    child.expect_exact("1 of 2 peers usable")
    child.expect_exact("Trying again.")
    child.expect_exact("1 of 2 peers usable")
    child.send("q")
    child.expect("exit 0")


def test_a_long_page_scrolls() -> None:
    shown = live_page._Page()
    shown.lines = [str(i) for i in range(10)]
    assert click.unstyle(shown.shown(5)).splitlines() == ["0", "1", "2", "3", "q quits · ↓ 6 more lines"]
    shown.top = 99
    assert click.unstyle(shown.shown(5)).splitlines() == ["6", "7", "8", "9", "q quits · ↑"]
    shown.top = -1
    assert click.unstyle(shown.shown(12)).splitlines()[-2:] == ["", "q quits"]


def test_a_fault_in_drawing_is_not_a_page_that_stands_still() -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    def draw(_columns: int) -> str:
        raise ValueError("a bug")

    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        with pytest.raises(ValueError, match="a bug"):
            live_page.watch(draw)


def test_a_configured_address_that_does_not_answer_is_told_with_its_reason() -> None:
    fleet = FleetView(
        enabled=True, unanswered=[UnansweredAddress("10.0.0.9:8115", "Nothing listens there.", "Start it.")]
    )
    assert "10.0.0.9:8115, named in the settings: Nothing listens there. Start it." in render(fleet, None)


def test_a_machine_that_computes_vectors_is_not_idle() -> None:
    peer = {**FLEET["peers"][0], "running": 0, "waiting": 0, "models": []}
    shown = page({**FLEET, "peers": [{**peer, "vectors": 2}]}, None)
    assert " vectors " in shown
    assert " idle " not in shown
    assert "vectors: computes vectors or scores of texts" in shown
    both = page({**FLEET, "peers": [{**peer, "vectors": 2, "running": 1}]}, None)
    assert "1+0, vectors" in both


def test_a_legend_explains_only_what_is_there() -> None:
    idle = {**FLEET["peers"][0], "running": 0, "waiting": 0, "models": []}
    assert "LOAD:" not in page({**FLEET, "peers": [idle]}, None)
    assert "LOAD: running+waiting" in page({**FLEET, "peers": [{**idle, "running": 1}]}, None)
