"""A machine is kept awake exactly while it computes: fakes of caffeinate and systemd-inhibit on the PATH."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from live_daemon import until
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.power import keep_awake
from fleetd.power.keep_awake import KeepAwake, battery_share, commands
from fleetd.power.slept import SleepClock, asleep_s

# What `man caffeinate` promises of -w: it ends when the process with this id does.
CAFFEINATE = """
echo "$@" >> "$0.log"
[ "$1 $2 $3" = "-i -s -w" ] || exit 64
while kill -0 "$4"; do sleep 0.05; done
"""
# systemd-inhibit runs a command while it holds the lock. Without a session, a lock on sleep is refused in
# these words (systemd/systemd#18619), and a lock on idleness is not (hgaiser/moonshine#81).
INHIBIT = """
echo "$@" >> "$0.log"
case "$1" in *sleep*) echo "Failed to inhibit: Access denied" >&2; exit 1;; esac
while case "$1" in --*) true;; *) false;; esac; do shift; done
"$@"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a shell script on the PATH; returns the file in which it notes its arguments."""

    def make(name: str, script: str) -> Path:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / f"{name}.log"

    return make


class AwakeMachine:
    def __init__(self, platform: str = "darwin", *, pid: int | None = None, **settings: float) -> None:
        self.working = False
        self.share: float | None = None
        self.now_s = 0.0
        self.awake = KeepAwake(
            lambda: self.working,
            candidates=commands(platform, os.getpid() if pid is None else pid, portable=False),
            battery=lambda: self.share,
            monotonic=lambda: self.now_s,
            **settings,  # type: ignore[arg-type]
        )

    @property
    def child(self) -> psutil.Process:
        assert self.awake._process is not None
        return psutil.Process(self.awake._process.pid)

    async def look(self, *, working: bool) -> bool:
        self.working = working
        await self.awake.look()
        return self.awake.view.held


async def becomes(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for another process, of which only the event loop may hear that it has ended."""
    async with asyncio.timeout(60):
        while not (await found if isinstance(found := condition(), Awaitable) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def gone(processes: list[psutil.Process]) -> None:
    await becomes(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))


async def test_a_mac_is_kept_awake_while_it_works_and_no_longer(fake: Callable[[str, str], Path]) -> None:
    asked, mac = fake("caffeinate", CAFFEINATE), AwakeMachine()
    assert not await mac.look(working=False)
    assert await mac.look(working=True), mac.awake.view
    child = mac.child
    await becomes(lambda: asked.exists() and asked.read_text() != "")
    assert await mac.look(working=True)
    assert mac.child == child
    assert not await mac.look(working=False)
    assert not child.is_running()
    assert asked.read_text() == f"-i -s -w {os.getpid()}\n"


@pytest.mark.one_loop
async def test_it_does_not_outlive_a_daemon_that_is_killed(fake: Callable[[str, str], Path]) -> None:
    fake("caffeinate", CAFFEINATE)
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    mac = AwakeMachine(pid=daemon.pid)
    assert await mac.look(working=True)
    child = mac.child
    daemon.kill()
    await daemon.wait()
    await gone([child])
    await mac.look(working=False)


@pytest.mark.one_loop
async def test_linux_takes_the_lock_that_it_is_given(fake: Callable[[str, str], Path]) -> None:
    asked, machine = fake("systemd-inhibit", INHIBIT), AwakeMachine("linux")

    async def second() -> bool:
        held = await machine.look(working=True)
        return held and "--what=idle " in asked.read_text()

    asked.touch()
    await becomes(second)
    child = machine.child
    until(child.children)
    assert [line.split()[0] for line in asked.read_text().splitlines()] == [
        "--what=sleep:idle",
        "--what=idle",
    ]
    family = [child, *child.children()]
    assert not await machine.look(working=False)
    until(lambda: not any(process.is_running() for process in family))


