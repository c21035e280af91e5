"""Pairing as people do it, `fleetctl pair` here and `fleetctl join` there, and what can go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import psutil
import pytest
from forked_programs import Programs
from interrupting import interrupt
from live_daemon import FLEETCTL, REPO, LiveDaemon, until
from live_fleet import LiveFleet, Verb, stays, view

from fleetd import limits
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile

pytestmark = [pytest.mark.one_loop]

MakeFleet = Callable[..., LiveFleet]
Begin = Callable[..., "Verb"]
Spoken = Callable[..., pexpect.spawn]
WITHIN_S = 60.0
BOLD = r"(?:\x1b\[1m)?"
CODE = rf"fleetctl join {BOLD}(\d\d-[a-z]{{5}}-[a-z]{{5}})"
PHRASE = rf"\r\n +{BOLD}([a-z]+(?:[ -][a-z]+)+)"


@pytest.fixture(scope="module")
def members(short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    with LiveFleet(
        short_dir / "pair",
        {"alpha": [], "beta": [], "gamma": []},
        meet="mdns",
        paired=False,
        programs=programs,
    ) as f:
        for name in f.names:
            until(lambda name=name: len(view(f[name])["neighbours"]) >= 2, WITHIN_S)
        yield f


@pytest.fixture
def strangers(members: LiveFleet) -> LiveFleet:
    """Three machines that see each other and belong to nobody; earlier pairings are undone."""
    for name in members.names:
        until(lambda name=name: not view(members[name])["pairing"])
        while peers := view(members[name])["peers"]:  # one may go with another
            members[name].control("POST", "/fleet/v1/unpair", {"peer": peers[0]["node_id"]})
    until(lambda: not any(view(daemon)["peers"] for daemon in members))
    return members


@pytest.fixture
def verb() -> Iterator[Begin]:
    with contextlib.ExitStack() as stack:

        def begin(daemon: LiveDaemon, *arguments: str) -> Verb:
            begun = Verb(daemon, *arguments)
            stack.callback(begun.process.communicate)
            stack.callback(begun.process.kill)
            return begun

        yield begin


@pytest.fixture
def spoken() -> Iterator[Callable[..., pexpect.spawn]]:
    """A verb on a terminal."""
    with contextlib.ExitStack() as stack:

        def begin(daemon: LiveDaemon, *arguments: str) -> pexpect.spawn:
            child = pexpect.spawn(
                sys.executable,
                [*FLEETCTL[1:], "--home", str(daemon.home), *arguments],
                cwd=str(REPO),
                env={**os.environ, "TERM": "xterm"},
                encoding="utf-8",
                timeout=WITHIN_S,
                dimensions=(40, 160),
            )
            child.delaybeforesend = None
            stack.callback(child.close, force=True)
            return child

        yield begin


def other_code(code: str) -> str:
    """Of the same machine, and wrong."""
    return code[:-1] + ("b" if code[-1] != "b" else "d")


def host_of(fleet: LiveFleet, name: str) -> str:
    host, port = fleet.peer_address(name)
    return f"{host}:{port}"


# ---- As it should go -------------------------------------------------------------------------------------


def test_one_code_brings_a_machine_into_the_whole_fleet(strangers: LiveFleet, verb: Begin) -> None:
    for inviter, joiner in (("alpha", "beta"), ("beta", "gamma")):
        pair = verb(strangers[inviter], "pair", "--yes")
        code = pair.event("code")
        assert code["name"] == inviter
        assert view(strangers[inviter])["pairing"]
        join = verb(strangers[joiner], "join", code["code"], "--yes")
        join.event("searching")
        here, there = join.event("meeting"), pair.event("meeting")
        # What people compare, and what a machine in between could not make the same.
        assert there["phrase"] == here["phrase"]
        assert (there["name"], here["name"]) == (joiner, inviter)
        assert join.event("paired")["name"] == inviter
        assert pair.event("paired")["name"] == joiner
        assert (pair.end()[0], join.end()[0]) == (0, 0)
        strangers.until_usable(inviter, joiner)
    # alpha and gamma never met before.
    strangers.until_usable()
    assert not any(view(daemon)["pairing"] for daemon in strangers)
    # And show each other no prompts until a person there allows it.
    shown = {
        name: {o: p["sees_prompts"] for o, p in strangers.peers(name).items()} for name in strangers.names
    }
    assert shown == {
        "alpha": {"beta": True, "gamma": False},
        "beta": {"alpha": True, "gamma": True},
        "gamma": {"alpha": False, "beta": True},
    }
    assert "gamma" in strangers["alpha"].fleetctl("doctor").stdout.partition("new machine")[2]
    assert strangers["alpha"].fleetctl("peers", "prompts", "gamma", "yes").returncode == 0
    assert strangers.peers("alpha")["gamma"]["sees_prompts"]


def test_attack_a_removed_machine_comes_back_under_none_of_the_names_that_it_invented(
    short_dir: Path, programs: Programs
) -> None:
    """beta adds a printer, which adds another, which adds a third. beta has the keys of all three."""
    names = {"alpha": [], "beta": [], "printer": []}
    fleet = LiveFleet(short_dir / "invented", names, meet="static", paired=False, programs=programs)
    alpha, beta, printer = (fleet.ids[name] for name in fleet.names)
    second, third = (Identity.load_or_create(fleet.root / name) for name in ("second", "third"))
    lies = Roster(beta)
    for signer, subject in ((beta, printer), (printer, second), (second, third)):
        told = Roster(signer)
        told.admit(subject.certificate, "printer", True)
        lies.merge(told.records())
    for me, others in ((alpha, (beta,)), (beta, (alpha,)), (printer, (alpha, beta))):
        roster = Roster(me, lies.records() if me is beta else ())
        for other in others:
            roster.admit(other.certificate, "alpha" if other is alpha else "beta", True)
        RosterFile(me.folder / "roster").save(roster.records())
    with fleet:
        until(
            lambda: [peer["state"] for peer in view(fleet["alpha"])["peers"]].count("usable") == 2, WITHIN_S
        )
        until(lambda: len(view(fleet["alpha"])["peers"]) == 4, WITHIN_S)
        invented = [peer for peer in view(fleet["alpha"])["peers"] if peer["name"] == "printer"]
        assert [(peer["new"], peer["through"], peer["sees_prompts"]) for peer in invented] == [
            (True, "beta", False)
        ] * 3
        assert fleet["alpha"].fleetctl("peers").stdout.count("is here on the word of beta") == 3
        done = fleet["alpha"].fleetctl("unpair", "beta", "--yes", "--json")
        assert json.loads(done.stdout)["gone"] == ["printer"] * 3
        assert view(fleet["alpha"])["peers"] == []
        # The printer goes on calling.
        until(lambda: fleet.states("printer")["alpha"] == "refused", WITHIN_S)
        assert view(fleet["alpha"])["peers"] == []
        assert fleet.saved("alpha") == set()


def test_an_address_replaces_discovery(make_fleet: MakeFleet, verb: Begin) -> None:
    fleet = make_fleet({"alpha": [], "beta": []}, meet="unknown", paired=False)
    pair = verb(fleet["alpha"], "pair", "--yes", "--no-prompts")
    code = pair.event("code")
    assert [(host, code["port"]) for host in code["addresses"]] == [fleet.peer_address("alpha")]
    join = verb(fleet["beta"], "join", code["code"], "--yes", "--host", host_of(fleet, "alpha"))
    assert join.end()[0] == 0
    assert pair.end()[0] == 0
    fleet.until_usable()
    # Each said about the other whether it may see prompts.
    assert not fleet.peers("alpha")["beta"]["sees_prompts"]
    assert fleet.peers("beta")["alpha"]["sees_prompts"]
    # Neither mDNS nor settings tell beta where alpha is; what it remembers does.
    fleet["beta"].kill()
    fleet.start("beta")
    fleet.until_usable()


def test_people_are_asked_and_shown_the_phrase(strangers: LiveFleet, spoken: Spoken) -> None:
    pair = spoken(strangers["alpha"], "pair")
    pair.expect(CODE)
    join = spoken(strangers["beta"], "join", pair.match[1])
    join.expect("see prompts typed on this one")
    join.sendline("y")
    pair.expect(r"beta \(\w{7}\) has the code")
    join.expect(r"Found alpha \(\w{7}\)")
    phrases = []
    for screen in (pair, join):
        screen.expect(PHRASE)
        phrases.append(screen.match[1])
    assert phrases[0] == phrases[1]
    pair.expect("Is it on the other screen")
    pair.sendline("y")
    pair.expect("May beta see prompts")
    pair.sendline("n")
    pair.expect("beta .* is paired and sees no prompts")
    join.expect("This machine is paired with alpha")
    for screen in (pair, join):
        screen.expect(pexpect.EOF)
        screen.close()
        assert screen.exitstatus == 0
    strangers.until_usable("alpha", "beta")
    assert not strangers.peers("alpha")["beta"]["sees_prompts"]


# ---- As it should not ------------------------------------------------------------------------------------


def test_three_guesses_close_the_window(strangers: LiveFleet, verb: Begin) -> None:
    pair = verb(strangers["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    for left in range(limits.PAIRING_TRIES - 1, -1, -1):
        exit_code, said = verb(strangers["beta"], "join", other_code(code), "--yes").end()
        assert exit_code == 6, said
        if left:
            assert pair.event("wrong_code")["tries_left"] == left
    exit_code, said = pair.end()
    assert exit_code == 6
    assert f"tried {limits.PAIRING_TRIES} times" in said
    # The right one comes too late.
    exit_code, _ = verb(strangers["beta"], "join", code, "--yes", "--host", host_of(strangers, "alpha")).end()
    assert exit_code in (6, 7)
    assert not any(view(daemon)["peers"] for daemon in strangers)


def test_two_machines_that_join_at_once_with_one_code_do_not_both_get_in(
    strangers: LiveFleet, verb: Begin
) -> None:
    pair = verb(strangers["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    where = ("--host", host_of(strangers, "alpha"))
    joins = {name: verb(strangers[name], "join", code, "--yes", *where) for name in ("beta", "gamma")}
    ends = {name: join.end()[0] for name, join in joins.items()}
    assert pair.end()[0] == 0
    assert sorted(ends.values()) in ([0, 6], [0, 7]), ends
    (winner,) = [name for name, code in ends.items() if code == 0]
    strangers.until_usable("alpha", winner)
    assert list(strangers.peers("alpha")) == [winner]
    (loser,) = set(joins) - {winner}
    assert strangers.peers(loser) == {}


def test_whoever_is_declined_stays_out(strangers: LiveFleet, verb: Begin, spoken: Spoken) -> None:
    pair = spoken(strangers["alpha"], "pair")
    pair.expect(CODE)
    join = verb(strangers["beta"], "join", pair.match[1], "--yes")
    pair.expect("Is it on the other screen")
    pair.sendline("n")
    pair.expect("was not let in")
    pair.expect(pexpect.EOF)
    pair.close()
    assert pair.exitstatus == 1
    exit_code, said = join.end()
    assert exit_code == 6
    assert re.search("declined|not let in|refused", said), said
    assert not any(view(daemon)["peers"] for daemon in strangers)
    # The code is used up.
    until(lambda: not view(strangers["alpha"])["pairing"])


def test_ctrl_c_closes_the_window(strangers: LiveFleet, verb: Begin) -> None:
    pair = verb(strangers["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    interrupt(pair.process)
    assert pair.end()[0] == 130
    until(lambda: not view(strangers["alpha"])["pairing"])
    assert verb(strangers["beta"], "join", code, "--yes", "--host", host_of(strangers, "alpha")).end()[0] != 0
    assert not any(view(daemon)["peers"] for daemon in strangers)


def test_ctrl_c_ends_the_search(strangers: LiveFleet, verb: Begin) -> None:
    # One code in a hundred begins with 42, and the code of the test before this one may still be announced.
    until(lambda: not any(each["pairing"] for each in view(strangers["beta"])["neighbours"]), WITHIN_S)
    join = verb(strangers["beta"], "join", "42-babab-babab", "--yes")
    join.event("searching")
    interrupt(join.process)
    assert join.end()[0] == 130


def test_a_joiner_that_leaves_at_the_question_is_not_let_in(
    strangers: LiveFleet, verb: Begin, spoken: Spoken
) -> None:
    pair = spoken(strangers["alpha"], "pair")
    pair.expect(CODE)
    join = verb(strangers["beta"], "join", pair.match[1], "--yes")
    join.event("searching")
    join.event("meeting")
    pair.expect("Is it on the other screen")
    interrupt(join.process)
    assert join.end()[0] == 130
    # Its daemon has left as well.
    port = strangers.peer_address("alpha")[1]
    beta = psutil.Process(strangers["beta"].process.pid)
    until(lambda: not [c for c in beta.net_connections("tcp") if c.raddr and c.raddr.port == port])
    pair.sendline("y")
    pair.expect("May beta see prompts")
    pair.sendline("y")
    pair.expect(pexpect.EOF)
    pair.close()
    assert pair.exitstatus == 6
    assert not any(view(daemon)["peers"] for daemon in strangers)


def test_a_second_window_is_refused_and_harms_not_the_first(strangers: LiveFleet, verb: Begin) -> None:
    pair = verb(strangers["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    exit_code, said = verb(strangers["alpha"], "pair", "--yes").end()
    assert exit_code == 6
    assert "open already" in said
    assert verb(strangers["beta"], "join", code, "--yes").end()[0] == 0
    assert pair.end()[0] == 0


# ---- Kills and full disks --------------------------------------------------------------------------------


def pair_and_kill(fleet: LiveFleet, victim: str) -> None:
    """Kill a machine in the moment in which it says that it is paired."""
    codes: list[str] = []
    shown, both = threading.Event(), []

    def invite() -> None:
        with fleet["alpha"].control_events("/fleet/v1/pair", {}) as events:
            for event in events:
                if event["type"] == "code":
                    codes.append(event["code"])
                    shown.set()
                elif event["type"] == "meeting":
                    yes = {"node_id": event["node_id"], "admit": True, "sees_prompts": True}
                    fleet["alpha"].control("POST", "/fleet/v1/pair/answer", yes)
                elif event["type"] == "paired":
                    if victim == "alpha":
                        fleet["alpha"].process.kill()
                    both.append("alpha")
                    return

    inviting = threading.Thread(target=invite)
    inviting.start()
    try:
        assert shown.wait(WITHIN_S)
        asked = {"code": codes[0], "host": host_of(fleet, "alpha"), "sees_prompts": True}
        with contextlib.suppress(ConnectionError, json.JSONDecodeError):
            with fleet["beta"].control_events("/fleet/v1/join", asked) as events:
                for event in events:
                    if event["type"] == "paired":
                        if victim == "beta":
                            fleet["beta"].process.kill()
                        both.append("beta")
                        break
    finally:
        inviting.join(WITHIN_S)
    assert victim in both


def no_pairing_is_lost(fleet: LiveFleet, times: int) -> None:
    for round_number in range(times):
        victim, other = ("alpha", "beta") if round_number % 2 else ("beta", "alpha")
        pair_and_kill(fleet, victim)
        fleet[victim].process.wait()
        for name, peer in (("alpha", "beta"), ("beta", "alpha")):
            assert fleet.saved(name) == {fleet.ids[peer].node_id}, (round_number, name)
        # Begin anew: the one that was killed has never met anybody.
        fleet[other].control("POST", "/fleet/v1/unpair", {"peer": fleet.ids[victim].node_id})
        (fleet.home(victim) / "identity" / "roster").unlink()
        fleet.start(victim)


@pytest.mark.timeout(400)  # twenty starts of a daemon, each with two programs beside it
def test_a_kill_after_the_word_paired_loses_no_pairing(make_fleet: MakeFleet) -> None:
    no_pairing_is_lost(make_fleet({"alpha": [], "beta": []}, meet="unknown", paired=False), 6)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_500_kills_after_the_word_paired_lose_no_pairing(make_fleet: MakeFleet) -> None:
    no_pairing_is_lost(make_fleet({"alpha": [], "beta": []}, meet="unknown", paired=False), 500)


@pytest.fixture
def small_disk(short_dir: Path) -> Iterator[Path]:
    """A file system that can be filled."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or sys.platform != "linux":
        pytest.skip("FULL DISKS ARE NOT TESTED: there is no mount command of Linux")
    place = Path(tempfile.mkdtemp(prefix="disk-", dir=short_dir))
    options = ["-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(place)]
    mounted = subprocess.run([mount, *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"FULL DISKS ARE NOT TESTED: a file system may not be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run([umount, "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("full", ["alpha", "beta"])
def test_a_full_disk_leaves_no_half_pairing(
    make_fleet: MakeFleet, verb: Begin, small_disk: Path, full: str
) -> None:
    fleet = make_fleet(
        {"alpha": [], "beta": []}, meet="unknown", paired=False, homes={full: small_disk / "home"}
    )
    filler = fill(small_disk)
    pair = verb(fleet["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    ends = {
        "beta": verb(fleet["beta"], "join", code, "--yes", "--host", host_of(fleet, "alpha")).end(),
        "alpha": pair.end(),
    }
    assert all(exit_code not in (0, 130) for exit_code, _ in ends.values()), ends
    assert "no space left" in ends[full][1].lower(), ends
    stays(lambda: not any(view(daemon)["peers"] for daemon in fleet), 1.0)
    assert fleet.saved("alpha") == fleet.saved("beta") == set()
    filler.unlink()
    pair = verb(fleet["alpha"], "pair", "--yes")
    code = pair.event("code")["code"]
    assert verb(fleet["beta"], "join", code, "--yes", "--host", host_of(fleet, "alpha")).end()[0] == 0
    assert pair.end()[0] == 0
    fleet.until_usable()
