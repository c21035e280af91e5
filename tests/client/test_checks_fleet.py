"""Each reason for which a fleet fails silently has a finding, and what is not known is never called well."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from fake_daemon import FLEET, FakeDaemon, Reply
from finding_levels import level
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.connection.client import Client
from fleetctl.connection.home import locate
from fleetctl.connection.replies import read
from fleetctl.doctor import checks_fleet
from fleetctl.doctor.findings import Finding
from fleetctl.render.fleet_words import state_word
from fleetd.control.fleet_view import FleetView
from fleetd.control.network_diagnosis import NetworkDiagnosis
from fleetd.p2p.discovery import diagnosis
from fleetd.p2p.discovery.unreachable import explain, explain_multicast

STUDIO, AIR = FLEET["peers"]
ALONE: dict[str, Any] = {**FLEET, "peers": [], "neighbours": []}
WELL: dict[str, Any] = {**ALONE, "peers": [STUDIO]}
FACTS: dict[str, Any] = {
    "interfaces": [
        {"name": "lo0", "kind": "loopback", "addresses": ["127.0.0.1"], "mtu": 16384},
        {"name": "en0", "kind": "wifi", "addresses": ["192.168.1.2"], "mtu": 1500, "multicast": "ok"},
        {"name": "en1", "kind": "wired", "addresses": [], "mtu": 1500, "multicast": "it has no address"},
        {"name": "utun4", "kind": "tailscale", "addresses": ["100.64.0.2"], "mtu": 1280},
        {"name": "docker0", "kind": "virtual", "addresses": ["172.17.0.1"], "multicast": "it is blocked"},
    ],
    "port": {"host": "192.168.1.2", "port": 8115, "reachable": True, "reason": ""},
    "firewall": [],
    "mtu": [],
    "clock": {"peers": [{"name": "studio", "offset_s": 0.02}]},
    "clock_synchronised": True,
}


def interface(name: str = "en0", **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": "wifi", "addresses": ["192.168.1.2"], **fields}


def found(fleet: dict[str, Any] = WELL, **facts: Any) -> list[Finding]:
    findings = checks_fleet.judge(read(fleet, FleetView), read({**FACTS, **facts}, NetworkDiagnosis))
    for finding in findings:
        level(finding)
    return findings


def bad(fleet: dict[str, Any] = WELL, **facts: Any) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in found(fleet, **facts) if finding.level != "ok"]


def one(name: str, fleet: dict[str, Any] = WELL, **facts: Any) -> Finding:
    [finding] = [finding for finding in found(fleet, **facts) if finding.name == name]
    return finding


def studio(**fields: Any) -> dict[str, Any]:
    return {**ALONE, "peers": [{**STUDIO, **fields}]}


def test_a_fleet_that_is_well() -> None:
    assert bad() == []
    assert [(finding.name, finding.what) for finding in found()] == [
        ("fleet", "1 of 1 paired machines can be used"),
        ("mdns", "running"),
        ("peer port", "8115 takes connections at 192.168.1.2"),
        ("multicast", "passes on en0"),
        ("clocks", "agree with those of studio"),
    ]


# ---- The fleet -------------------------------------------------------------------------------------------


def test_no_peers_is_no_fault_and_says_what_to_type() -> None:
    alone = one("fleet", ALONE)
    assert alone.level == "ok"
    assert "`fleetctl pair` here" in alone.what


def test_a_machine_that_was_removed_hears_by_whom() -> None:
    removed = one("fleet", {**ALONE, "removed_by": "studio"})
    assert removed.level == "warn"
    assert removed.what == "studio removed this machine from the fleet."
    assert removed.fix == "`fleetctl pair` on studio, then `fleetctl join CODE` here."


def test_a_machine_that_another_one_added_is_told_until_a_person_here_speaks_of_it() -> None:
    new = one("new machine", studio(name="printer", new=True, through="air"))
    assert new.level == "warn"
    assert "is new: it is here on the word of air, and sees no prompts typed here." in new.what
    assert "peers prompts k3f9a2b yes`; else `fleetctl unpair k3f9a2b`." in new.fix
    late = one("new machines", {**WELL, "late": ["printer"]})
    assert (late.level, "these wait: printer." in late.what) == ("warn", True)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("incompatible", "fail"),
        ("refused", "fail"),
        ("unreachable", "warn"),
        ("connecting", "warn"),
        ("quiet", "warn"),
        ("draining", "warn"),
        ("something new", "warn"),
    ],
)
def test_a_machine_that_cannot_be_used_says_why(state: str, expected: str) -> None:
    plain = one("peer studio", studio(state=state))
    assert plain.level == expected
    assert plain.what == f"It is {state_word(state)}."
    told = one("peer studio", studio(state=state, reason="It speaks 3, this one 1.", hint="Update it."))
    assert (told.what, told.fix) == ("It speaks 3, this one 1.", "Update it.")


def test_version_skew_and_removal_say_what_to_do() -> None:
    assert "same version" in one("peer studio", studio(state="incompatible")).fix
    refused = one("peer studio", studio(state="refused"))
    assert "`fleetctl unpair k3f9a2b`" in refused.fix, "two machines may have one name"


def test_a_neighbour_that_nobody_paired() -> None:
    pro = {"name": "pro", "short_id": "z9y8x7w"}
    [finding] = [f for f in found({**WELL, "neighbours": [pro]}) if f.name == "neighbours"]
    assert (finding.level, finding.what) == ("warn", "pro (z9y8x7w) runs fleetd here and is not paired.")
    several = one("neighbours", {**WELL, "neighbours": [pro, {**pro, "name": "max"}]})
    assert several.what == "pro (z9y8x7w) and max (z9y8x7w) run fleetd here and are not paired."
    code = one("neighbours", {**WELL, "neighbours": [{**pro, "pairing": True}]})
    assert (code.what, code.fix) == ("pro (z9y8x7w) shows a code.", "`fleetctl join CODE` here.")


def test_mdns_that_does_not_run() -> None:
    broken = one("mdns", {**WELL, "mdns": "no interface allows multicast"})
    assert broken.level == "warn"
    assert "no interface allows multicast" in broken.what
    assert "fleet.peers" in broken.fix


def test_mdns_off_is_well_while_every_machine_is_reached() -> None:
    assert one("mdns", {**WELL, "mdns": "off"}).level == "ok"
    assert one("mdns", {**ALONE, "mdns": "off"}).level == "warn"
    assert one("mdns", {**WELL, "mdns": "starting"}).what == "It is starting."
    assert one("mdns", {**ALONE, "peers": [STUDIO, AIR], "mdns": "off"}).level == "warn"


def test_the_macos_local_network_permission() -> None:
    """The daemon's own words for errno 65, so that one cannot change without the other."""
    closed = OSError(65, "No route to host")
    reason, _ = explain(closed, "192.168.1.7", 8115, "darwin")
    silent = explain_multicast(closed, "darwin")
    paths = [{"host": "192.168.1.7", "kind": "wired", "reason": reason}]
    for told in ({"reason": reason, "paths": []}, {"paths": paths}):
        finding = one("local network", studio(state="unreachable", **told))
        assert finding.level == "warn"
        assert finding.what.endswith("no machine is there: studio (k3f9a2b).")
        assert "Privacy & Security → Local Network" in finding.fix
    assert one("local network", {**WELL, "mdns": silent}).level == "fail"
    denied = [interface(multicast=silent)]
    assert one("local network", interfaces=denied).level == "fail"


