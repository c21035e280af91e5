"""Machines that hold a model together: named by a request, planned, refused by name; and how that is told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny_architectures
from files_off_the_loop import files_off_the_loop
from member_cards import FACTS, OWN, machine
from member_cards import MODEL as CARD
from msgspec.structs import replace
from nested_fields import changed

from fleetctl.render.group_table import group_lines
from fleetd import limits
from fleetd.control.group_view import GroupView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.group_front import NewCut
from fleetd.engine.protocol import Generate, TextPrompt
from fleetd.errors import FleetError, InvalidValue, NoMachine, OutOfMemory, PeerLost
from fleetd.limits import GIB
from fleetd.models import model_sizes
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes, WeightNeed, WeightRules
from fleetd.models.model_sizes import ModelSizes
from fleetd.p2p.membership.cards import Card, MachineFacts
from fleetd.plan import chip_speeds
from fleetd.plan.group_cut import GroupMachine, GroupPart
from fleetd.plan.measured_cut import LEAST_STEPS
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.groups.layer_times import LayerTimes
from fleetd.requests.groups.planning import FleetGroups
from fleetd.requests.job import Job, Planned
from fleetd.requests.members.members import Member, Members
from fleetd.requests.placement.placement import Placer, WantedModel
from fleetd.requests.promised_memory import PromisedMemory

MODEL = CARD.name
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("tiny")
    tiny_architectures.write(path, "llama", num_hidden_layers=LAYERS, hidden_size=256)
    return read_folder(path, name=MODEL, source="folder", revision=None)


def own(digest: str = "d") -> Card:
    return replace(OWN, models=[replace(CARD, digest=digest, state="installed")])


def other(name: str, *, room: int = 8 * GIB, facts: MachineFacts = FACTS, **fields: Any) -> Member:
    found = machine(name, **{"state": "installed", **fields})
    return replace(found, card=replace(found.card, usable_bytes=WORKING_BYTES + room, machine=facts))


def groups(*others: Member, budget: int = 8 * GIB, card: Card | None = None) -> FleetGroups:
    members = Members(lambda: others, lambda: card or own())
    rules = WeightRules("cpu", "float32", available=False, budget_bytes=budget)
    return FleetGroups(None, members, lambda: rules)  # type: ignore[arg-type]  # nothing is sent


def placer(*others: Member, **settings: Any) -> Placer:
    members = Members(lambda: others, own, **settings)
    return Placer(members, lambda *_: pytest.fail("nothing is sent"))


def placed(placement: list[str], *others: Member, local_only: bool = False, **settings: Any) -> Any:
    asked = Generate("r1", TextPrompt("x" * 400), max_tokens=10)
    job = Job(MODEL, asked, "http", "chat", local_only=local_only, placement=tuple(placement))
    wanted = WantedModel(MODEL, here=True)
    return placer(*others, **settings).choose(job, wanted, tried=frozenset(), why=None)


def sizes(folder: ModelFolder) -> ModelSizes:
    return model_sizes.read(folder, WeightRules("cpu", "float32", available=False, budget_bytes=8 * GIB))


def view_of(made: FleetGroups, folder: ModelFolder, *over: str) -> GroupView:
    view = made.planned(folder, sizes(folder), over)
    assert view is not None
    return view


@pytest.mark.one_loop
async def test_machines_are_planned_without_a_look_at_files_on_the_loop(folder: ModelFolder) -> None:
    with files_off_the_loop(folder.path):
        view = await groups(other("studio"), other("kitchen")).view(folder)
    assert view is not None
    assert len(view.parts) == 2


def test_a_load_of_a_part_is_expected_by_what_loads_took_there(folder: ModelFolder) -> None:
    studio = other("studio", digest="d", load_s=4000.0)
    made = groups(studio)
    group = made(folder, sizes(folder))
    assert group is not None
    weights = studio.card.models[0].shape.weights_bytes

    def part(layers: int) -> GroupPart:
        return GroupPart(GroupMachine("studio", "studio", 8 * GIB, 1e9, weights // 4), 0, layers)

    assert group._load_s(part(2)) == pytest.approx(2000.0)
    # On a CPU weights may take more memory than the files are long: all of them are read once.
    assert group._load_s(part(8)) == pytest.approx(4000.0)
    # Of other files, or of this machine, nothing was measured; and a disk is no faster than disks are.
    usual_s = chip_speeds.load_s(weights // 2)
    assert made._load_s("e", part(2)) == usual_s
    assert groups(other("studio", load_s=0.001))._load_s("d", part(2)) == usual_s
    assert groups(other("studio", load_s=4000.0, weights_bytes=0))._load_s("d", part(2)) == usual_s


# ---- named by a request ----------------------------------------------------------------------------------


def test_several_machines_hold_the_model_with_this_one() -> None:
    found = placed(["this", "studio"], other("studio"), other("kitchen"))
    assert (found.node_id, found.over) == (THIS_NODE, ("studio",))


def test_this_machine_alone_is_a_placement_too_and_another_one_answers_alone() -> None:
    assert placed(["me"], other("studio")).over == ()
    found = placed(["STUDIO"], other("studio", state="loaded"))
    assert (found.node_id, found.over) == ("studio", None)
    assert found.planned == Planned("remote", ("studio",), "equivalent")


def test_without_a_placement_nothing_is_asked_of_the_engine() -> None:
    assert placed([]).over is None


@pytest.mark.parametrize(
    ("placement", "settings", "error", "said"),
    [
        (["this", "gamma"], {}, InvalidValue, "No machine called gamma is paired with this one."),
        (["studio", "this"], {}, InvalidValue, "holds the first layers"),
        (["this", "studio", "studio"], {}, InvalidValue, "studio is named twice."),
        (["this", "blind"], {}, NoMachine, "blind may not see prompts."),
        (["this", "gone"], {}, NoMachine, "gone cannot be used: It is off."),
        (["this", "studio"], {"local_only": True}, InvalidValue, "stays on this machine"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    placement: list[str], settings: dict[str, Any], error: type[FleetError], said: str
) -> None:
    others = (other("studio"), other("blind", sees=False), other("gone", reach="It is off."))
    with pytest.raises(error, match=re.escape(said)) as caught:
        placed(placement, *others, **settings)
    assert caught.value.param == "placement"
    assert caught.value.hint or error is InvalidValue


def test_where_prompts_stay_by_the_settings_other_machines_are_not_even_known() -> None:
    members = Members(lambda: [other("studio")], own, local_only=True)
    with pytest.raises(NoMachine, match="studio is not asked: prompts stay here"):
        Placer(members, lambda *_: pytest.fail("nothing is sent")).over(["this", "studio"])


def test_a_machine_without_the_files_or_room_is_refused_by_name(folder: ModelFolder) -> None:
    with pytest.raises(NoMachine, match="studio has no model with these files") as caught:
        groups(other("studio", digest="e")).planned(folder, sizes(folder), ["studio"])
    assert "fleetctl models pull big" in (caught.value.hint or "")
    made = groups(other("studio"), other("kitchen", room=1000))
    with pytest.raises(OutOfMemory, match="kitchen has no room for a single layer"):
        made.planned(folder, sizes(folder), ["studio", "kitchen"])
    with pytest.raises(NoMachine, match="does not know yet which files"):
        groups(other("studio"), card=own("")).planned(folder, sizes(folder), ["studio"])
    with pytest.raises(NoMachine, match="garage has left"):
        groups(other("studio")).planned(folder, sizes(folder), ["garage"])


# ---- planned ---------------------------------------------------------------------------------------------


def test_all_machines_that_are_named_hold_a_part_though_fewer_would_do(folder: ModelFolder) -> None:
    view = view_of(groups(other("a"), other("b"), other("c")), folder, "a", "b")
    assert {part.machine for part in view.parts} == {"this", "a", "b"}
    assert view.parts[0].machine == "this"
    assert [part.first for part in view.parts] == [0, *(part.last for part in view.parts[:-1])]
    assert view.parts[-1].last == view.layers == LAYERS
    assert "were named" in view.why


def test_the_view_says_what_each_part_takes_and_how_fast_it_is(folder: ModelFolder) -> None:
    view = view_of(groups(replace(other("studio"), bytes_per_s=1e6, rtt_s=0.004)), folder)
    here, there = view.parts
    # Embedding and head are held where answers are written.
    assert here.weights_bytes > there.weights_bytes > 0
    assert view.tokens <= min(here.kv_tokens, there.kv_tokens)
    assert here.hop_s == 0
    # Half a hidden state of 16-bit numbers each way, and the round trip.
    assert there.hop_s == pytest.approx(0.004 + 2 * 2 * 256 / 1e6)
    assert 1 / view.tok_s == pytest.approx(here.step_s + there.step_s + there.hop_s)
    # Once the model was loaded it is known how wide they are.
    loaded = replace(own(), models=[changed(own().models[0], hidden_bytes=800)])
    known = view_of(groups(replace(other("studio"), bytes_per_s=1e6, rtt_s=0.004), card=loaded), folder)
    assert known.parts[1].hop_s == pytest.approx(0.004 + 2 * 800 / 1e6)
    assert view.why == (
        "No machine has room for all of it; 2 are the fewest that hold it together. "
        "Each has about the same number of layers."
    )


def test_hidden_states_go_from_machine_to_machine_and_back_from_the_last(folder: ModelFolder) -> None:
    two, three = (view_of(groups(*map(other, over)), folder, *over) for over in ("a", "ab"))
    there_and_back = two.parts[1].hop_s
    assert there_and_back > 0
    assert [part.hop_s for part in three.parts] == [0, there_and_back / 2, there_and_back]


def test_a_faster_machine_has_more_layers_and_the_view_says_why(folder: ModelFolder) -> None:
    view = view_of(groups(other("studio", faster=3.0)), folder)
    assert view.parts[1].last - view.parts[1].first > 2
    assert "studio is faster than this and has more layers." in view.why


def test_what_is_missing_is_said(folder: ModelFolder) -> None:
    made = groups(other("studio", room=1000), budget=1000)
    with pytest.raises(
        OutOfMemory, match=r"does not fit this machine, and with the others .* GB are missing"
    ):
        made(folder, sizes(folder))
    view = view_of(made, folder)
    assert view.parts == []
    assert "are missing on the machines that could hold it together" in view.why


def test_without_others_to_ask_there_is_no_group(folder: ModelFolder) -> None:
    assert groups().planned(folder, sizes(folder)) is None
    assert groups()(folder, sizes(folder)) is None


# Layers of 1000 bytes on a GPU, 16 of a token in each, and 600 bytes outside of them.
COUNTED = ModelSizes(WeightNeed("", 4600), {"": LayerBytes((1000,) * LAYERS, 600, 16)})
METAL = replace(FACTS, accelerator="metal")
# What two layers and 2048 tokens take, the least of a context of 4096.
LEAST = 2 * (1000 + 2048 * 16)


@pytest.mark.parametrize(
    ("context", "here", "there", "tokens"),
    [
        # Three fourths of 128000 bytes are for tokens, of 32 bytes each.
        (4096, 600 + 2000 + 128000, GIB, 3000),
        (4096, GIB, 2000 + 128000, 3000),
        # Two contexts, and no less than half of one.
        (4096, GIB, GIB, 8192),
        (4096, 600 + LEAST, LEAST, 2048),
        (4096, 600 + LEAST - 1, LEAST, None),
        (4096, 600 + LEAST, LEAST - 1, None),
        # A short one as a whole.
        (96, 600 + 2 * (1000 + 96 * 16), GIB, 96),
        (96, 600 + 2 * (1000 + 96 * 16) - 1, 2 * (1000 + 96 * 16), None),
    ],
)
def test_a_part_is_promised_the_memory_that_its_layers_and_tokens_take(
    folder: ModelFolder, context: int, here: int, there: int, tokens: int | None
) -> None:
    folder = replace(folder, config={**folder.config, "max_position_embeddings": context})
    promised = PromisedMemory()
    made = FleetGroups(
        None,  # type: ignore[arg-type]  # nothing is sent
        Members(lambda: [other("studio", room=there, facts=METAL)], lambda: replace(own(), machine=METAL)),
        lambda: WeightRules("metal", budget_bytes=here),
        promised=promised,
    )
    if tokens is None:
        with pytest.raises(OutOfMemory, match="GB are missing"):
            made(folder, COUNTED)
        return
    group = made(folder, COUNTED)
    assert group is not None
    assert (group.tokens, group.members[0].first) == (tokens, 2)
    group._own_promise.make(lambda: 0)
    assert promised.outstanding_bytes == 600 + 2 * (1000 + 16 * tokens) <= here
    group._own_promise.close()


def test_a_machine_that_failed_is_asked_only_if_the_others_do_not_hold_the_model(folder: ModelFolder) -> None:
    made = groups(other("kitchen"), other("studio"))
    first = made(folder, sizes(folder))
    assert first is not None
    assert [member.name for member in first.members] == ["kitchen"]
    first._failed("kitchen", OutOfMemory("No room."))
    assert [part.machine for part in view_of(made, folder).parts] == ["this", "studio"]
    # That concerns this work alone; a machine that was lost is asked for no other either.
    first._failed("studio", PeerLost("It has left."))
    left = {member.name: member.why_left_out("d") for member in made._members.others("score")}
    assert {name: bool(why) for name, why in left.items()} == {"kitchen": False, "studio": True}
    # If all have failed, they are asked all the same; so is one that is named.
    assert [part.machine for part in view_of(made, folder).parts] == ["this", "kitchen"]
    assert [part.machine for part in view_of(made, folder, "studio").parts] == ["this", "studio"]


def test_machines_are_known_by_what_layers_take_there_and_how_long_loads_last(folder: ModelFolder) -> None:
    bare = other("bare", digest="e", facts=METAL)
    bare = replace(bare, card=replace(bare.card, part_bytes=3500), bytes_per_s=100.0)
    unknown = replace(bare, name="unknown", card=replace(bare.card, node_id="unknown", name="unknown"))
    made = groups(
        other("studio", facts=METAL, load_s=400.0),
        other("tower", room=5000),
        bare,
        replace(unknown, bytes_per_s=0.0),
        budget=7000,
        card=replace(own(), models=[replace(CARD, digest="d", load_s=40.0)]),
    )
    # The largest layer counts, and the ends belong to what a step reads.
    found = ModelSizes(
        WeightNeed("float32", 9200),
        {
            "": LayerBytes((1000, 1000, 1200, 800), 600, 16),
            "float32": LayerBytes((2000, 2000, 2400, 1600), 1200, 16),
        },
    )
    known = made._candidates(folder, found, (), even_left_out=False)
    assert known is not None
    # All have measured 10 tokens of a whole model per second, of 4600 bytes, or of 9200 on a CPU.
    assert (known.here.room_bytes, known.here.bytes_per_s, known.here.layer_bytes) == (7000, 92000.0, 2400)
    assert {each.name: (each.room_bytes, each.bytes_per_s, each.layer_bytes) for each in known.having} == {
        "studio": (8 * GIB, 46000.0, 1200),
        "tower": (5000, 92000.0, 2400),
    }
    # A disk with 3500 bytes has room for two layers, and nothing comes at no speed.
    assert {each.name: each.can_fetch for each in known.fetchers} == {"bare": 2, "unknown": 2}
    usual_s = chip_speeds.load_s(GIB) / LAYERS
    assert known.load_s == {
        THIS_NODE: 10.0,
        "studio": 100.0,
        "tower": usual_s,
        "bare": 10.0 + 1200 / 100,
        "unknown": math.inf,
    }


def test_the_terminal_shows_parts_speed_and_reason(folder: ModelFolder) -> None:
    lines = group_lines(view_of(groups(other("studio")), folder), None)
    assert lines[0].split() == [
        "MACHINE",
        "LAYERS",
        "WEIGHTS",
        "ROOM",
        "FOR",
        "TOKENS",
        "PER",
        "TOKEN",
        "LINK",
    ]
    assert lines[1].startswith("this     0-1 ")
    assert lines[2].startswith("studio   2-3 ")
    assert "2 machines would hold its 4 layers: about" in lines[3]
    assert lines[4].startswith("No machine has room")


def test_the_plan_of_a_loaded_group_has_the_speeds_that_it_measured(folder: ModelFolder) -> None:
    made = groups(other("studio"))
    assert made(folder, model_sizes.read(folder, WeightRules("metal", budget_bytes=8 * GIB))) is not None
    assert made.loaded(folder) is None
    made._loaded = lambda _: MeasuredSpeed()
    view = made.loaded(folder)
    assert view is not None
    assert view.tok_s == pytest.approx(view_of(made, folder).tok_s)
    made._loaded = lambda _: MeasuredSpeed(prefill_tok_s=1234.4, decode_tok_s=17.25)
    view = made.loaded(folder)
    assert view is not None
    assert (view.loaded, view.tok_s, view.prompt_tok_s) == (True, 17.25, 1234.4)
    assert group_lines(view, None)[3] == (
        "2 machines hold its 4 layers: about 17.2 tokens per second for one answer (measured), with room for "
        f"{view.tokens:,} tokens. They read 1,234 tokens of a prompt per second."
    )


# ---- cut anew --------------------------------------------------------------------------------------------


def stages(view: GroupView, *layer_ms: float) -> list[GroupStage]:
    """What each machine was measured to take, in the order of the parts."""
    return [
        GroupStage("", part.first, part.last, (part.last - part.first) * ms / 1000, 0.0, LEAST_STEPS)
        for part, ms in zip(view.parts, layer_ms, strict=True)
    ]


class TurnedClock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def held(clock: TurnedClock, folder: ModelFolder) -> tuple[FleetGroups, Callable[[], GroupView]]:
    """Layers on this machine and on studio, and how they are held now."""
    made = groups(other("studio"))
    made._monotonic = clock
    assert made(folder, model_sizes.read(folder, WeightRules("metal", budget_bytes=8 * GIB))) is not None
    made._loaded = lambda _: MeasuredSpeed()

    def view() -> GroupView:
        found = made.loaded(folder)
        assert found is not None
        return found

    return made, view


def test_a_group_is_cut_anew_by_measured_steps_and_says_why(folder: ModelFolder) -> None:
    made, view = held(TurnedClock(), folder)
    first = view()
    assert made.anew(MODEL, stages(first, 1, 1)) is None
    assert made.anew("another", stages(first, 1, 9)) is None
    found = made.anew(MODEL, stages(first, 1, 9))
    assert found is not None
    group, why = found.group, found.why
    assert [(member.name, member.first, member.last) for member in group.members] == [("studio", 3, 4)]
    assert "9.0 times as long on studio as on this" in why
    assert "layers 0 to 2 on this, 3 to 3 on studio" in why
    assert view().why.endswith(why)


def test_it_is_cut_anew_ever_more_rarely(folder: ModelFolder) -> None:
    clock = TurnedClock()
    made, view = held(clock, folder)
    pauses, slow = [], (1.0, 9.0)
    for _ in range(4):
        while made.anew(MODEL, stages(view(), *slow)) is None:
            clock.now_s += 60
            pauses[-1] += 60
        # Now the other one turns out slow.
        slow = slow[1], slow[0]
        pauses.append(0.0)
    assert pauses[:3] == [limits.GROUP_RECUT_S, 2 * limits.GROUP_RECUT_S, 4 * limits.GROUP_RECUT_S]
    # But once a day, if it is worth it.
    made._anew_from[MODEL] = 0.0, limits.GROUP_RECUT_MOST_S
    assert made.anew(MODEL, stages(view(), *slow)) is not None
    assert made._anew_from[MODEL] == (clock.now_s + limits.GROUP_RECUT_MOST_S, limits.GROUP_RECUT_MOST_S)


def test_what_was_measured_decides_the_next_load_until_a_member_refuses_it(folder: ModelFolder) -> None:
    made, view = held(TurnedClock(), folder)
    first = view()
    assert made.anew(MODEL, stages(first, 1, 9)) is not None
    again = made(folder, model_sizes.read(folder, WeightRules("metal", budget_bytes=8 * GIB)))
    assert again is not None
    assert [(member.first, member.last) for member in again.members] == [(3, 4)]
    # That cut cannot be held after all, and the first one could.
    again._failed("studio", OutOfMemory("No room."))
    assert [(part.first, part.last) for part in view_of(made, folder).parts] == [(0, 2), (2, 4)]
    (studio,) = made._members.others("prefill")
    assert not studio.why_left_out("d")
    again._failed("studio", PeerLost("It has left."))
    (studio,) = made._members.others("prefill")
    assert studio.why_left_out("d")


def test_what_was_measured_is_forgotten_after_a_day() -> None:
    clock = TurnedClock()
    times = LayerTimes(clock)
    times.took("d", {"this": 0.001, "studio": 0.002})
    clock.now_s += limits.GROUP_RECUT_MOST_S / 2
    times.took("d", {"this": 0.003})
    assert times.known("d") == {"this": 0.003, "studio": 0.002}
    clock.now_s += limits.GROUP_RECUT_MOST_S / 2 + 1
    assert times.known("d") == {"this": 0.003}
    times.forget("d")
    assert times.known("d") == {}


# ---- machines from outside -------------------------------------------------------------------------------

MANY = 10**9


def trio(folder: ModelFolder, *more: Member, **figures: Any) -> tuple[FleetGroups, list[Member]]:
    """Layers are on this machine and on studio; others have joined since."""
    machines = [other("studio")]
    made = FleetGroups(
        None,  # type: ignore[arg-type]  # nothing is sent
        Members(lambda: machines, own),
        lambda: WeightRules("cpu", "float32", available=False, budget_bytes=8 * GIB),
    )
    assert made(folder, sizes(folder), **figures) is not None
    made._loaded = lambda _: MeasuredSpeed()
    machines += more
    return made, machines


def slow(made: FleetGroups, folder: ModelFolder, *layer_ms: float, tokens: int = MANY) -> NewCut | None:
    view = made.loaded(folder)
    assert view is not None
    return made.anew(MODEL, stages(view, *layer_ms), tokens)


def test_an_idle_machine_takes_the_place_of_a_slow_one_and_the_reason_is_said(folder: ModelFolder) -> None:
    made, _ = trio(folder, other("kitchen"))
    before = made._formed[MODEL].id
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert (found.group._after, found.group._new) == (before, {"kitchen"})
    assert [(member.name, member.first, member.last) for member in found.group.members] == [("kitchen", 2, 4)]
    assert found.why == (
        "Cut anew with kitchen in the place of studio, as a layer was measured to take 8.0 times as long on "
        "studio as is reckoned for kitchen: layers 0 to 1 on this, 2 to 3 on kitchen. That gains about 452 %."
    )
    assert found.prepare is not None
    # The one that is held goes on until the other one forms.
    view = made.loaded(folder)
    assert view is not None
    assert [part.machine for part in view.parts] == ["this", "studio"]
    found.group.on_form()
    view = made.loaded(folder)
    assert view is not None
    assert [part.machine for part in view.parts] == ["this", "kitchen"]
    assert view.why.endswith(found.why)


def test_a_machine_from_outside_is_reckoned_to_be_as_much_slower_than_believed_as_this_one(
    folder: ModelFolder,
) -> None:
    made, _ = trio(folder, replace(other("kitchen", faster=2.0), rtt_s=0.006))
    found = slow(made, folder, 5, 40)
    assert found is not None
    # Kitchen is believed to be twice as fast as this: 2.5 ms.
    assert "16.0 times as long on studio as is reckoned for kitchen" in found.why
    found.group.on_form()
    view = made.loaded(folder)
    assert view is not None
    assert view.parts[1].hop_s >= 0.006


def test_no_machine_takes_a_place_beside_its_own(folder: ModelFolder) -> None:
    """Three hold the model, of which one is slow: a fast one does not get its place as well."""
    machines = [other(name, room=LEAST, facts=METAL) for name in ("attic", "barn")]
    made = FleetGroups(
        None,  # type: ignore[arg-type]  # nothing is sent
        Members(lambda: machines, lambda: replace(own(), machine=METAL)),
        lambda: WeightRules("metal", budget_bytes=600 + LEAST // 2),
    )
    assert made(folder, COUNTED, ["attic", "barn"]) is not None
    # Nobody has named them.
    made._formed[MODEL] = replace(made._formed[MODEL], plan=replace(made._formed[MODEL].plan, named=False))
    made._loaded = lambda _: MeasuredSpeed()
    machines.append(other("cellar", room=LEAST, facts=METAL))
    found = slow(made, folder, 5, 5, 80)
    assert found is not None
    assert sorted(member.name for member in found.group.members) == ["attic", "cellar"]


def test_a_group_whose_files_have_changed_keeps_its_machines(folder: ModelFolder) -> None:
    made, machines = trio(folder, other("kitchen", digest="e"))
    made._members._own_card = lambda: own("e")
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert [member.name for member in found.group.members] == ["studio"]
    # So does one whose other machines cannot be asked any more.
    made, machines = trio(folder)
    machines.clear()
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert [member.name for member in found.group.members] == ["studio"]


@pytest.mark.parametrize(
    "changed",
    [
        {"running": 1},
        {"waiting": 1},
        {"unread_tokens": 500},
        {"draining": True},
        {"usable_bytes": WORKING_BYTES + 1000},
    ],
)
def test_a_machine_that_is_busy_or_has_no_room_takes_no_place(
    folder: ModelFolder, changed: dict[str, Any]
) -> None:
    kitchen = other("kitchen")
    made, _ = trio(folder, replace(kitchen, card=replace(kitchen.card, **changed)))
    found = slow(made, folder, 5, 40)
    assert found is None or found.group.members[0].name == "studio"


@pytest.mark.parametrize("fields", [{"sees": False}, {"reach": "It is off."}, {"digest": "e"}])
def test_a_machine_that_may_not_hold_layers_takes_no_place(folder: ModelFolder, fields: Any) -> None:
    made, _ = trio(folder, other("kitchen", **fields))
    found = slow(made, folder, 5, 40)
    assert found is None or found.group.members[0].name == "studio"


def test_a_machine_that_failed_a_short_while_ago_takes_no_place(folder: ModelFolder) -> None:
    made, _ = trio(folder, other("kitchen"))
    made._members.failed("kitchen", "prefill", PeerLost("It has left."))
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert found.group.members[0].name == "studio"


def test_machines_that_a_person_has_named_stay(folder: ModelFolder) -> None:
    made, _ = trio(folder, other("kitchen"), over=["studio"])
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert (found.group.members[0].name, found.over, found.prepare) == ("studio", ("studio",), None)


def test_a_group_that_was_hardly_used_does_not_change_its_machines(folder: ModelFolder) -> None:
    made, _ = trio(folder, other("kitchen"))
    found = slow(made, folder, 5, 40, tokens=1)
    assert found is not None
    assert found.group.members[0].name == "studio"


def test_a_machine_that_would_have_to_fetch_for_long_waits_until_that_pays(folder: ModelFolder) -> None:
    bare = other("kitchen", digest="e")
    fetching = replace(bare, card=replace(bare.card, part_bytes=8 * GIB), bytes_per_s=1e6)
    made, _ = trio(folder, fetching)
    found = slow(made, folder, 5, 40, tokens=50)
    assert found is not None
    assert found.group.members[0].name == "studio"
    made, _ = trio(folder, fetching)
    found = slow(made, folder, 5, 40)
    assert found is not None
    assert found.group.members[0].name == "kitchen"


def test_the_next_load_takes_the_machine_that_was_measured_to_be_faster(folder: ModelFolder) -> None:
    # Of two that are believed to be as fast, the one is asked whose id comes first: that is studio.
    made, machines = trio(folder, other("workshop"))
    assert slow(made, folder, 5, 40) is not None
    again = made(folder, sizes(folder))
    assert again is not None
    assert [member.name for member in again.members] == ["workshop"]
    # It cannot be asked any more: then the slow one is.
    machines[1] = other("workshop", reach="It is off.")
    again = made(folder, sizes(folder))
    assert again is not None
    assert [member.name for member in again.members] == ["studio"]


def test_if_all_are_slower_than_believed_the_next_load_takes_the_same_ones(folder: ModelFolder) -> None:
    """Workshop is believed to be much faster than what was measured, but not than what this machine was."""
    made, _ = trio(folder, other("workshop"))
    assert slow(made, folder, 5000, 4000, tokens=0) is None
    again = made(folder, sizes(folder))
    assert again is not None
    assert [member.name for member in again.members] == ["studio"]


def test_a_machine_that_failed_to_take_the_place_leaves_what_was_measured(folder: ModelFolder) -> None:
    made, _ = trio(folder, other("kitchen"))
    found = slow(made, folder, 5, 40)
    assert found is not None
    found.group._failed("kitchen", OutOfMemory("No room."))
    assert made._layer_times.known("d").keys() == {THIS_NODE, "studio"}
    again = made(folder, sizes(folder))
    assert again is not None
    assert [member.name for member in again.members] == ["studio"]
