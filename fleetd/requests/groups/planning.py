"""Which machines hold a model that does not fit this one, or that is to be held by several."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.group_view import DividedView, GroupView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.group_front import NewCut
from fleetd.errors import FleetError, Incompatible, ModelCorrupt, ModelUnsupported, NoMachine, OutOfMemory
from fleetd.models import file_threads, model_sizes
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_parts import HubCommit, HubListing, HubPartOrder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes, WeightRules
from fleetd.models.model_sizes import ModelSizes
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.group_cut import (
    GroupCut,
    GroupMachine,
    GroupModelSize,
    GroupPart,
    Shortage,
    cut_with_fetchers,
)
from fleetd.plan.measured_cut import OtherMachines, cut_anew, exchange, layer_seconds
from fleetd.process.observe import get_logger
from fleetd.requests.groups.client import FleetGroup
from fleetd.requests.groups.group_views import cut_anew_because, exchanged_because, group_view
from fleetd.requests.groups.known_hops import KnownHops
from fleetd.requests.groups.layer_times import LayerTimes
from fleetd.requests.groups.machine_speeds import decode_tok_s
from fleetd.requests.groups.part_fetchers import fetchers, most_layers, whole_model
from fleetd.requests.members.members import Member, Members, eligible, expected_load_s
from fleetd.requests.members.named_machines import hint_for
from fleetd.requests.ports import FleetPort
from fleetd.requests.promised_memory import OwnPromise, PromisedMemory

log = get_logger("fleetd.requests.groups.planning")

# Each with the model as it has it, or would have it.
_Machines = list[tuple[Member, ModelCard]]


class GroupPlan(msgspec.Struct, frozen=True):
    """A cut, or why there is none."""

    found: GroupCut | Shortage
    # Of the files that it is for.
    digest: str
    size: GroupModelSize
    # By node id, seconds that one hidden state takes to a machine and back.
    hops_s: Mapping[str, float]
    # A person has named the machines.
    named: bool = False
    # Where the files are, if this machine has the model in part: who lacks layers fetches them there.
    hub: HubCommit | None = None
    # Why it was cut anew, as a sentence; "" for a first cut.
    anew: str = ""

    @property
    def from_hub(self) -> bool:
        return self.hub is not None

    @property
    def view(self) -> GroupView:
        view = group_view(self.found, self.size, self.hops_s, named=self.named, from_hub=self.from_hub)
        return replace(view, why=f"{view.why} {self.anew}") if self.anew else view


class _FormedGroup(msgspec.Struct, frozen=True):
    """The last group of a model. ``id``: as its members know it. ``over``: the machines that were named."""

    folder: ModelFolder
    sizes: ModelSizes
    plan: GroupPlan
    id: str
    over: Sequence[str]


class _Candidates(msgspec.Struct, frozen=True):
    """The machines that could hold a part: this one, those with the files, and those that can fetch layers.

    ``load_s``: seconds that a load of one layer takes, by node id, those to fetch it included.
    """

    size: GroupModelSize
    here: GroupMachine
    having: Sequence[GroupMachine]
    fetchers: Sequence[GroupMachine]
    hops_s: Mapping[str, float]
    load_s: Mapping[str, float]
    digest: str

    @property
    def others(self) -> list[GroupMachine]:
        return [*self.having, *self.fetchers]

    def among(self, node_ids: Collection[str]) -> _Candidates:
        """Without other machines than these."""
        having, fetchers = (
            [each for each in machines if each.node_id in node_ids]
            for machines in (self.having, self.fetchers)
        )
        return replace(self, having=having, fetchers=fetchers)

    def as_measured(self, layer_s: Mapping[str, float]) -> _Candidates:
        """The same with the speeds that layers were measured to have; the other machines are reckoned to be
        as much slower than believed as this one. ``layer_s``: by node id, this machine's included."""
        own_s = self.here.layer_bytes / self.here.bytes_per_s
        slower = layer_s[self.here.node_id] / own_s

        def measured(machine: GroupMachine) -> GroupMachine:
            known_s = layer_s.get(machine.node_id)
            speed = machine.layer_bytes / known_s if known_s else machine.bytes_per_s / slower
            return replace(machine, bytes_per_s=speed)

        return replace(
            self,
            here=measured(self.here),
            having=[measured(each) for each in self.having],
            fetchers=[measured(each) for each in self.fetchers],
        )


