"""Who sees prompts typed on one machine: its own rules, beside the roster's word for the whole fleet."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

from fleet_nodes import WITHIN_S, introduce, running, settings, together, until
from msgspec.structs import replace
from sharing_fakes import own_card
from smart_fakes import ScoringPool, models

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.fleet_view import PeerView
from fleetd.engine.protocol import Generate, TextPrompt
from fleetd.errors import ConfigError, Forbidden, InvalidValue
from fleetd.fleet.service import Fleet
from fleetd.p2p.membership.prompt_rules import PromptRules
from fleetd.p2p.node import Node
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.drafting import drafters
from fleetd.requests.job import Job
from fleetd.requests.members.members import Members
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.placement import Placer, WantedModel
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.skip import SkipCompression

pytestmark = pytest.mark.one_loop


class AskedMachine:
    """A machine of the fleet that has the model ``m``, and could be asked for any kind of work."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.node = Node(settings(folder, name))
        self.fleet = Fleet(self.node, local_only=False)
        self.members = Members(self.fleet.machines, lambda: own_card("home"), unaided=self.fleet.unaided)

    def publish(self) -> None:
        card = own_card(self.name, scoring="ready")
        self.node.publish(replace(card, node_id=self.node.node_id, epoch=self.node.epoch))

    async def shown_to(self) -> dict[str, str]:
        """By kind of work, the machines that would be sent text typed on this one: their names, in a row."""
        placer = Placer(self.members, lambda *_: pytest.fail("nothing is asked"))
        job, others = Job("m", Generate("r", TextPrompt("x")), "http", "chat"), self.members.others("answer")
        ranked = placer.rank(job, WantedModel("m", here=False), others, tried=frozenset())
        own = own_card("home").models[0]
        helpers = [planner_facts.helper(each, own) for each in self.members.others("prefill")]
        scorers = Scorers(ScoringPool(), models(), ModelSpeeds(), self.members)  # type: ignore[arg-type]
        try:
            scoring = (await scorers.find(SmartPrefillPolicy(compressor_model="m"), 0, False))[1]
        except SkipCompression:
            scoring = []
        drafting = drafters.candidates(self.members.others("draft"), "other", "m", "peers")
        found = {
            "answer": [each.name for each in ranked.placements],
            "prefill": [helper.name for helper in helpers if helper.refusal is None],
            "score": [scorer.name for scorer in scoring],
            "draft": [candidate.name for candidate in drafting],
        }
        return {work: "".join(sorted(names)) for work, names in found.items()}

    def sees(self, name: str) -> tuple[bool, bool, bool]:
        peer: PeerView = next(peer for peer in self.fleet.view().peers if peer.name == name)
        return peer.sees_prompts, peer.allowed_here, peer.allowed_by_fleet


def everything(names: str) -> dict[str, str]:
    return dict.fromkeys(("answer", "prefill", "score", "draft"), names)


@asynccontextmanager
async def three(folder: Path) -> AsyncIterator[list[AskedMachine]]:
    machines = [AskedMachine(folder, name) for name in "abc"]
    nodes = [machine.node for machine in machines]
    async with running(*nodes):
        await introduce(*nodes)
        await together(nodes)
        for machine in machines:
            machine.publish()
        for machine in machines:
            await until(machine.node, lambda machine=machine: len(list(machine.fleet.machines())) == 2)
        yield machines


async def test_what_one_machine_denies_another_machine_may_still_send(tmp_path: Path) -> None:
    async with three(tmp_path) as (a, b, c):
        assert await a.shown_to() == everything("bc")
        async with asyncio.timeout(WITHIN_S):
            while len({machine.node.roster.digest() for machine in (a, b, c)}) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        before = [machine.node.roster.digest() for machine in (a, b, c)]
        shown = await a.fleet.allow_prompts("c", False, fleet=False)
        assert (shown.sees_prompts, shown.allowed_here, shown.allowed_by_fleet) == (False, False, True)
        assert await a.shown_to() == everything("b")
        assert await b.shown_to() == everything("ac")
        assert await c.shown_to() == everything("ab")
        assert [machine.node.roster.digest() for machine in (a, b, c)] == before, "nothing was told"
        assert (a.sees("c"), b.sees("c")) == ((False, False, True), (True, True, True))


async def test_the_fleets_word_holds_everywhere_and_both_have_to_allow_it(tmp_path: Path) -> None:
    async with three(tmp_path) as (a, b, _):
        await b.fleet.allow_prompts("c", False, fleet=True)
        await until(a.node, lambda: not a.sees("c")[0])
        assert (a.sees("c"), b.sees("c")) == ((False, True, False), (False, True, False))
        assert await a.shown_to() == await b.shown_to() | everything("b") == everything("b")
        await a.fleet.allow_prompts("c", True, fleet=False)
        assert a.sees("c") == (False, True, False), "the fleet still says no"
        await a.fleet.allow_prompts("c", False, fleet=False)
        assert a.sees("c") == (False, False, False)
        await b.fleet.allow_prompts("c", True, fleet=True)
        await until(a.node, lambda: a.sees("c")[2])
        assert a.sees("c") == (False, False, True), "this machine still says no"


async def test_a_rule_outlives_a_restart_and_what_others_sign_and_ends_with_unpairing(tmp_path: Path) -> None:
    async with three(tmp_path) as (a, b, c):
        await a.fleet.allow_prompts("c", False, fleet=False)
        file = a.node.settings.folder / "prompt-rules.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert c.node.node_id in file.read_text()
        again = PromptRules(file)
        await again.load()
        assert (again.allows(c.node.node_id), again.allows(b.node.node_id)) == (False, True)
        # A machine that means ill could have another take it out and in again.
        b.node.roster.remove(c.node.node_id)
        await b.node.roster_changed()
        await until(a.node, lambda: c.node.node_id not in a.node.roster.members)
        b.node.roster.admit(c.node.identity.certificate, "c", True)
        await b.node.roster_changed()
        await until(a.node, lambda: c.node.node_id in a.node.roster.members)
        assert a.sees("c") == (False, False, True)
        await a.fleet.unpair("c")
        assert c.node.node_id not in file.read_text()