LOSES_ITS_DAEMON = """
import asyncio, os, sys
from fleetd.power.keep_awake import KeepAwake, commands

async def main():
    _, idle = commands("linux", os.getpid(), portable=False)
    awake = KeepAwake(lambda: True, candidates=[idle], battery=lambda: None)
    await awake.look()
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.one_loop
async def test_linux_lets_go_when_the_daemon_is_killed(fake: Callable[[str, str], Path]) -> None:
    fake("systemd-inhibit", INHIBIT)
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOSES_ITS_DAEMON, stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    assert await daemon.stdout.readline() == b"held\n"
    started = psutil.Process(daemon.pid)
    until(lambda: len(started.children(recursive=True)) == 2)
    family = started.children(recursive=True)
    daemon.kill()
    await daemon.wait()
    await gone(family)


async def test_a_low_battery_comes_first(fake: Callable[[str, str], Path]) -> None:
    fake("caffeinate", CAFFEINATE)
    mac = AwakeMachine(least_battery=0.3)
    mac.share = 0.31
    assert await mac.look(working=True)
    mac.share = 0.29
    assert not await mac.look(working=True)
    assert mac.awake.view.refused == "the battery is at 29%, less than power.least_battery"
    mac.share = None
    assert await mac.look(working=True)
    assert mac.awake.view.refused == ""
    assert not await mac.look(working=False)


async def test_a_system_that_refuses_is_told_once_and_asked_again_later(
    fake: Callable[[str, str], Path],
) -> None:
    asked = fake("caffeinate", 'echo x >> "$0.log"; echo "no power assertions here" >&2; exit 1\n')
    mac = AwakeMachine()

    async def refused() -> bool:
        await mac.look(working=True)
        return bool(mac.awake.view.refused)

    with capture_logs() as logs:
        for _ in range(2):
            await becomes(refused)
            assert mac.awake.view.refused == "caffeinate: no power assertions here"
            assert not await mac.look(working=True)
            mac.now_s += limits.POWER_AGAIN_S
    assert len(asked.read_text().splitlines()) == 2
    assert [line["event"] for line in logs] == ["power.not_held"] * 2


@pytest.mark.parametrize(("platform", "word"), [("darwin", "no such file"), ("sunos5", "no command")])
async def test_without_the_program_the_machine_computes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, word: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = AwakeMachine(platform)
    assert not await machine.look(working=True)
    assert word in machine.awake.view.refused


def test_a_laptop_sleeps_when_its_lid_is_closed() -> None:
    assert commands("darwin", 7, portable=True) == [["caffeinate", "-i", "-w", "7"]]
    # As in jundot/omlx#1081, where a Mac without a lid is woken for its work.
    assert commands("darwin", 7, portable=False) == [["caffeinate", "-i", "-s", "-w", "7"]]


async def test_it_may_be_switched_off(fake: Callable[[str, str], Path]) -> None:
    fake("caffeinate", CAFFEINATE)
    assert not await AwakeMachine(enabled=False).look(working=True)


@pytest.mark.parametrize(
    ("plugged", "share"),
    [(True, None), (None, None), (False, 0.89)],
)
def test_the_battery_counts_only_while_it_is_used(
    monkeypatch: pytest.MonkeyPatch, plugged: bool | None, share: float | None
) -> None:
    # 89 %: "Now drawing from 'Battery Power'" of imwally/battstat#2, as psutil reads the same source.
    class Battery:
        percent, power_plugged = 89, plugged

    monkeypatch.setattr(psutil, "sensors_battery", Battery, raising=False)
    assert battery_share() == share


def test_a_battery_that_cannot_be_read_is_no_reason_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise SystemError("<built-in function sensors_battery> returned NULL")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    assert battery_share() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    (command,) = keep_awake.own_commands()
    assert "-s" not in command


# ---- sleep -----------------------------------------------------------------------------------------------


def test_sleep_is_what_one_clock_has_and_the_other_has_not() -> None:
    asleep = [100.0]
    clock = SleepClock(lambda: asleep[0])
    assert clock.slept_s() == 0
    asleep[0] = 100.5
    assert clock.slept_s() == 0
    asleep[0] = 160.0
    assert clock.slept_s() == 60.0
    assert clock.slept_s() == 0


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no clock tells of sleep here")
def test_the_clocks_of_this_system_are_read() -> None:
    assert -1 < asleep_s() < 10**8
    assert keep_awake.SleepClock().slept_s() == 0


async def test_a_machine_that_has_slept_says_so() -> None:
    asleep_for = iter([0.0, 3600.0])
    told = asyncio.Event()

    def working() -> bool:
        told.set()
        return False

    awake = KeepAwake(working, candidates=[], clock=SleepClock(lambda: next(asleep_for)))
    with capture_logs() as logs:
        running = asyncio.create_task(awake.run())
        await told.wait()
        running.cancel()
        await asyncio.wait([running])
    assert ("machine.slept", 3600) in [(line["event"], line.get("slept_s")) for line in logs]