def test_a_machine_that_is_off_is_not_taken_for_the_missing_permission() -> None:
    closed = OSError(65, "No route to host")
    reason, _ = explain(closed, "192.168.1.7", 8115, "darwin")
    off = {**STUDIO, "state": "unreachable", "reason": reason}
    reached = {**AIR, "state": "usable", "paths": [{"host": "192.168.1.9", "kind": "wifi", "in_use": True}]}
    names = [finding.name for finding in found({**ALONE, "peers": [off, reached]})]
    assert "local network" not in names
    elsewhere, _ = explain(OSError(113, "No route to host"), "192.168.1.7", 8115, "linux")
    names = [finding.name for finding in found(studio(state="unreachable", reason=elsewhere, paths=[]))]
    assert "local network" not in names


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listening_on_loopback_while_others_are_elsewhere(host: str) -> None:
    def neighbour(address: str) -> list[dict[str, Any]]:
        return [{"name": "pro", "short_id": "z", "addresses": [address]}]

    near = {**WELL, "host": host}
    assert one("listening", near).level == "fail"
    assert 'fleet.listen = "*:8115"' in one("listening", near).fix
    for address in ("192.168.1.12:8115", "[fe80::1%en0]:8115", "192.168.1.12", "fe80::1", "pro.local:8115"):
        assert one("listening", {**ALONE, "host": host, "neighbours": neighbour(address)}).level == "fail"
    for address in ("127.0.0.1:9000", "[::1]:9000", "::1", "localhost:1"):
        only_here = {**ALONE, "host": host, "neighbours": neighbour(address)}
        assert "listening" not in [finding.name for finding in found(only_here)]
    assert "listening" not in [finding.name for finding in found({**WELL, "host": "*"})]