class FleetGroups:
    """Args:
    rules: how this machine holds weights, with all others unloaded.
    loaded: the measured speed of a model that is loaded over several machines; None if it is not.
    promised: what groups were promised of this machine's memory.
    divided: what it would be like if the machines of a cut divided every layer, given the seconds of a token
        with the cut, and the sizes of the model; None if that is not looked at.
    bring: brings layers of a model of the hub to this machine.
    monotonic: seconds.
    """

    def __init__(
        self,
        partners: FleetPort,
        members: Members,
        rules: Callable[[], WeightRules],
        loaded: Callable[[ModelFolder], MeasuredSpeed | None] = lambda folder: None,
        promised: PromisedMemory | None = None,
        divided: Callable[[ModelFolder, GroupCut, float, ModelSizes], DividedView | None] = lambda *_: None,
        bring: Callable[[HubPartOrder], AsyncGenerator[PullProgress, None]] | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bring = bring
        self._promised, self._divided = promised or PromisedMemory(), divided
        self._partners, self._members, self._rules, self._loaded = partners, members, rules, loaded
        self._monotonic, self._hops = monotonic, KnownHops()
        # By model.
        self._formed: dict[str, _FormedGroup] = {}
        self._layer_times = LayerTimes(lambda: self._monotonic())
        # By model: from when on it may be cut anew, and how long the pause before that was.
        self._anew_from: dict[str, tuple[float, float]] = {}

    def __call__(self, folder: ModelFolder, sizes: ModelSizes, over: Sequence[str] = ()) -> FleetGroup | None:
        """The machines that hold a model with this one; None if there are no others to ask.

        Raises OutOfMemory if they do not have the memory for it, and as ``plan``.
        """
        planned = self.plan(folder, sizes, over)
        if planned is None:
            return None
        return self._group(folder, sizes, planned, over)

    def _group(
        self,
        folder: ModelFolder,
        sizes: ModelSizes,
        planned: GroupPlan,
        over: Sequence[str] = (),
        after: str = "",
        new: Collection[str] = (),
    ) -> FleetGroup:
        """
        Args:
            after: the id of a group of the same model, which has ended when this one forms.
            new: node ids of machines that were not in that one, and load their layers before that.

        Raises OutOfMemory.
        """
        found = planned.found
        if isinstance(found, Shortage):
            raise _no_room(folder.name, found, over)
        part, room = found.parts[0], self._rules().budget_bytes
        n_bytes = (part.last - part.first) * (
            part.machine.layer_bytes + found.tokens * planned.size.row_bytes
        )
        own = partial(
            self._promised.promise,
            f"Layers {part.first} to {part.last} of {folder.name}",
            n_bytes + planned.size.outside_bytes,
            room,
        )
        failed = partial(self._left_out, planned.digest)
        if planned.anew:
            failed = partial(self._not_cut_anew, planned.digest, new)
        at = planned.hub
        group = FleetGroup(
            self._partners,
            folder.name,
            planned.digest,
            found,
            OwnPromise(own),
            failed,
            self._hops,
            after=after,
            hub=at,
            bring=partial(self._brought, at, planned.digest) if at is not None else None,
            load_s=partial(self._load_s, planned.digest),
            new=new,
        )
        formed = _FormedGroup(folder, sizes, planned, group.id, tuple(over))
        if new:
            # Until it forms, the one before answers.
            group.on_form = lambda: self._formed.update({folder.name: formed})
        else:
            self._formed[folder.name] = formed
        return group

    def _load_s(self, digest: str, part: GroupPart) -> float:
        """What a machine takes to load a part: by what a load of the whole model took there, and no less than
        a disk of usual speed."""
        n_bytes = part.weights_bytes
        others = (each for each in self._members.others("prefill") if each.node_id == part.machine.node_id)
        whole = next((model for each in others for model in each.card.models if model.digest == digest), None)
        usual_s = chip_speeds.load_s(n_bytes)
        if whole is None or not whole.shape.weights_bytes:
            return usual_s
        return max(usual_s, whole.load_s * min(1.0, n_bytes / whole.shape.weights_bytes))

    def _brought(
        self, at: HubCommit, digest: str, first: int, last: int
    ) -> AsyncGenerator[PullProgress, None]:
        """Bring this machine's own layers from the hub, and what belongs to none."""
        if self._bring is None:
            raise NoMachine("Nothing is fetched from the hub here.")
        return self._bring(HubPartOrder(at.hub_id, at.commit, digest, first, last, own=True))

    # ---- cut anew ----------------------------------------------------------------------------------------

    def anew(self, name: str, stages: Sequence[GroupStage], tokens: int = 0) -> NewCut | None:
        """Another cut of a model that machines hold and that nobody uses, if what was measured of them makes
        that worth a load; None if it is to stay as it is.

        It is one over the same machines, or one in which idle machines have the place of slow ones. Each load
        doubles the pause until the next: speeds that come and go are not followed for ever.

        Args:
            stages: what plain steps took in the layers of each machine lately.
            tokens: that the group has written since it was loaded.
        """
        if (formed := self._formed.get(name)) is None:
            return None
        planned = formed.plan
        if isinstance(planned.found, Shortage) or (layer_s := layer_seconds(planned.found, stages)) is None:
            return None
        self._layer_times.took(planned.digest, layer_s)
        now_s = self._monotonic()
        from_s, pause_s = self._anew_from.get(name, (0.0, limits.GROUP_RECUT_S))
        if now_s < from_s:
            return None
        anew = self._exchanged(formed, tokens) or self._cut_anew(formed.folder, planned)
        if anew is None:
            return None
        self._anew_from[name] = now_s + pause_s, min(2 * pause_s, limits.GROUP_RECUT_MOST_S)
        log.info("group.cut_anew", model=name, reason=anew.anew)
        new = _node_ids(anew) - _node_ids(planned)
        group = self._group(formed.folder, formed.sizes, anew, formed.over, formed.id, new)
        return NewCut(group, anew.anew, formed.folder, formed.over or None, group.prepare if new else None)

    def _exchanged(self, formed: _FormedGroup, tokens: int) -> GroupPlan | None:
        """The best cut with idle machines in the place of slow ones; None if they gain too little. Machines
        that a person has named stay."""
        planned = formed.plan
        if planned.named or planned.from_hub or not tokens or isinstance(planned.found, Shortage):
            return None
        folder = formed.folder
        known = self._candidates(folder, formed.sizes, (), even_left_out=False)
        if known is None or known.digest != planned.digest:
            return None
        layer_s = self._layer_times.known(planned.digest)
        held, busy = _node_ids(planned), self._busy()
        # Who has the files is asked first, as for any group.
        for machines in (known.having, known.others):
            others = OtherMachines(
                tuple(each for each in machines if each.node_id not in held and each.node_id not in busy),
                {each.node_id: each.layer_bytes / each.bytes_per_s for each in (known.here, *known.others)},
                known.hops_s,
                known.load_s,
            )
            better = exchange(
                planned.size,
                planned.found,
                layer_s,
                others,
                tokens=tokens,
                context_tokens=folder.context_tokens,
            )
            if better is not None:
                why = exchanged_because(planned.found, better.found, better.layer_s, better.gain)
                return replace(planned, found=better.found, hops_s=known.hops_s, anew=why)
        return None

    def _busy(self) -> set[str]:
        """Node ids of the machines that have something to do."""
        return {
            member.node_id
            for member in self._members.others("prefill")
            if member.card.running or member.card.waiting or member.card.unread_tokens
        }

    def _cut_anew(self, folder: ModelFolder, planned: GroupPlan) -> GroupPlan | None:
        """The same machines with the parts that are best by what was measured of them; None if that is not
        known, or these gain too little."""
        layer_s = self._layer_times.known(planned.digest)
        if not layer_s or isinstance(planned.found, Shortage):
            return None
        better = cut_anew(planned.size, planned.found, layer_s, context_tokens=folder.context_tokens)
        if better is None:
            return None
        new, gain = better
        return replace(planned, found=new, anew=cut_anew_because(planned.found, new, layer_s, gain))

    def _not_cut_anew(self, digest: str, new: Collection[str], node_id: str, error: FleetError) -> None:
        """A member failed in a group that was cut anew. If it is not one that was new to it, the next one is
        planned as if nothing had been measured: the cut before was held."""
        if node_id in new:
            self._left_out(digest, node_id, error)
            return
        self._layer_times.forget(digest)
        if not isinstance(error, OutOfMemory):
            self._left_out(digest, node_id, error)

    def _left_out(self, digest: str, node_id: str, error: FleetError) -> None:
        """A member has failed. What has too little memory for a part is asked last for it, from now on."""
        known = Incompatible(error.message) if isinstance(error, OutOfMemory) else error
        self._members.failed(node_id, "prefill", known, digest)

    def loaded(self, folder: ModelFolder) -> GroupView | None:
        """How machines hold a model together now; None if they do not."""
        speed, formed = self._loaded(folder), self._formed.get(folder.name)
        if speed is None or formed is None:
            return None
        view = formed.plan.view
        tok_s = speed.decode_tok_s or view.tok_s
        return msgspec.structs.replace(view, loaded=True, tok_s=tok_s, prompt_tok_s=speed.prefill_tok_s)

    async def view(self, folder: ModelFolder, over: Sequence[str] = ()) -> GroupView | None:
        """What ``planned`` gives, by the files as they are now. Raises as that."""
        sizes = await file_threads.look(model_sizes.read, folder, self._rules())
        return self.planned(folder, sizes, over)

    def planned(self, folder: ModelFolder, sizes: ModelSizes, over: Sequence[str] = ()) -> GroupView | None:
        """How they would hold it; None if there are no others to ask.

        Raises as ``plan``, and OutOfMemory if the machines ``over`` have not the room.
        """
        planned = self.plan(folder, sizes, over)
        if planned is not None and over and isinstance(planned.found, Shortage):
            raise _no_room(folder.name, planned.found, over)
        if planned is None:
            return None
        view = planned.view
        if isinstance(planned.found, Shortage) or planned.from_hub:
            return view
        return replace(view, divided=self._divided(folder, planned.found, 1 / view.tok_s, sizes))

    def plan(self, folder: ModelFolder, sizes: ModelSizes, over: Sequence[str] = ()) -> GroupPlan | None:
        """The cut that a group would have; None if there are no others to ask. Nothing is begun.

        A machine that failed a short while ago is asked only if the model does not fit the others.

        Args:
            sizes: of the model, with its layers.
            over: names of the other machines that have to hold a part; none leaves it to the planner.

        Raises NoMachine if one of ``over`` cannot hold a part, ModelUnsupported if such a model is not cut.
        """
        found = self._plan(folder, sizes, over, even_left_out=bool(over))
        if not over and (found is None or isinstance(found.found, Shortage)):
            return self._plan(folder, sizes, over, even_left_out=True)
        return found

    def _plan(
        self, folder: ModelFolder, files: ModelSizes, over: Sequence[str], *, even_left_out: bool
    ) -> GroupPlan | None:
        known = self._candidates(folder, files, over, even_left_out=even_left_out)
        if known is None:
            return None

        def cut(known: _Candidates) -> GroupCut | Shortage:
            return cut_with_fetchers(
                known.size,
                known.here,
                known.having,
                known.fetchers,
                least_tokens=min(limits.GROUP_LEAST_TOKENS, folder.context_tokens),
                most_tokens=limits.GROUP_STREAM_CONTEXTS * folder.context_tokens,
                every=bool(over),
            )

        # What layers took in an earlier group says more than what whole models took there: first of all,
        # which machines are the best ones.
        if known.here.node_id in (layer_s := self._layer_times.known(known.digest)):
            best = cut(known.as_measured(layer_s))
            if isinstance(best, GroupCut):
                known = known.among({part.machine.node_id for part in best.parts})
        planned = GroupPlan(
            cut(known),
            known.digest,
            known.size,
            known.hops_s,
            named=bool(over),
            hub=files.listing.at if files.listing is not None else None,
        )
        return self._cut_anew(folder, planned) or planned

    def _candidates(
        self, folder: ModelFolder, files: ModelSizes, over: Sequence[str], *, even_left_out: bool
    ) -> _Candidates | None:
        """None if there are no others to ask. Raises as ``plan``."""
        here, listing = self._members.here(), files.listing
        own = _in_part(folder, files, listing) if listing is not None else here.model(folder.name)
        if own is None or not own.digest:
            if over:
                raise NoMachine(
                    f"This machine does not know yet which files its {folder.name} is made of.",
                    hint="Send it again once they are hashed (fleetctl models).",
                )
            return None
        having, lacking = self._others(own, over, even_left_out=even_left_out)
        if not having and not lacking:
            return None
        try:
            sizes, bare = files.each_layer(files.need.arithmetic), files.each_layer("")
        except (ModelCorrupt, ModelUnsupported):
            if over:
                raise
            return None
        speeds = decode_tok_s([(here, own), *having, *lacking])

        def machine(member: Member) -> GroupMachine:
            return _other(member, speeds[member.node_id], sizes, bare)

        largest, from_hub = max(bare.layers), listing is not None
        at_home = _machine(here, speeds[here.node_id], sizes, self._rules().budget_bytes)
        if from_hub:
            most = most_layers(here, largest, from_hub=True, besides=bare.outside)
            at_home = replace(at_home, can_fetch=most + files.layers_here)
        width = own.shape.hidden_bytes or 2 * int(folder.config.get("hidden_size") or 0)
        layers = len(sizes.layers)
        load_s = {member.node_id: expected_load_s(model) / layers for member, model in [(here, own), *having]}
        for member, _ in lacking:
            fetch_s = largest / member.bytes_per_s if member.bytes_per_s else math.inf
            load_s[member.node_id] = expected_load_s(own) / layers + fetch_s
        return _Candidates(
            GroupModelSize(layers, sizes.outside, sizes.row, sizes.together),
            at_home,
            [machine(member) for member, _ in having],
            [
                replace(machine(member), can_fetch=most_layers(member, largest, from_hub=from_hub))
                for member, _ in lacking
            ],
            {member.node_id: _hop_s(member, width) for member, _ in [*having, *lacking]},
            load_s,
            own.digest,
        )

    def _others(
        self, own: ModelCard, over: Sequence[str], *, even_left_out: bool
    ) -> tuple[_Machines, _Machines]:
        """The other machines that could hold a part: those with the files, and those that can fetch layers.

        Raises NoMachine as ``plan``.
        """
        named = [each for each in self._members.others("prefill") if not over or each.name in over]
        lacking = fetchers(named, own, even_left_out=even_left_out)
        can_fetch = {member.node_id for member, _ in lacking}
        having: _Machines = []
        for member in named:
            model = whole_model(member, own)
            digest = model.digest if model is not None else own.digest
            refusal = eligible(member, digest, even_left_out=even_left_out)
            if refusal is None and model is not None:
                having.append((member, model))
            elif over and refusal is not None and member.node_id not in can_fetch:
                hint = hint_for(refusal.code, member.name, own.name)
                raise NoMachine(refusal.sentence, hint=hint, param="placement")
        if missing := set(over) - {member.name for member, _ in [*having, *lacking]}:
            raise NoMachine(f"{sorted(missing)[0]} has left the fleet.", param="placement")
        return having, lacking


def _node_ids(planned: GroupPlan) -> set[str]:
    """The machines that hold parts."""
    if isinstance(planned.found, Shortage):
        return set()
    return {part.machine.node_id for part in planned.found.parts}


def _in_part(folder: ModelFolder, sizes: ModelSizes, listing: HubListing) -> ModelCard:
    """A model that is here in part, as a card would have it if it were here."""
    shape = replace(folder.shape, cpu_arithmetic=sizes.need.arithmetic)
    return ModelCard(folder.name, listing.digest, listing.at.commit, "part", shape=shape)


def _no_room(model: str, found: Shortage, over: Sequence[str]) -> FleetError:
    missing = f"{found.missing_bytes / 1e9:.1f} GB are missing"
    if not over:
        return OutOfMemory(
            f"{model} does not fit this machine, and with the others {missing}.",
            hint="Unload models there (fleetctl peers), or choose a smaller one (fleetctl models).",
        )
    names = ", ".join(machine.name for machine in found.cramped)
    cramped = f" {names} has no room for a single layer." if names else ""
    return OutOfMemory(
        f"{model} does not fit the machines that were named: {missing}.{cramped}",
        hint="Unload models there (fleetctl peers), or name others.",
    )


def _machine(member: Member, tok_s: float, sizes: LayerBytes, room_bytes: int) -> GroupMachine:
    """``tok_s``: tokens of an answer per second with the whole model; ``sizes``: as that machine holds it."""
    bytes_per_s = tok_s * (sum(sizes.layers) + sizes.outside)
    return GroupMachine(member.node_id, member.name, room_bytes, bytes_per_s, max(sizes.layers))


def _other(member: Member, tok_s: float, sizes: LayerBytes, bare: LayerBytes) -> GroupMachine:
    """``sizes``: of layers on a CPU, ``bare``: as they are in the files, which a GPU holds."""
    on_cpu = member.card.machine.accelerator == "cpu"
    room = max(0, member.card.usable_bytes - WORKING_BYTES)
    return _machine(member, tok_s, sizes if on_cpu else bare, room)


def _hop_s(member: Member, hidden_bytes: int) -> float:
    """What one hidden state takes to a machine and back, by its measured link."""
    return member.rtt_s + (2 * hidden_bytes / member.bytes_per_s if member.bytes_per_s else 0.0)
