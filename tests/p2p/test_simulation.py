"""Fleets in virtual time: whatever happened, they come together; nobody is declared dead who lives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
from rosters import said
from simulation import Host, Weather, World

from fleetd.p2p.membership.roster import Roster, RosterMember

STRANGER = 90


def stranger(world: World) -> Host:
    """It knows everybody's certificate and address and takes all of them for its fleet."""
    host = world.add(STRANGER)
    roster = Roster(host.me)
    for other in world.hosts.values():
        if other is not host:
            roster.admit(other.me.certificate, other.name, True)
            host.remembered[other.node_id] = other.addresses
    host.records = roster.records()
    return host


def trouble(world: World, random: Random, spare: list[Host]) -> None:
    """One thing that happens to a fleet. The first machine is never unpaired: it tells what the fleet is."""
    host = random.choice([host for host in world.hosts.values() if host.number != STRANGER])
    match random.randrange(12):
        case 0:
            world.crash(host, power=random.random() < 0.5)
        case 1:
            world.stop(host)
        case 2 | 3:
            for other in world.hosts.values():
                if other.node is None and random.random() < 0.5:
                    world.start(other)
        case 4:
            world.stall(host, random.uniform(0.1, 4))
        case 5:
            world.split(random.sample(list(world.hosts.values()), len(world.hosts) // 2))
        case 6:
            world.heal()
        case 7:
            if (
                spare
                and spare[-1] is not host
                and host.node is not None
                and host.node.roster.removed_by is None
            ):
                other = spare.pop()
                if other.node is None:
                    world.start(other)
                world.pair(host, other)
        case 8:
            world.unpair(host, random.choice(list(world.hosts.values())[1:]))
        case 9:
            host.wall_s += random.uniform(-1e6, 1e6)
        case 10:
            if host.node is not None:
                world.crash(host)
                world.start(host)
        case 11:
            if host.node is not None:
                host.node.publish()


def scenario(seed: int) -> World:
    """A random fleet, random trouble; then everything is switched on and connected, and left alone."""
    random = Random(seed)
    delay_s = random.choice([0.0002, 0.002, 0.03])
    weather = Weather(
        delay_s, delay_s * random.random() * 2, random.choice([0, 0.01, 0.05]), random.choice([0, 0.3])
    )
    world = World(seed, weather)
    hosts = world.fleet(random.choice([2, 3, 3, 4, 5]), interfaces=random.choice([1, 2]))
    if random.random() < 0.3:
        for host in hosts:
            host.mdns = False
            host.static = (hosts[0].addresses[0], hosts[1].addresses[0])
    spare = [world.add(number, mdns=hosts[0].mdns) for number in (10, 11)]
    for host in spare:
        host.static = hosts[0].static
    world.start(stranger(world))
    for host in hosts:
        world.later(random.random() * 2, lambda host=host: host.node or world.start(host))
    for _ in range(random.randint(3, 12)):
        world.run(random.choice([0.01, 0.3, 1, 3, 7]) * random.random())
        trouble(world, random, spare)
    world.run(random.random() * 3)
    world.heal()
    for host in world.hosts.values():
        if host.node is None:
            world.start(host)
    return world


def comes_together(seeds: range) -> None:
    for seed in seeds:
        world = scenario(seed)
        # Machines that lost sight of each other call again after some 10 s, which takes 5 s where nobody
        # answers; those that know no address hear each other's mDNS within a minute.
        world.settle(70)
        # And it stays so: what was held up by a partition has arrived, and a card may just be under way.
        world.run(20)
        world.settle(5)


def test_whatever_happened_a_fleet_comes_together() -> None:
    comes_together(range(40))


@pytest.mark.long
def test_whatever_happened_a_fleet_comes_together_5000_times() -> None:
    comes_together(range(40, 5200))


def test_the_same_seed_gives_the_same_run() -> None:
    assert scenario(7).trace == scenario(7).trace
    assert scenario(7).trace != scenario(8).trace


def started(seed: int, count: int, weather: Weather | None = None, **more: Any) -> World:
    """A fleet that has come together."""
    world = World(seed, weather)
    for host in world.fleet(count, **more):
        world.start(host)
    world.settle(5)
    return world


def now_and_then(seconds: float, world: World, what: Callable[[], None]) -> None:
    """What happens on average every so many seconds."""
    wait_s = world.random.expovariate(1 / seconds)

    def again() -> None:
        what()
        now_and_then(seconds, world, what)

    world.later(wait_s, again)


def usable_by(world: World, host: Host) -> list[str]:
    return [
        node.host.name
        for node in world.running()
        if (peer := node.mesh.peers.get(host.node_id)) is not None and peer.usable
    ]


# ---- Coming together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "seeds"), [(2, 40), (10, 5), pytest.param(10, 20, marks=pytest.mark.long)])
def test_machines_that_are_switched_on_at_once_have_one_session_each_within_two_seconds(
    count: int, seeds: int
) -> None:
    """Each pair calls from both sides. One second is for sessions that are replaced."""
    for seed in range(seeds):
        world = World(seed, Weather(delay_s=0.001, jitter_s=0.002))
        for host in world.fleet(count):
            world.start(host)
        world.settle(2)
        world.run(3)
        assert not world.converged(), seed
        assert world.counts["dials"] <= count * (count - 1), seed


@pytest.mark.long
def test_many_machines_that_are_switched_on_at_once() -> None:
    for count in (30, 50):
        test_machines_that_are_switched_on_at_once_have_one_session_each_within_two_seconds(count, 3)


@pytest.mark.parametrize("delay_s", [0.0001, 0.01, 0.1])
def test_simultaneous_calls_end_in_one_session(delay_s: float) -> None:
    for seed in range(30):
        world = World(seed, Weather(delay_s, delay_s))
        a, b = world.fleet(2, mdns=False)
        for host, other in ((a, b), (b, a)):
            host.remembered[other.node_id] = other.addresses
            world.start(host)
        world.settle(3)
        world.run(5)
        assert not world.converged(), seed
        assert world.counts["dials"] == 2, seed


def test_news_reach_ten_machines_within_two_seconds() -> None:
    for seed in range(5):
        world = started(seed, 10)
        newcomer = world.add(10)
        world.start(newcomer)
        world.pair(world.hosts[3], newcomer)
        world.settle(2)
        for host in world.hosts.values():
            assert host.node is not None
            host.node.publish()
        assert world.settle(2) < 0.1, seed
        world.unpair(world.hosts[0], newcomer)
        assert world.settle(2) < 0.1, seed


def test_attack_three_machines_that_a_member_invented_are_gone_with_it() -> None:
    """The liar adds the first, which adds the second, which adds the third. All of them run, and call."""
    for seed in range(5):
        world = started(seed, 4)
        honest, liar = [world.hosts[0], *list(world.hosts.values())[2:]], world.hosts[1]
        ghosts = [world.add(number) for number in (20, 21, 22)]
        lies = [said(one.me, other.me, 7) for one, other in itertools.pairwise([liar, *ghosts])]
        assert liar.node is not None
        liar.node.roster.merge(lies)
        for ghost in ghosts:
            ghost.records = (*liar.node.roster.records(), *(said(ghost.me, each.me, 7) for each in honest))
            world.start(ghost)
        liar.node.roster_changed()
        invented = {ghost.node_id for ghost in ghosts}
        assert world.run(10, partial(all_know, honest, invented)), seed
        world.run(5)
        assert all(members(host)[ghost].through != ghost for host in honest for ghost in invented)
        world.unpair(honest[0], liar)
        world.run(65)
        for host in honest:
            assert set(members(host)) == {other.node_id for other in honest if other is not host}, seed
            assert host.node is not None
            linked = {link.node_id for link in host.node.mesh.links.values()}
            assert not linked & (invented | {liar.node_id})


def all_know(hosts: list[Host], whom: set[str]) -> bool:
    return all(whom <= set(members(host)) for host in hosts)


def members(host: Host) -> Mapping[str, RosterMember]:
    assert host.node is not None
    return host.node.roster.members


def test_machines_without_mdns_meet_by_what_one_of_them_tells() -> None:
    for seed in range(10):
        world = World(seed)
        hosts = world.fleet(6, mdns=False)
        for host in hosts:
            host.static = (hosts[0].addresses[0],)  # the first has itself on its list, as copied settings do
            world.start(host)
        world.settle(3)


def test_machines_that_are_off_keep_nobody_waiting_for_ever() -> None:
    """Forty calls that come to nothing take 5 s each, eight at a time, and everybody gets a turn."""
    for seed in range(3):
        world = World(seed)
        hosts = world.fleet(42, mdns=False, interfaces=2)
        for other in hosts[1:]:
            hosts[0].remembered[other.node_id] = other.addresses
            other.on = False
        last = list(Roster(hosts[0].me, hosts[0].records).members)[-1]
        (living,) = [host for host in hosts if host.node_id == last]
        world.start(hosts[0])
        world.run(60)
        world.start(living)
        world.settle(60)


def test_a_flood_of_claims_does_not_keep_members_apart() -> None:
    """A stranger announces every member at addresses that swallow calls, again and again."""
    for seed in range(3):
        world = started(seed, 3)
        hosts = list(world.hosts.values())

        def claim(world: World = world, hosts: list[Host] = hosts) -> None:
            for host, other in itertools.permutations(hosts, 2):
                if host.node is not None:
                    lies = [(f"10.9.{world.random.randrange(256)}.{i}", 1) for i in range(16)]
                    host.node.mesh.address_seen(other.node_id, lies, "mdns", world.now)
                    host.node.perform()

        now_and_then(0.5, world, claim)
        world.run(60)
        world.split(hosts[:1])
        world.run(20)
        world.heal()
        world.settle(40)


# ---- Life and death --------------------------------------------------------------------------------------


def lives(seed: int, count: int, hours: float) -> None:
    world = started(seed, count, Weather(0.001, 0.004, loss=0.05))
    hosts = list(world.hosts.values())
    now_and_then(60, world, lambda: world.stall(world.random.choice(hosts), 2.0))
    world.run(5)  # until the last replaced session is closed
    began = len(world.trace)
    world.run(hours * 3600)
    assert not [each for each in world.trace[began:] if each[1] == "closed"], seed
    assert not world.given_up, seed
    world.settle(5)


def test_loss_and_stalls_are_no_death() -> None:
    for seed in range(4):
        lives(seed, 3, 0.25)


@pytest.mark.long
def test_loss_and_stalls_are_no_death_in_a_day() -> None:
    for seed in range(100, 104):
        lives(seed, 3, 24)


def test_a_machine_without_power_is_used_by_nobody_after_three_seconds() -> None:
    for seed in range(10):
        world = started(seed, 5)
        world.run(world.random.uniform(0, 10))
        victim = world.hosts[world.random.randrange(5)]
        world.crash(victim, power=True)
        assert len(usable_by(world, victim)) == 4
        world.run(3)
        assert usable_by(world, victim) == [], seed
        world.run(3)
        assert not any(node.sessions(victim.node_id) for node in world.running()), seed


@pytest.mark.parametrize("end", [World.crash, World.stop])
def test_a_process_that_ends_is_used_by_nobody_at_once(end: Callable[[World, Host], None]) -> None:
    for seed in range(10):
        world = started(seed, 5)
        victim = world.hosts[world.random.randrange(5)]
        end(world, victim)
        world.run(0.1)
        assert usable_by(world, victim) == [], seed


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("mdns", [False, True])
@pytest.mark.parametrize("seeds", [4, pytest.param(40, marks=pytest.mark.long)])
def test_a_restarted_machine_is_usable_within_two_seconds(power: bool, mdns: bool, seeds: int) -> None:
    for seed in range(seeds):
        world = started(seed, 5)
        host = world.hosts[world.random.randrange(5)]
        world.run(1)  # until what it learned is on its disk
        epoch = host.epoch
        for other in world.hosts.values():
            other.mdns = mdns
        world.crash(host, power=power)
        host.wall_s -= world.random.choice([0, 1e9])
        world.run(world.random.choice([0.01, 1, 10, 100]))
        world.start(host)
        assert host.epoch > epoch
        world.run(2)
        assert len(usable_by(world, host)) == 4, seed
        world.settle(2)


def test_clocks_that_are_set_change_nothing() -> None:
    def run(step_s: float) -> list[tuple[Any, ...]]:
        world = started(3, 4)
        for host in world.hosts.values():
            host.wall_s += step_s
        world.crash(world.hosts[1])
        world.run(1)
        world.start(world.hosts[1])
        world.run(20)
        return [each[:3] if each[1] == "start" else each for each in world.trace]

    assert run(0) == run(1e9) == run(-1e9)


def test_a_machine_that_comes_and_goes_leaves_nothing_behind() -> None:
    for seed in range(3):
        world = started(seed, 3)
        host = world.hosts[1]
        for _ in range(100):
            world.crash(host, power=world.random.random() < 0.3)
            world.run(world.random.random() * 2)
            world.start(host)
            world.run(world.random.random() * 2)
        world.settle(30)
        world.run(10)
        for node in world.running():
            assert len(node.ends) == len(node.mesh.links) == 2, seed
            assert not node.dials, seed
            assert all(len(peer.paths) == 1 for peer in node.mesh.peers.values()), seed


# ---- Who belongs -----------------------------------------------------------------------------------------


def test_an_unpaired_machine_has_no_session_and_cannot_come_back() -> None:
    for seed in range(10):
        world = started(seed, 5)
        out = world.hosts[4]
        old = out.records
        world.unpair(world.hosts[0], out)
        world.run(0.1)
        assert not any(node.sessions(out.node_id) for node in world.running()), seed
        # It restores the roster that it had from a backup.
        world.stop(out)
        out.records = old
        world.start(out)
        for _ in range(40):
            world.run(1)
            assert not any(node.sessions(out.node_id) for node in world.running()), seed
        assert world.counts["strangers refused"] > 5
        world.settle(1)


def test_a_machine_that_was_away_when_another_was_unpaired_drops_it_when_it_hears_of_it() -> None:
    for seed in range(10):
        world = started(seed, 4)
        hosts = world.hosts
        world.split([hosts[2], hosts[3]])
        world.run(10)
        world.unpair(hosts[0], hosts[3])
        world.run(5)
        assert hosts[2].node is not None
        assert hosts[2].node.sessions(hosts[3].node_id), seed
        world.heal()
        world.settle(40)
        assert not hosts[2].node.sessions(hosts[3].node_id), seed


def test_a_stranger_gets_no_session_and_makes_nobody_call_it() -> None:
    for seed in range(10):
        world = started(seed, 3)
        intruder = world.start(stranger(world))
        world.run(60)
        assert not intruder.connections, seed
        assert world.counts["strangers refused"] > 3
        assert not [
            each for each in world.trace if each[1] == "dial" and each[3] == intruder.host.addresses[0][0]
        ]


def test_both_sides_of_a_partition_admit_and_remove_and_agree_afterwards() -> None:
    for seed in range(10):
        world = started(seed, 6)
        hosts = world.hosts
        left, right = world.add(10), world.add(11)
        for newcomer in (left, right):
            world.start(newcomer)
        world.split([hosts[0], hosts[1], hosts[2], left])
        world.run(10)
        world.pair(hosts[1], left)
        world.pair(hosts[4], right)
        world.unpair(hosts[0], hosts[5])
        world.unpair(hosts[3], hosts[2])
        world.run(10)
        world.heal()
        world.settle(40)
        assert hosts[0].node is not None
        members = set(hosts[0].node.roster.members)
        assert members == {hosts[n].node_id for n in (1, 3, 4, 10, 11)}, seed