@pytest.mark.parametrize(
    ("used", "other", "slow"),
    [
        ("wifi", "wired", True),
        ("tailscale", "thunderbolt", True),
        ("wifi", "tailscale", False),
        ("wired", "thunderbolt", False),
        ("", "wired", False),
    ],
)
def test_a_cable_that_is_not_used(used: str, other: str, slow: bool) -> None:
    paths = [
        {"host": "10.0.0.2", "kind": other, "reason": "It refused the connection."},
        {"host": "192.168.1.7", "kind": used, "in_use": True},
    ]
    names = [finding.name for finding in found(studio(paths=paths))]
    assert ("path" in names) == slow
    if slow:
        what = one("path", studio(paths=paths)).what
        assert f"over {used} (192.168.1.7) although there is a {other} connection (10.0.0.2)" in what
        assert what.endswith("It refused the connection.")


# ---- The network -----------------------------------------------------------------------------------------


def test_the_facts_are_those_of_the_daemon() -> None:
    """As gathered there, on the way through JSON, and read here."""
    gathered = json.loads(msgspec.json.encode(diagnosis.gather("127.0.0.1", 1)))
    facts = read(gathered, NetworkDiagnosis)
    assert facts.port is not None
    assert (facts.port.host, facts.port.reachable) == ("127.0.0.1", False)
    assert "loopback" in [found.kind for found in facts.interfaces or ()]


def test_a_port_that_cannot_be_reached() -> None:
    closed = {"host": "192.168.1.2", "reachable": False}
    plain = one("peer port", port=closed)
    assert (plain.level, plain.what) == ("fail", "192.168.1.2 does not answer on port 8115.")
    assert "TCP port 8115" in plain.fix
    assert one("peer port", port={**closed, "reason": "It refused."}).what == "It refused."


def test_a_firewall_matters_where_a_machine_is_not_reached() -> None:
    hints = ["sudo ufw allow 8115/tcp"]
    assert one("firewall", firewall=hints).level == "ok"
    for fleet in (ALONE, {**ALONE, "peers": [STUDIO, AIR]}):
        finding = one("firewall", fleet, firewall=hints)
        assert (finding.level, finding.fix) == ("warn", hints[0])


def test_multicast_that_is_blocked_on_one_interface() -> None:
    interfaces = [interface(multicast="nothing came back"), interface("en1", multicast="ok")]
    good, blocked = [f for f in found(interfaces=interfaces) if f.name == "multicast"]
    assert (good.level, good.what) == ("ok", "passes on en1")
    assert (blocked.level, blocked.what) == ("warn", "None passes on en0: nothing came back.")


def test_unusual_packet_sizes() -> None:
    finding = one("mtu", mtu=["en1 sends packets of 9000 bytes."])
    assert (finding.level, finding.what) == ("warn", "en1 sends packets of 9000 bytes.")


@pytest.mark.parametrize(
    ("offset_s", "said"),
    [
        (30.0, "agree with those of studio"),
        (-30.0, "agree with those of studio"),
        (31.0, "The clock of studio is 31 s ahead of this one."),
        (-95.0, "The clock of studio is 1 min 35 s behind this one."),
    ],
)
def test_clocks(offset_s: float, said: str) -> None:
    clock = {"peers": [{"name": "studio", "offset_s": offset_s}]}
    assert one("clocks", clock=clock).what == said


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"interfaces": None}, "whether multicast passes"),
        ({"interfaces": [interface()]}, "whether multicast passes on en0"),
        ({"port": None}, "whether port 8115 can be reached"),
        ({"port": {"host": "::1"}}, "whether port 8115 can be reached"),
        ({"firewall": None}, "whether a firewall is on"),
        ({"mtu": None}, "which packets fit through"),
        ({"clock": None}, "whether the clocks agree"),
        ({"clock": {"peers": []}}, "whether the clocks agree"),
        ({"clock": {"peers": [{"name": "studio"}]}}, "whether the clocks agree"),
    ],
)
def test_what_is_not_known_is_said_and_never_called_well(facts: dict[str, Any], said: str) -> None:
    finding = one("network", **facts)
    assert (finding.level, finding.what) == ("warn", f"Not known: {said}.")


def test_with_nobody_to_compare_with_a_clock_that_nobody_keeps_is_told() -> None:
    assert bad(ALONE, clock={"peers": []}) == []
    assert bad(ALONE, clock={"peers": []}, clock_synchronised=None) == []
    assert bad(ALONE, clock={"peers": []}, clock_synchronised=False) == [("clocks", "warn")]
    assert "timedatectl" in one("clocks", ALONE, clock={"peers": []}, clock_synchronised=False).fix
    assert bad(WELL, clock_synchronised=False) == []