async def test_unpairing_forgets_on_both_machines_what_the_other_has_of_prompts(tmp_path: Path) -> None:
    job = Job("m", Generate("r", TextPrompt("x" * 4096)), "http", "chat")
    async with three(tmp_path) as (a, b, c):
        both = ((a, c.node.node_id), (c, a.node.node_id))
        for machine, other in both:
            machine.members.read(other, "m", job)
            assert machine.members.known_tokens(other, "m", job.prompt_text) > 0
        await a.fleet.unpair("c")
        await until(c.node, lambda: c.node.roster.removed_by is not None)
        assert list(c.fleet.machines()) == []
        # Paired again, with the same daemons and the same prompts in their memory.
        c.node.roster.reset()
        await introduce(a.node, b.node, c.node)
        for machine, other in both:
            await until(machine.node, lambda m=machine, o=other: o in [f.node_id for f in m.fleet.machines()])
            assert machine.members.known_tokens(other, "m", job.prompt_text) == 0


async def test_who_answers_for_a_machine_with_a_rule_gets_no_help(tmp_path: Path) -> None:
    """It knows nothing of the rule, and could share the prompt with the machine that the rule is about."""
    async with three(tmp_path) as (a, b, c):
        assert not a.members.unaided()
        await a.fleet.allow_prompts("c", False, fleet=False)
        assert (a.members.unaided(), b.members.unaided()) == (True, False)
        # Also where only the other machine reaches it now.
        await c.node.goodbye()
        await until(a.node, lambda: not a.node.mesh.peers[c.node.node_id].usable)
        assert a.members.unaided()
        await a.fleet.allow_prompts("c", True, fleet=False)
        assert not a.members.unaided()


async def test_a_machine_that_another_one_added_sees_no_prompts_until_a_person_here_allows_it(
    tmp_path: Path,
) -> None:
    """b pairs with a and with c. a and c know each other from then on, and show each other nothing."""
    a, b, c = (AskedMachine(tmp_path, name) for name in "abc")
    nodes = [machine.node for machine in (a, b, c)]
    async with running(*nodes):
        await introduce(a.node, b.node)
        await introduce(b.node, c.node)
        for node, other in ((a.node, c.node), (c.node, a.node)):
            await until(node, lambda node=node, other=other: other.node_id in node.roster.members)
            node.reached(other.node_id, ("127.0.0.1", other.port))
        await together(nodes)
        for machine in (a, b, c):
            machine.publish()
        for machine in (a, b, c):
            await until(machine.node, lambda machine=machine: len(list(machine.fleet.machines())) == 2)
        assert [await machine.shown_to() for machine in (a, b, c)] == [*map(everything, ("b", "ac", "b"))]
        assert [machine.members.unaided() for machine in (a, b, c)] == [True, False, True]
        shown = {peer.name: peer for peer in a.fleet.view().peers}
        assert (shown["c"].new, shown["c"].through, shown["b"].new) == (True, "b", False)
        assert shown["b"].brings == [c.node.node_id]
        with pytest.raises(InvalidValue, match="No person here has confirmed c"):
            await a.fleet.allow_prompts("c", False, fleet=True)
        await a.fleet.allow_prompts("c", False, fleet=False)
        assert not {peer.name: peer for peer in a.fleet.view().peers}["c"].new, "a person has spoken"
        assert a.sees("c") == (False, False, True)
        allowed = await a.fleet.allow_prompts("c", True, fleet=False)
        assert (allowed.sees_prompts, allowed.new, a.members.unaided()) == (True, False, False)
        assert await a.shown_to() == everything("bc")
        assert await c.shown_to() == everything("b"), "its own person has not spoken"


async def test_a_machine_that_is_kept_sees_no_prompts_until_it_is_allowed(tmp_path: Path) -> None:
    a, b, c, d = (AskedMachine(tmp_path, name) for name in "abcd")
    nodes = [machine.node for machine in (a, b, c, d)]
    async with running(*nodes):
        await introduce(a.node, b.node)
        for other in (c.node, d.node):
            b.node.roster.admit(other.identity.certificate, other.name, True)
            await b.node.roster_changed()
        await until(a.node, lambda: len(a.node.roster.members) == 3)
        done = await a.fleet.unpair("b", ["c"])
        assert (done.gone, done.kept) == (["d"], ["c"])
        assert a.sees("c") == (False, False, True)
        assert [peer.name for peer in a.fleet.view().peers] == ["c"]
        await a.fleet.allow_prompts("c", True, fleet=False)
        assert a.sees("c") == (True, True, True)


@pytest.mark.parametrize("written", [b"{", b'"a"', b'["short"]', b"[" * 5000, b"\xff", b"[" + b" " * 70000])
async def test_damaged_rules_are_said_not_forgotten(tmp_path: Path, written: bytes) -> None:
    file = tmp_path / "a" / "prompt-rules.json"
    file.parent.mkdir(mode=0o700)
    file.write_bytes(written)
    with pytest.raises(ConfigError, match=r"prompt-rules\.json.* damaged"):
        await Node(settings(tmp_path, "a")).open()
    assert file.read_bytes() == written


async def test_attack_rules_behind_a_planted_link_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"[]")
    (tmp_path / "rules").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Forbidden):
        await PromptRules(tmp_path / "rules").load()
