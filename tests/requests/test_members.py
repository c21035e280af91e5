"""One view of a machine for all kinds of work: who may be asked, and whom a failure leaves out."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed
from sharing_fakes import DIGEST, own_card
from smart_fakes import ScoringPool, models

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.protocol import Generate, TextPrompt
from fleetd.errors import (
    BadRequest,
    EngineDied,
    FleetError,
    Forbidden,
    Incompatible,
    InvalidValue,
    ModelCorrupt,
    ModelNotFound,
    NoMachine,
    OutOfMemory,
    Overloaded,
    PeerLost,
    PeerWrong,
    ProtocolError,
    ScorerNotReady,
)
from fleetd.fleet.service import distinct_names
from fleetd.p2p.membership.cards import MachineFacts
from fleetd.p2p.membership.roster import RosterMember
from fleetd.plan.affinity import BLOCK_CHARS
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.drafting import drafters
from fleetd.requests.job import CHARS_PER_TOKEN, Job
from fleetd.requests.members.members import Member, Members, SentRequests, eligible
from fleetd.requests.members.peer_backoff import PeerBackoff, Work
from fleetd.requests.members.rank_cores import beside_ranks
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.placement import Placer, WantedModel
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.skip import SkipCompression

WORKS: tuple[Work, ...] = get_args(Work)


def member(name: str = "studio", **fields: Any) -> Member:
    return Member(own_card(name), name, **{"rtt_s": 0.001, "bytes_per_s": 1e9, **fields})


class SeenFleet:
    """Members that see ``found``, on a clock that stands still unless it is moved."""

    def __init__(self, *found: Member, **options: Any) -> None:
        self.now_s = 1000.0
        self.found = list(found)
        self.members = Members(
            lambda: self.found, lambda: own_card("home"), monotonic=lambda: self.now_s, **options
        )

    def others(self, work: Work) -> list[str]:
        """Names of the machines that may be asked."""
        return [found.name for found in self.members.others(work) if eligible(found, DIGEST) is None]


# ---- who may be asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code", "sentence"),
    [
        (member(sees_prompts=False), "private", "studio may not see prompts."),
        (member(unusable="quiet for 4 s."), "unusable", "studio cannot be used: quiet for 4 s."),
        (Member(replace(own_card("a"), draining=True), "a"), "draining", "a is stopping."),
        (Member(replace(own_card("a"), draining=True), "this", here=True), "draining", "this is stopping."),
        (Member(own_card("a", digest="e"), "a"), "other_files", "a has no model with these files."),
        (Member(own_card("a", digest=""), "a"), "other_files", "a has no model with these files."),
        (member(left_out="It failed."), "failed", "studio: It failed."),
    ],
)
def test_every_reason_is_a_sentence(found: Member, code: str, sentence: str) -> None:
    refusal = eligible(found, DIGEST)
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == (code, sentence)


def test_who_may_be_asked() -> None:
    assert eligible(member(), DIGEST) is None
    assert eligible(Member(own_card("a", digest=""), "a")) is None, "where any files will do"
    assert eligible(member(left_out="It failed."), DIGEST, even_left_out=True) is None
    # What this machine reads itself leaves it for nowhere.
    assert eligible(Member(own_card("home"), "this", sees_prompts=False, here=True)) is None


machines = st.builds(
    lambda name, sees, unusable, draining, left_out, digest: Member(
        replace(own_card(name, digest=digest), node_id=name, draining=draining),
        name,
        unusable,
        sees,
        0.001,
        1e9,
        left_out=left_out,
    ),
    st.sampled_from(["a", "b", "c"]),
    st.booleans(),
    st.sampled_from(["", "", "quiet for 4 s."]),
    st.booleans(),
    st.sampled_from(["", "", "It failed."]),
    st.sampled_from([DIGEST, DIGEST, "", "e"]),
)


@given(st.lists(machines, max_size=4, unique_by=lambda found: found.name), st.booleans())
def test_attack_no_work_is_given_to_a_machine_that_may_not_see_a_prompt(
    found: list[Member], even_left_out: bool
) -> None:
    """Routing, sharing and drafting ask it of each machine themselves; scoring is below."""
    allowed = {
        each.name for each in found if each.sees_prompts and not each.unusable and not each.card.draining
    }
    fleet = SeenFleet(*found)
    placer = Placer(fleet.members, lambda *_: pytest.fail("nothing is asked"))
    job = Job("m", Generate("r", TextPrompt("x")), "http", "chat")
    ranked = placer.rank(job, WantedModel("m", here=False), found, tried=frozenset())
    assert {each.node_id for each in ranked.placements} <= allowed
    own = own_card("home").models[0]
    helpers = [planner_facts.helper(each, own) for each in found]
    assert {helper.node_id for helper in helpers if helper.refusal is None} <= allowed
    assert {each.name for each in drafters.candidates(found, "other", "m", "peers")} <= allowed
    for each in found:
        assert eligible(each, even_left_out=even_left_out) is not None or each.name in allowed


def test_machines_of_one_name_are_told_apart_by_their_short_ids() -> None:
    """In plans, traces and headers; and "this" is the machine that was asked."""
    named = {
        "aaaaaaaaaaaa": "Studio",
        "bbbbbbbbbbbb": "studio",
        "cccccccccccc": "air",
        "dddddddddddd": "this",
    }
    roster = {
        node_id: RosterMember(node_id, name, b"", True, "", node_id, 1) for node_id, name in named.items()
    }
    assert distinct_names(roster) == {
        "aaaaaaaaaaaa": "Studio (aaaaaaa)",
        "bbbbbbbbbbbb": "studio (bbbbbbb)",
        "cccccccccccc": "air",
        "dddddddddddd": "this (ddddddd)",
    }


def test_local_only_leaves_no_others() -> None:
    assert SeenFleet(member(), local_only=True).members.others("answer") == []


def test_this_machine_has_no_link_and_its_own_id() -> None:
    here = SeenFleet(member()).members.here()
    assert (here.node_id, here.link, here.name) == (THIS_NODE, None, "this")
    assert Members().here().card.models == [], "before it has told a card"


# ---- what failed at one kind of work ---------------------------------------------------------------------


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("error", [PeerLost("gone"), EngineDied("gone")], ids=lambda error: error.code)
def test_a_machine_that_failed_is_left_out_of_every_kind_of_work(work: Work, error: FleetError) -> None:
    fleet = SeenFleet(member(), member("mini"))
    fleet.members.failed("studio", work, error)
    assert [fleet.others(each) for each in WORKS] == [["mini"]] * len(WORKS)
    fleet.now_s += limits.BACKOFF_S
    assert [fleet.others(each) for each in WORKS] == [["studio", "mini"]] * len(WORKS)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    ("error", "times"),
    [(Incompatible("other words"), 1), (OutOfMemory("full"), 2), (ModelNotFound("gone"), 2)],
)
def test_what_concerns_one_kind_of_work_leaves_the_others_alone(
    work: Work, error: FleetError, times: int
) -> None:
    fleet = SeenFleet(member())
    for _ in range(times):
        assert fleet.others(work) == ["studio"]
        fleet.members.failed("studio", work, error)
    assert {each: fleet.others(each) for each in WORKS} == {
        each: [] if each == work else ["studio"] for each in WORKS
    }


OTHER = "o" * 64


def with_two_models(name: str) -> Member:
    """One that has "m" and "n", of DIGEST and OTHER."""
    card = own_card(name)
    return Member(replace(card, models=[*card.models, replace(card.models[0], name="n", digest=OTHER)]), name)


def asked_for(fleet: SeenFleet, work: Work) -> list[str]:
    """The digests with which the first machine may be asked for this work."""
    (found,) = fleet.members.others(work)
    return [digest for digest in (DIGEST, OTHER) if eligible(found, digest) is None]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    ("error", "times", "everywhere"),
    [
        (EngineDied("gone"), 1, True),
        (Incompatible("other words"), 1, False),
        (ModelCorrupt("damaged"), 2, False),
        (ModelNotFound("gone"), 2, False),
        (OutOfMemory("full"), 2, False),
        (ScorerNotReady("not yet"), 2, False),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_a_failure_that_concerns_one_model_leaves_the_machine_its_other_models(
    work: Work, error: FleetError, times: int, everywhere: bool
) -> None:
    fleet = SeenFleet(with_two_models("studio"))
    for _ in range(times):
        fleet.members.failed("studio", work, error, DIGEST)
    assert {each: asked_for(fleet, each) for each in WORKS} == {
        each: [OTHER] if everywhere or each == work else [DIGEST, OTHER] for each in WORKS
    }
    assert fleet.members.left_out("studio", work, DIGEST).startswith("It failed")
    assert "with this model" in fleet.members.left_out("studio", work, DIGEST)
    # Success with another model says nothing of this one.
    fleet.members.succeeded("studio", work, OTHER)
    assert asked_for(fleet, work) == [OTHER]
    fleet.members.succeeded("studio", work, DIGEST)
    assert asked_for(fleet, work) == [DIGEST, OTHER]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    ("error", "times"),
    [
        (PeerLost("gone"), 1),
        (PeerWrong("lies"), 1),
        (ProtocolError("what?"), 1),
        (Overloaded("busy"), 2),
        (Forbidden("no"), 2),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_attack_silence_lies_and_refusals_leave_the_machine_out_with_every_model(
    work: Work, error: FleetError, times: int
) -> None:
    fleet = SeenFleet(with_two_models("studio"))
    for _ in range(times):
        fleet.members.failed("studio", work, error, DIGEST)
    assert asked_for(fleet, work) == []


def test_attack_failures_with_ever_new_models_take_no_more_memory_and_hide_no_other_failure() -> None:
    fleet = SeenFleet(with_two_models("studio"))
    fleet.members.late("studio", "answer")
    for number in range(3 * limits.BACKOFF_MODELS):
        fleet.members.failed("studio", "answer", EngineDied("gone"), f"{number}")
        fleet.now_s += 0.01
    reasons = fleet.members.backoff.reasons("studio", "answer", fleet.now_s)
    assert len(reasons) == limits.BACKOFF_MODELS + 1
    assert "timeout" in reasons[""]
    assert f"{3 * limits.BACKOFF_MODELS - 1}" in reasons


def test_attack_to_be_late_as_well_does_not_make_up_for_a_lie() -> None:
    fleet = SeenFleet(member())
    fleet.members.failed("studio", "fetch", PeerWrong("lies"))
    fleet.members.late("studio", "fetch")
    assert fleet.others("answer") == []


def test_too_late_is_not_asked_for_the_same_again() -> None:
    fleet = SeenFleet(member())
    fleet.members.late("studio", "score")
    assert [work for work in WORKS if not fleet.others(work)] == ["score"]
    assert fleet.members.failure("studio", "score") == "timeout"


@pytest.mark.parametrize("error", [Overloaded("busy"), ModelNotFound("gone"), InvalidValue("bad")])
def test_what_is_not_the_machines_fault_costs_it_nothing(error: FleetError) -> None:
    fleet = SeenFleet(member())
    fleet.members.failed("studio", "answer", error)
    assert fleet.others("answer") == ["studio"]


def test_only_a_success_at_the_same_work_ends_it() -> None:
    """Else a machine whose helpers always fail would be asked again after each answer that it scored."""
    fleet = SeenFleet(member())
    fleet.members.failed("studio", "prefill", PeerLost("gone"))
    fleet.members.succeeded("studio", "score")
    assert fleet.others("score") == []
    fleet.members.succeeded("studio", "prefill")
    assert fleet.others("score") == ["studio"]


async def test_a_machine_that_failed_a_shared_prefill_is_not_asked_to_draft_or_to_score() -> None:
    fleet = SeenFleet(Member(own_card("studio", scoring="ready"), "studio"))
    scorers = Scorers(ScoringPool(), models(), ModelSpeeds(), fleet.members)  # type: ignore[arg-type]
    policy = SmartPrefillPolicy(compressor_model="m")
    own = own_card("home").models[0]

    def drafting() -> list[str]:
        return [each.name for each in drafters.candidates(fleet.members.others("draft"), "x", "m", "peers")]

    assert drafting() == ["studio"]
    assert [scorer.name for scorer in (await scorers.find(policy, 0, False))[1]] == ["studio"]
    fleet.members.failed("studio", "prefill", PeerLost("gone"))
    (helper,) = [planner_facts.helper(each, own) for each in fleet.members.others("prefill")]
    assert helper.refusal is not None
    assert helper.refusal.sentence == (
        f"studio: It failed a shared prefill (peer_lost) and is left out for {limits.BACKOFF_S:.0f} s."
    )
    assert drafting() == []
    with pytest.raises(SkipCompression):
        await scorers.find(policy, 0, False)
    fleet.now_s += limits.BACKOFF_S
    assert drafting() == ["studio"]
    assert [scorer.name for scorer in (await scorers.find(policy, 0, False))[1]] == ["studio"]


def test_a_machine_that_failed_answers_where_no_other_can() -> None:
    fleet = SeenFleet(member("a"), member("b"))
    placer = Placer(fleet.members, lambda *_: pytest.fail("nothing is asked"))
    job = Job("m", Generate("r", TextPrompt("x")), "http", "chat")

    def chosen(tried: frozenset[str] = frozenset()) -> str:
        placed = placer.choose(job, WantedModel("m", here=False), tried=tried, why=ModelNotFound("m"))
        return placed.node_id

    assert chosen() == "a"
    placer.failed("a", PeerLost("gone"))
    assert chosen() == "b"
    assert chosen(tried=frozenset({"b"})) == "a"
    # Who has not the room, or not the model, is no worse for the next request.
    placer.failed("b", OutOfMemory("full"))
    assert chosen() == "b"
    fleet.members.succeeded("a", "answer")
    assert chosen() == "a"
    with pytest.raises((ModelNotFound, NoMachine)):
        chosen(tried=frozenset({"a", "b"}))


def test_a_request_for_another_model_still_goes_to_a_machine_whose_engine_died() -> None:
    fleet = SeenFleet(with_two_models("a"), with_two_models("b"))
    placer = Placer(fleet.members, lambda *_: pytest.fail("nothing is asked"))

    def chosen(model: str) -> str:
        job = Job(model, Generate("r", TextPrompt("x")), "http", "chat")
        wanted = WantedModel(model, here=False)
        return placer.choose(job, wanted, tried=frozenset(), why=ModelNotFound(model)).node_id

    assert (chosen("m"), chosen("n")) == ("a", "a")
    placer.failed("a", EngineDied("gone"), DIGEST)
    assert (chosen("m"), chosen("n")) == ("b", "a")


async def test_a_machine_that_cannot_score_or_draft_with_one_model_does_with_another() -> None:
    fleet = SeenFleet(Member(own_card("studio", scoring="ready"), "studio"))
    fleet.members.failed("studio", "score", EngineDied("gone"), OTHER)
    scorers = Scorers(ScoringPool(), models(), ModelSpeeds(), fleet.members)  # type: ignore[arg-type]
    policy = SmartPrefillPolicy(compressor_model="m")
    assert [scorer.name for scorer in (await scorers.find(policy, 0, False))[1]] == ["studio"]
    assert drafters.candidates(fleet.members.others("draft"), "x", "m", "peers")
    fleet.members.failed("studio", "score", EngineDied("gone"), DIGEST)
    with pytest.raises(SkipCompression):
        await scorers.find(policy, 0, False)
    assert not drafters.candidates(fleet.members.others("draft"), "x", "m", "peers")


def test_a_machine_that_failed_is_left_out_longer_each_time() -> None:
    backoff = PeerBackoff()

    def reason(now_s: float, node_id: str = "a") -> str:
        return backoff.reasons(node_id, "prefill", now_s).get("", "")

    assert reason(0.0) == ""
    backoff.failed("a", "prefill", "peer_lost", 0.0)
    assert "peer_lost" in reason(limits.BACKOFF_S - 1)
    assert reason(limits.BACKOFF_S) == ""
    backoff.failed("a", "prefill", "peer_lost", 100.0)
    assert reason(100.0 + 2 * limits.BACKOFF_S - 1)
    assert reason(100.0, "b") == ""
    for _ in range(100):
        backoff.failed("a", "prefill", "peer_lost", 200.0)
    assert reason(200.0 + limits.BACKOFF_MOST_S) == ""
    backoff.succeeded("a", "prefill")
    backoff.failed("a", "prefill", "peer_lost", 300.0)
    assert reason(300.0 + limits.BACKOFF_S) == ""


def test_a_machine_that_says_that_it_cannot_is_left_out_from_the_second_time_on_shortly_at_first() -> None:
    fleet = SeenFleet(member("a"))
    waits: list[float] = []

    def wait() -> float:
        """Until it is asked again."""
        begun_s = fleet.now_s
        while fleet.members.left_out("a", "answer"):
            fleet.now_s += limits.BACKOFF_REFUSED_S
        return fleet.now_s - begun_s

    for _ in range(12):
        # Those that it got at the same time count once.
        for _ in range(3 if waits else 1):
            fleet.members.failed("a", "answer", Overloaded("full"))
        assert not fleet.members.left_out("a", "draft")
        waits.append(wait())
    assert waits[:4] == [limits.BACKOFF_REFUSED_S * factor for factor in (0, 1, 2, 4)]
    assert max(waits) == limits.BACKOFF_S, "it may be true"
    fleet.members.failed("a", "answer", Forbidden("no"))
    assert wait() == 2 * limits.BACKOFF_S
    for _ in range(12):
        fleet.members.failed("a", "answer", Forbidden("no"))
        wait()
    fleet.members.failed("a", "answer", Forbidden("no"))
    assert wait() == limits.BACKOFF_MOST_S
    fleet.members.succeeded("a", "answer")
    fleet.members.failed("a", "answer", Forbidden("no"))
    assert wait() == 0


def test_requests_that_a_card_does_not_count_yet_are_counted() -> None:
    card = replace(own_card("a"), running=1, waiting=1, unread_tokens=512)
    fleet = SeenFleet(Member(card, "a"))
    for sent, running, unread_tokens in (
        (SentRequests(), 1, 512),
        (SentRequests(2, 100), 1, 512),
        (SentRequests(4, 9000), 3, 9000),
    ):
        fleet.members.requests_at = {"a": sent}.__getitem__
        (seen,) = fleet.members.others("answer")
        assert (seen.card.running, seen.card.unread_tokens) == (running, unread_tokens)


def test_a_machine_that_has_answered_is_not_on_trial_for_being_busy() -> None:
    fleet = SeenFleet(member("a"))
    fleet.members.succeeded("a", "answer")
    for _ in range(5):
        fleet.members.failed("a", "answer", Overloaded("full"))
    assert fleet.members.proven("a")


def test_a_request_that_is_wrong_and_a_refusal_of_this_machine_leave_none_out() -> None:
    fleet = SeenFleet(member("a"))
    for _ in range(5):
        fleet.members.failed("a", "answer", BadRequest("no"))
        fleet.members.failed(THIS_NODE, "answer", Overloaded("full"))
    assert not fleet.members.left_out("a", "answer")
    assert not fleet.members.left_out(THIS_NODE, "answer")


def test_a_machine_that_misses_questions_is_left_out_shortly_until_it_answers_one() -> None:
    fleet = SeenFleet(member("a"))
    members = fleet.members

    def missed(count: int) -> float:
        """Questions that it does not answer in time; returns for how long it is not asked."""
        for _ in range(count):
            members.unanswered("a", fleet.now_s)
        begun_s = fleet.now_s
        while members.left_out("a", "fetch"):
            fleet.now_s += limits.FETCH_SILENT_S
        return fleet.now_s - begun_s

    assert missed(limits.FETCH_UNANSWERED - 1) == 0
    assert missed(1) == limits.FETCH_SILENT_S
    assert missed(limits.FETCH_UNANSWERED) == 2 * limits.FETCH_SILENT_S
    # Of questions that were on their way when it was left out only the first ones count.
    assert missed(5 * limits.FETCH_UNANSWERED) == 4 * limits.FETCH_SILENT_S
    for _ in range(20):
        longest = missed(limits.FETCH_UNANSWERED)
    assert longest == limits.BACKOFF_MOST_S
    members.answered("a")
    assert missed(limits.FETCH_UNANSWERED) == limits.FETCH_SILENT_S


def test_attack_answering_questions_does_not_make_up_for_blocks_that_were_wrong() -> None:
    fleet = SeenFleet(member("a"))
    members = fleet.members
    members.late("a", "fetch")
    members.answered("a")
    assert members.left_out("a", "fetch")
    fleet.now_s += limits.BACKOFF_S
    for _ in range(limits.FETCH_UNANSWERED):
        members.unanswered("a", fleet.now_s)
    members.answered("a")
    fleet.now_s += limits.BACKOFF_S
    assert members.left_out("a", "fetch"), "twice as long as before"


# ---- what else is learned for all ------------------------------------------------------------------------


def test_a_conversation_is_known_where_it_was_read_until_that_machine_starts_again() -> None:
    fleet = SeenFleet(member("a"))
    members = fleet.members
    text = "x" * (4 * BLOCK_CHARS)
    job = Job("m", Generate("r", TextPrompt(text)), "http", "chat", session="s")

    def known(node_id: str = "a") -> int:
        return members.known_tokens(node_id, "m", text) * CHARS_PER_TOKEN

    members.read("a", "m", Job("m", replace(job.request, keep=[(0, 1)]), "http", "chat"))
    assert known() == 0, "a prompt in part is in no prefix cache"
    members.read("a", "m", job, 0.5)
    assert known() == 2 * BLOCK_CHARS, "it was cancelled half way"
    members.read("a", "m", job)
    assert (known(), known("")) == (4 * BLOCK_CHARS, 0)
    assert members.sessions.last("s", "m") == fleet.found[0].life
    assert (members.sessions.last("s", "other"), members.sessions.last("", "m")) == ("", "")
    members.lost_prompts("a", "m")
    assert known() == 0
    members.read("a", "m", job)
    fleet.found[0] = msgspec.structs.replace(fleet.found[0], card=replace(fleet.found[0].card, epoch=99))
    assert known() == 0
    assert members.sessions.last("s", "m") != fleet.found[0].life


def test_what_a_machine_has_no_room_for_in_its_prefix_cache_is_not_believed_to_be_there() -> None:
    found = member("a")
    (model,) = found.card.models
    room = {"token_bytes": 10, "prefix_budget_bytes": 10 * 9 * BLOCK_CHARS // CHARS_PER_TOKEN}
    card = replace(found.card, models=[changed(model, **room)])
    members = SeenFleet(msgspec.structs.replace(found, card=card)).members
    texts = [name * (4 * BLOCK_CHARS) for name in "pqr"]
    for text in texts:
        members.read("a", model.name, Job(model.name, Generate("r", TextPrompt(text)), "http", "chat"))
    known = [members.known_tokens("a", model.name, text) * CHARS_PER_TOKEN for text in texts]
    assert known == [0, 4 * BLOCK_CHARS, 4 * BLOCK_CHARS]


def test_what_a_prefill_took_corrects_prefills_and_not_scoring_which_is_other_work() -> None:
    fleet, speed = SeenFleet(member()), PrefillSpeed(0.001)
    assert fleet.members.correction("studio", DIGEST, speed) == 1
    fleet.members.computed("studio", DIGEST, speed.token_s, expected_s=1.0, took_s=3.0)
    assert fleet.members.correction("studio", DIGEST, speed) == 2
    assert fleet.members.correction("studio", DIGEST, speed, "score") == 1


@pytest.mark.parametrize(("accelerator", "factor"), [("cuda", 1.0), ("metal", 4.5), ("cpu", 4.5)])
def test_kernels_that_are_compiled_at_their_first_use_make_no_machine_seem_slow(
    accelerator: str, factor: float
) -> None:
    found, speed = member(), PrefillSpeed(0.001)
    card = replace(found.card, machine=MachineFacts(accelerator=accelerator))
    members = SeenFleet(msgspec.structs.replace(found, card=card)).members
    members.computed("studio", DIGEST, speed.token_s, "score", expected_s=4.0, took_s=54.0)
    assert members.correction("studio", DIGEST, speed, "score") == factor
    members.waited("studio", DIGEST, speed.token_s, "decode", expected_s=4.0, took_s=54.0)
    assert (members.correction("studio", DIGEST, speed, "decode") > 1) == (accelerator != "cuda")
    members.late("studio", "score")
    assert bool(members.failure("studio", "score")) == (accelerator != "cuda")
    for work in ("score", "fetch"):
        members.late("studio", work)
        assert members.failure("studio", work)


# ---- ranks that wait -------------------------------------------------------------------------------------


def with_ranks(count: int, accelerator: str) -> Member:
    found = member()
    model = replace(
        found.card.models[0], speed=MeasuredSpeed(prefill_tok_s=80.0, decode_tok_s=8.0, prefill_fixed_s=0.1)
    )
    facts = replace(found.card.machine, accelerator=accelerator, cores=4, chip="cpu")
    return replace(found, card=replace(found.card, machine=facts, models=[model], rank_cores=count))


@pytest.mark.parametrize(("accelerator", "tok_s"), [("cpu", 60.0), ("metal", 80.0)])
def test_a_rank_takes_a_core_from_what_its_machine_can_do_for_others(accelerator: str, tok_s: float) -> None:
    told = with_ranks(1, accelerator)
    (seen,) = Members(lambda: [told], lambda: None).others("prefill")
    assert seen.card.machine.cores == 3
    assert seen.card.models[0].speed.prefill_tok_s == pytest.approx(tok_s)
    here = Members(tuple, lambda: told.card).here()
    assert here.card == seen.card


def test_a_machine_keeps_a_core_however_many_ranks_it_has_and_one_without_ranks_all_of_them() -> None:
    assert beside_ranks(with_ranks(9, "cpu").card).machine.cores == 1
    idle = with_ranks(0, "cpu").card
    assert beside_ranks(idle) is idle
