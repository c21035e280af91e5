"""`fleetctl pair`, `join` and `unpair`: what is shown, what is asked, what the daemon is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pexpect
import pytest
from fake_daemon import FLEET, FLEETCTL, FakeDaemon, Reply, Run, data
from interrupting import once_it_waits

from fleetctl.exits import Exit
from fleetctl.verbs.pair import _host

CODE = {"type": "code", "code": "42-lusab-babad", "expires_s": 300.0, "tries": 3, "name": "mini"} | {
    "port": 8115,
    "addresses": ["192.168.1.2", "fd00::12", "100.64.0.1", "10.0.0.1"],
}
MEETING = {"type": "meeting", "node_id": "PRO", "short_id": "z9y8x7w", "name": "pro", "phrase": "lusab-gutih"}
PAIRED = {"type": "paired", "node_id": "PRO", "short_id": "z9y8x7w", "name": "pro", "sees_prompts": True} | {
    "members": ["mini", "studio", "pro"]
}
SEARCHING = {"type": "searching", "nameplate": "42"}
WRONG = {"type": "wrong_code", "tries_left": 2}
CROWDED = {"type": "crowded", "addresses": ["192.168.1.66"]}
CLOSED = {"error": {"message": "Three wrong codes.", "code": "pairing_closed", "hint": "Start again."}}
ANSWER = ("POST", "/fleet/v1/pair/answer")
PAIR, JOIN = ("POST", "/fleet/v1/pair"), ("POST", "/fleet/v1/join")

Start = Callable[..., "pexpect.spawn[str]"]


def told(*values: Any) -> Reply:
    return Reply(stream=[": keepalive 0/0\n\n", *(data(value) for value in values)])


@pytest.fixture
def start(daemon: FakeDaemon, env: dict[str, str]) -> Iterator[Start]:
    """On a terminal, where questions can be answered."""
    children: list[pexpect.spawn[str]] = []
    daemon.on(*ANSWER, Reply({"ok": True}))

    def _start(*arguments: str) -> pexpect.spawn[str]:
        command = [*FLEETCTL[1:], "--home", str(daemon.home), *arguments]
        child = pexpect.spawn(
            FLEETCTL[0], command, env=env, encoding="utf-8", timeout=60, dimensions=(40, 100)
        )
        child.delaybeforesend = None
        children.append(child)
        return child

    yield _start
    for child in children:
        child.close(force=True)


def press_ctrl_c(child: pexpect.spawn[str]) -> None:
    once_it_waits(child.pid)
    child.send("\x03")


def ended(child: pexpect.spawn[str]) -> int:
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus is not None
    return int(child.exitstatus)


def posts(daemon: FakeDaemon, route: tuple[str, str]) -> list[Any]:
    return [seen.body for seen in daemon.seen if (seen.method, seen.path) == route]


# ---- pair ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "allowed"), [("y", True), ("\r", True), ("n", False)])
def test_pairing_shows_the_code_asks_twice_and_tells_the_daemon(
    daemon: FakeDaemon, start: Start, prompts: str, allowed: bool
) -> None:
    go = threading.Event()
    paired = data({**PAIRED, "sees_prompts": allowed})
    daemon.on(*PAIR, Reply(stream=[data(CODE), data(CROWDED), data(WRONG), data(MEETING), go, paired]))
    child = start("pair")
    child.expect("42-lusab-babad")
    child.expect("On the machine that joins mini, type within 5 min:")
    child.expect("fleetctl join .*?42-lusab-babad")
    child.expect("--host 192.168.1.2\r")
    child.expect("Many connections come from 192.168.1.66 and do not try the code.")
    child.expect("wrong code; 2 tries left")
    child.expect(r"pro \(z9y8x7w\) has the code")
    child.expect("lusab-gutih")
    child.expect("Is it on the other screen")
    child.send("y\r")
    child.expect(r"May pro see prompts of this fleet\?")
    child.send(prompts if prompts == "\r" else f"{prompts}\r")
    child.expect(r"waiting for pro")
    go.set()
    child.expect(r"pro \(z9y8x7w\) is paired and " + ("may see" if allowed else "sees no") + " prompts.")
    child.expect("The fleet: mini, studio, pro.")
    assert ended(child) == Exit.OK
    assert posts(daemon, ANSWER) == [{"node_id": "PRO", "admit": True, "sees_prompts": allowed}]


def test_a_man_in_the_middle_shows_another_phrase_and_is_not_let_in(daemon: FakeDaemon, start: Start) -> None:
    reply = Reply(stream=[data(CODE), data(MEETING), threading.Event()])
    daemon.on(*PAIR, reply)
    child = start("pair")
    child.expect("Is it on the other screen")
    child.send("\r")  # nothing is taken for granted
    child.expect("invalid input")
    child.send("n\r")
    child.expect(r"pro \(z9y8x7w\) was not let in")
    assert ended(child) == Exit.ERROR
    assert posts(daemon, ANSWER) == [{"node_id": "PRO", "admit": False, "sees_prompts": False}]
    assert reply.gone.wait(60)


@pytest.mark.parametrize("at", ["left", "Is it on the other screen"])
def test_ctrl_c_closes_the_window(daemon: FakeDaemon, start: Start, at: str) -> None:
    events = (
        [data(CODE), threading.Event()] if at == "left" else [data(CODE), data(MEETING), threading.Event()]
    )
    reply = Reply(stream=events)
    daemon.on(*PAIR, reply)
    child = start("pair")
    child.expect(at)
    press_ctrl_c(child)
    child.expect("The window is closed")
    assert ended(child) == Exit.INTERRUPTED
    assert reply.gone.wait(60)
    assert posts(daemon, ANSWER) == []


@pytest.mark.parametrize(("options", "allowed"), [(["--yes"], True), (["--yes", "--no-prompts"], False)])
def test_scripts_say_it_beforehand(run: Run, daemon: FakeDaemon, options: list[str], allowed: bool) -> None:
    daemon.on(*ANSWER, Reply({"ok": True}))
    daemon.on(*PAIR, told(CODE, MEETING, {**PAIRED, "sees_prompts": allowed}))
    done = run("pair", *options, home=daemon.home)
    assert done.returncode == 0
    assert "fleetctl join 42-lusab-babad --host fd00::12\n" in done.stdout
    assert "10.0.0.1" not in done.stdout  # a list of all addresses would bury the code
    assert done.stdout.endswith("The fleet: mini, studio, pro.\n")
    assert "lusab-gutih" in done.stderr
    assert posts(daemon, ANSWER) == [{"node_id": "PRO", "admit": True, "sees_prompts": allowed}]


def test_pair_as_json_is_a_line_per_event(run: Run, daemon: FakeDaemon) -> None:
    daemon.on(*ANSWER, Reply({"ok": True}))
    daemon.on(*PAIR, told(CODE, WRONG, MEETING, PAIRED))
    done = run("pair", "--json", "--yes", home=daemon.home)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [CODE, WRONG, MEETING, PAIRED]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["pair"], "--yes"),
        (["pair", "--json"], "--yes"),
        (["pair", "--no-prompts"], "--yes"),
        (["join", "42-lusab-babad"], "--yes or --no-prompts"),
        (["unpair", "air"], "--yes"),
        (["unpair", "air", "--json"], "--yes"),
    ],
)
def test_where_nobody_can_be_asked_nothing_is_begun(
    run: Run, daemon: FakeDaemon, arguments: list[str], needed: str
) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    done = run(*arguments, home=daemon.home)
    assert done.returncode == Exit.USAGE
    assert needed in done.stderr
    assert [seen for seen in daemon.seen if seen.method == "POST"] == []


@pytest.mark.parametrize(
    ("verb", "route"), [(["pair", "--yes"], PAIR), (["join", "42-lusab-babad", "--yes"], JOIN)]
)
def test_a_pairing_that_fails(run: Run, daemon: FakeDaemon, verb: list[str], route: tuple[str, str]) -> None:
    daemon.on(*route, told(WRONG, CLOSED))
    done = run(*verb, home=daemon.home)
    assert done.returncode == Exit.PAIRING
    assert done.stderr.endswith("error: Three wrong codes.\nStart again.\n")
    for broken in (
        told(WRONG),
        Reply(stream=[data(WRONG), "drop"]),
        told([1]),
        Reply(stream=["data: {\n\n"]),
    ):
        daemon.on(*route, broken)
        assert run(*verb, home=daemon.home).returncode == Exit.FAILED


def test_the_other_side_may_be_gone_before_the_answer(run: Run, daemon: FakeDaemon) -> None:
    daemon.on(*PAIR, told(CODE, MEETING, PAIRED))
    daemon.on(*ANSWER, Reply(CLOSED, 403))
    done = run("pair", "--yes", home=daemon.home)
    assert done.returncode == Exit.PAIRING
    assert "is paired" not in done.stdout


@pytest.mark.parametrize(
    ("address", "port", "shown"),
    [
        ("10.0.0.1", 8115, "10.0.0.1"),
        ("10.0.0.1", 9000, "10.0.0.1:9000"),
        ("fd00::1", 8115, "fd00::1"),
        ("fd00::1", 9000, "[fd00::1]:9000"),
        ("\x1b[2J", 8115, "\\x1b[2J"),
    ],
)
def test_an_address_to_type(address: str, port: int, shown: str) -> None:
    assert _host(address, port) == shown


# ---- join ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "allowed"), [("\r", True), ("n\r", False)])
def test_joining_asks_first_shows_the_phrase_and_waits(
    daemon: FakeDaemon, start: Start, answer: str, allowed: bool
) -> None:
    searching, go = threading.Event(), threading.Event()
    paired = data({**PAIRED, "sees_prompts": allowed})
    daemon.on(*JOIN, Reply(stream=[data(SEARCHING), searching, data(MEETING), go, paired]))
    child = start("join", "42-lusab-babad")
    child.expect(r"May the machine that shows this code see prompts typed on this one\? \[Y/n\]")
    assert posts(daemon, JOIN) == []
    child.send(answer)
    child.expect("looking on this network for the machine that shows 42-lusab-babad")
    searching.set()
    child.expect(r"Found pro \(z9y8x7w\).*Ctrl-C")
    child.expect("lusab-gutih")
    child.expect("waiting for the answer on pro")
    go.set()
    kept = "" if allowed else "It sees no prompts typed here. "
    child.expect(rf"This machine is paired with pro \(z9y8x7w\). {kept}The fleet: mini, studio, pro.")
    assert ended(child) == Exit.OK
    assert posts(daemon, JOIN) == [{"code": "42-lusab-babad", "sees_prompts": allowed}]


def test_ctrl_c_stops_joining(daemon: FakeDaemon, start: Start) -> None:
    reply = Reply(stream=[data(SEARCHING), data(MEETING), threading.Event()])
    daemon.on(*JOIN, reply)
    child = start("join", "42-lusab-babad", "--yes")
    child.expect("waiting for the answer")
    press_ctrl_c(child)
    child.expect("Stopped.")
    assert ended(child) == Exit.INTERRUPTED
    assert reply.gone.wait(60)


@pytest.mark.parametrize("code", ["11-aaa", "lusab-babad", "42-lusab-baba", "", "42-lusab-babad-x"])
def test_what_is_no_code_is_refused_before_anything_is_asked(daemon: FakeDaemon, run: Run, code: str) -> None:
    done = run("join", code, home=daemon.home)
    assert done.returncode == Exit.PAIRING
    assert "This is not a pairing code; one looks like 42-lusab-babad." in done.stderr
    assert not daemon.seen


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--yes"], {"sees_prompts": True}),
        (["--no-prompts"], {"sees_prompts": False}),
        (["--yes", "--no-prompts"], {"sees_prompts": False}),
        (["--yes", "--host", "10.0.0.7:9000"], {"sees_prompts": True, "host": "10.0.0.7:9000"}),
    ],
)
def test_join_in_a_script(run: Run, daemon: FakeDaemon, options: list[str], body: dict[str, Any]) -> None:
    daemon.on(*JOIN, told(SEARCHING, MEETING, PAIRED))
    done = run("join", "42 lusab babad", *options, home=daemon.home)
    assert done.returncode == 0
    assert done.stdout == "This machine is paired with pro (z9y8x7w). The fleet: mini, studio, pro.\n"
    assert posts(daemon, JOIN) == [{"code": "42 lusab babad", **body}]
    as_json = run("join", "42-lusab-babad", "--json", *options, home=daemon.home)
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == [SEARCHING, MEETING, PAIRED]


def test_a_name_from_another_machine_cannot_write_the_screen(run: Run, daemon: FakeDaemon) -> None:
    nasty = "\x1b[2J\x9b2J\u202e\rstudio\nThe phrases agree."
    daemon.on(*JOIN, told({**MEETING, "name": nasty}, {**PAIRED, "name": nasty, "members": [nasty]}))
    done = run("join", "42-lusab-babad", "--yes", home=daemon.home)
    assert done.returncode == 0
    assert "\x1b[2J" not in done.stdout + done.stderr
    assert "\nThe phrases agree." not in done.stdout + done.stderr
    shown = (
        done.stdout + done.stderr + run("join", "42-lusab-babad", "--yes", "--json", home=daemon.home).stdout
    )
    assert not set(shown) & set("\x1b\x9b\u202e")


# ---- unpair ----------------------------------------------------------------------------------------------

UNPAIRED = {"node_id": "AIR", "name": "air", "told": ["studio", "spark"], "pending": ["pro"]}
UNPAIR = ("POST", "/fleet/v1/unpair")


def test_unpair_says_who_knows(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    alone = {**UNPAIRED, "told": [], "pending": []}
    daemon.on(*UNPAIR, Reply(UNPAIRED), Reply(alone), Reply(UNPAIRED))
    done = run("unpair", "--yes", "air", home=daemon.home)
    assert done.stdout == (
        "air is not in the fleet any more.\n"
        "Told: studio, spark.\n"
        "Away, and told when next seen: pro.\n"
    )  # fmt: skip
    assert run("unpair", "--yes", "air", home=daemon.home).stdout == "air is not in the fleet any more.\n"
    assert json.loads(run("unpair", "--yes", "--json", "air", home=daemon.home).stdout) == UNPAIRED
    assert posts(daemon, UNPAIR) == [{"peer": "air"}] * 3


@pytest.mark.parametrize("typed", ["n\r", "\r", "y\r"])
def test_unpair_asks(daemon: FakeDaemon, start: Start, typed: str) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    daemon.on(*UNPAIR, Reply(UNPAIRED))
    child = start("unpair", "q7w2e3r")
    child.expect(r"Remove air \(q7w2e3r\) from the fleet\? \[y/N\]")
    child.send(typed)
    agreed = typed == "y\r"
    child.expect("not in the fleet any more" if agreed else r"air \(q7w2e3r\) stays")
    assert ended(child) == (Exit.OK if agreed else Exit.ERROR)
    assert posts(daemon, UNPAIR) == ([{"peer": "q7w2e3r"}] if agreed else [])


#: studio vouched for air, and for nobody else.
VOUCHED = {**FLEET, "peers": [{**FLEET["peers"][0], "brings": ["AIR"]}, FLEET["peers"][1]]}


@pytest.mark.parametrize(("typed", "kept"), [("y", ["AIR"]), ("", []), ("n", [])])
def test_unpair_asks_whether_to_keep_what_goes_with_a_machine(
    daemon: FakeDaemon, start: Start, typed: str, kept: list[str]
) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(VOUCHED))
    daemon.on(*UNPAIR, Reply({"name": "studio", "gone": [] if kept else ["air"], "kept": kept and ["air"]}))
    child = start("unpair", "studio")
    child.expect(r"Remove studio \(k3f9a2b\) from the fleet\?")
    child.send("y\r")
    child.expect(r"air \(q7w2e3r\) is here on the word of studio \(k3f9a2b\) alone, and goes with it.")
    child.expect(r"Keep it\?")
    child.send(f"{typed}\r")
    child.expect(
        "Kept, without prompts" if kept else "Gone with it, as they were here on its word alone: air"
    )
    assert ended(child) == Exit.OK
    assert posts(daemon, UNPAIR) == [{"peer": "studio", **({"keep": kept} if kept else {})}]


def test_unpair_without_a_person_names_what_goes_and_keeps_what_it_is_told_to(
    run: Run, daemon: FakeDaemon
) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(VOUCHED))
    daemon.on(*UNPAIR, Reply({"name": "studio", "gone": ["air"]}), Reply({"name": "studio", "kept": ["air"]}))
    asked = run("unpair", "studio", home=daemon.home)
    assert asked.returncode == Exit.USAGE
    assert "This removes studio, and with it (unless --keep) air; say --yes" in asked.stderr
    assert "Gone with it" in run("unpair", "studio", "--yes", home=daemon.home).stdout
    assert "Kept" in run("unpair", "studio", "--yes", "--keep", "air", home=daemon.home).stdout
    assert posts(daemon, UNPAIR) == [{"peer": "studio"}, {"peer": "studio", "keep": ["air"]}]


@pytest.mark.parametrize("verb", [["pair", "--yes"], ["join", "42-lusab-babad", "--yes"]])
def test_a_pairing_names_the_machines_that_came_with_it(
    run: Run, daemon: FakeDaemon, verb: list[str]
) -> None:
    paired = data({**PAIRED, "brought": ["printer"]})
    route = PAIR if verb[0] == "pair" else ("POST", "/fleet/v1/join")
    daemon.on(*ANSWER, Reply({"ok": True}))
    daemon.on(*route, Reply(stream=[data(MEETING), paired]))
    shown = run(*verb, home=daemon.home).stdout
    assert "On its word: printer. What came so sees no prompts typed here until" in shown


@pytest.mark.parametrize("name", ["mini", "m1n1abc", "MINI"])
def test_a_machine_does_not_unpair_itself(run: Run, daemon: FakeDaemon, name: str) -> None:
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    done = run("unpair", "--yes", name, home=daemon.home)
    assert done.returncode == Exit.REFUSED
    assert "mini (m1n1abc) is this machine." in done.stderr
    assert "`fleetctl unpair m1n1abc`" in done.stderr
    assert posts(daemon, UNPAIR) == []


def test_a_peer_with_this_machines_name_can_be_unpaired(run: Run, daemon: FakeDaemon) -> None:
    twin = {**FLEET["peers"][0], "name": "mini"}
    daemon.on("GET", "/fleet/v1/peers", Reply({**FLEET, "peers": [twin]}))
    daemon.on(*UNPAIR, Reply(UNPAIRED))
    assert run("unpair", "--yes", "mini", home=daemon.home).returncode == 0