@given(
    text=st.text(max_size=40),
    state=st.sampled_from(["usable", "unreachable", "refused"]),
    kind=st.sampled_from(["wifi", "wired", "thunderbolt", "loopback", ""]),
    offset_s=st.none() | st.floats(-1e9, 1e9),
)
def test_any_facts_have_findings_of_one_printable_line(
    text: str, state: str, kind: str, offset_s: float | None
) -> None:
    paths = [{"host": text, "kind": kind, "in_use": True}, {"host": text, "kind": "wired", "reason": text}]
    fleet = {
        **studio(name=text, state=state, reason=text, hint=text, paths=paths, new=True, through=text),
        "late": [text],
        "host": text,
        "mdns": text,
        "removed_by": text,
        "neighbours": [{"name": text, "short_id": text, "addresses": [text]}],
    }
    for finding in checks_fleet.judge(
        read(fleet, FleetView),
        read(
            {
                "interfaces": [{"name": text, "kind": kind, "addresses": [text], "multicast": text}],
                "port": {"host": text, "reachable": False, "reason": text},
                "firewall": [text],
                "mtu": [text],
                "clock": {"peers": [{"name": text, "offset_s": offset_s}]},
            },
            NetworkDiagnosis,
        ),
    ):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", finding.name + finding.what + finding.fix)
        level(finding)


# ---- As doctor asks --------------------------------------------------------------------------------------


def check(daemon: FakeDaemon) -> list[Finding]:
    return checks_fleet.check(Client(locate(daemon.home, None)))


def test_doctor_asks_the_daemon(daemon: FakeDaemon) -> None:
    assert [(f.level, f.what) for f in check(daemon)] == [
        ("ok", "off (fleet.enabled in fleetd.toml): this machine works alone")
    ]
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    daemon.on("GET", "/fleet/v1/diagnose", Reply(FACTS))
    of_the_fleet, of_the_network = ["peer air", "neighbours", "mdns"], ["peer port", "multicast", "clocks"]
    assert [finding.name for finding in check(daemon)] == of_the_fleet + of_the_network
    daemon.on("GET", "/fleet/v1/diagnose", Reply({}))
    assert [finding.name for finding in check(daemon)] == [*of_the_fleet, "network"]


def test_a_daemon_that_cannot_look_at_its_network_still_tells_of_its_fleet(daemon: FakeDaemon) -> None:
    broken = {"error": {"message": "It broke.", "code": "internal_error", "hint": ""}}
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    for reply in (Reply(broken, 500), Reply({"interfaces": 7})):
        daemon.on("GET", "/fleet/v1/diagnose", reply)
        *_, last = findings = check(daemon)
        assert [finding.name for finding in findings] == ["peer air", "neighbours", "mdns", "network"]
        assert last.level == "warn"
        assert last.what.startswith("It could not be looked at: ")
    daemon.on("GET", "/fleet/v1/peers", Reply(broken, 500))
    [last] = check(daemon)
    assert (last.level, last.what) == ("fail", "It could not be checked: It broke.")


def test_an_address_in_the_settings_where_nobody_answers() -> None:
    given = {
        **WELL,
        "unanswered": [{"address": "10.0.0.9:8115", "reason": "It refused.", "hint": "Start it."}],
    }
    finding = one("configured peer", given)
    assert (finding.level, finding.fix) == ("warn", "Start it.")
    assert "10.0.0.9:8115: It refused." in finding.what


# ---- links that are declared private ---------------------------------------------------------------------


def with_links(*, private: bool, missing: tuple[str, ...] = ()) -> dict[str, Any]:
    paths = [{**path, "private": private} for path in STUDIO["paths"]]
    return {
        **WELL,
        "peers": [{**STUDIO, "paths": paths}],
        "plain_links": ["bridge0"],
        "missing_links": list(missing),
    }


def test_a_link_that_is_declared_private_is_told_with_the_machines_at_its_end() -> None:
    said = one("plain links", with_links(private=True))
    assert said.level == "ok"
    assert "unsealed to" in said.what
    assert "bridge0" in said.what
    assert "everything else is sealed" in said.what


def test_a_declared_link_that_is_not_there_or_leads_nowhere_is_a_remark() -> None:
    gone = one("plain links", with_links(private=False, missing=("bridge0",)))
    assert (gone.level, "no interface here" in gone.what) == ("warn", True)
    assert gone.fix.endswith("plug the cable in.")
    lonely = one("plain links", with_links(private=False))
    assert (lonely.level, "No paired machine has an address on bridge0" in lonely.what) == ("warn", True)
    assert not [each for each in found() if each.name == "plain links"]
