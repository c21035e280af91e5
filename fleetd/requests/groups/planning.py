"""Which machines hold a model that does not fit this one, or that is to be held by several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.group_view import DividedView, GroupView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.errors import FleetError, Incompatible, ModelCorrupt, ModelUnsupported, NoMachine, OutOfMemory
from fleetd.models.cpu_arithmetic import CpuArithmetic
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes, WeightRules, layer_bytes, weight_need
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, Shortage, cut_with_fetchers
from fleetd.requests.groups.client import FleetGroup
from fleetd.requests.groups.group_views import group_view
from fleetd.requests.groups.machine_speeds import decode_tok_s
from fleetd.requests.groups.part_fetchers import fetchers, most_layers
from fleetd.requests.groups.promised_memory import PromisedMemory
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.members.named_machines import hint_for
from fleetd.requests.ports import FleetPort

Arithmetic = CpuArithmetic | Literal[""]
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

    @property
    def view(self) -> GroupView:
        return group_view(self.found, self.size, self.hops_s, named=self.named)


class FleetGroups:
    """Args:
    rules: how this machine holds weights, with all others unloaded.
    loaded: the measured speed of a model that is loaded over several machines; None if it is not.
    promised: what groups were promised of this machine's memory.
    divided: what it would be like if the machines of a cut divided every layer, given the seconds of a token
        with the cut; None if that is not looked at.
    """

    def __init__(
        self,
        partners: FleetPort,
        members: Members,
        rules: Callable[[], WeightRules],
        loaded: Callable[[ModelFolder], MeasuredSpeed | None] = lambda folder: None,
        promised: PromisedMemory | None = None,
        divided: Callable[[ModelFolder, GroupCut, float], DividedView | None] = lambda *_: None,
    ) -> None:
        self._promised, self._divided = promised or PromisedMemory(), divided
        self._partners, self._members, self._rules, self._loaded = partners, members, rules, loaded
        # By model, the plan of its last group.
        self._formed: dict[str, GroupPlan] = {}

    def __call__(
        self, folder: ModelFolder, arithmetic: Arithmetic, over: Sequence[str] = ()
    ) -> FleetGroup | None:
        """The machines that hold a model with this one; None if there are no others to ask.

        Raises OutOfMemory if they do not have the memory for it, and as ``plan``.
        """
        planned = self.plan(folder, arithmetic, over)
        if planned is None:
            return None
        if isinstance(planned.found, Shortage):
            raise _no_room(folder.name, planned.found, over)
        self._formed[folder.name] = planned
        part, room = planned.found.parts[0], self._rules().budget_bytes
        n_bytes = (part.last - part.first) * (
            part.machine.layer_bytes + planned.found.tokens * planned.size.row_bytes
        )
        own = partial(
            self._promised.promise,
            f"Layers {part.first} to {part.last} of {folder.name}",
            n_bytes + planned.size.outside_bytes,
            room,
        )
        failed = partial(self._left_out, planned.digest)
        return FleetGroup(self._partners, folder.name, planned.digest, planned.found, own, failed)

    def _left_out(self, digest: str, node_id: str, error: FleetError) -> None:
        """A member has failed. What has too little memory for a part is asked last for it, from now on."""
        known = Incompatible(error.message) if isinstance(error, OutOfMemory) else error
        self._members.failed(node_id, "prefill", known, digest)

    def loaded(self, folder: ModelFolder) -> GroupView | None:
        """How machines hold a model together now; None if they do not."""
        speed, planned = self._loaded(folder), self._formed.get(folder.name)
        if speed is None or planned is None:
            return None
        view = planned.view
        tok_s = speed.decode_tok_s or view.tok_s
        return msgspec.structs.replace(view, loaded=True, tok_s=tok_s, prompt_tok_s=speed.prefill_tok_s)

    def planned(self, folder: ModelFolder, over: Sequence[str] = ()) -> GroupView | None:
        """How they would hold it; None if there are no others to ask. Reads headers of files.

        Raises as ``plan``, and OutOfMemory if the machines ``over`` have not the room.
        """
        rules = self._rules()
        need = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
        planned = self.plan(folder, need.arithmetic, over)
        if planned is not None and over and isinstance(planned.found, Shortage):
            raise _no_room(folder.name, planned.found, over)
        if planned is None:
            return None
        view = planned.view
        if isinstance(planned.found, Shortage):
            return view
        return replace(view, divided=self._divided(folder, planned.found, 1 / view.tok_s))

    def plan(self, folder: ModelFolder, arithmetic: Arithmetic, over: Sequence[str] = ()) -> GroupPlan | None:
        """The cut that a group would have; None if there are no others to ask. Nothing is begun.

        A machine that failed a short while ago is asked only if the model does not fit the others.

        Args:
            over: names of the other machines that have to hold a part; none leaves it to the planner.

        Raises NoMachine if one of ``over`` cannot hold a part, ModelUnsupported if such a model is not cut.
        """
        found = self._plan(folder, arithmetic, over, even_left_out=bool(over))
        if not over and (found is None or isinstance(found.found, Shortage)):
            return self._plan(folder, arithmetic, over, even_left_out=True)
        return found

    def _plan(
        self, folder: ModelFolder, arithmetic: Arithmetic, over: Sequence[str], *, even_left_out: bool
    ) -> GroupPlan | None:
        here = self._members.here()
        own = here.model(folder.name)
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
            sizes = layer_bytes(folder.path, folder.config, arithmetic)
            bare = layer_bytes(folder.path, folder.config, "")
        except (ModelCorrupt, ModelUnsupported, OSError):
            if over:
                raise
            return None
        size = GroupModelSize(len(sizes.layers), sizes.outside, sizes.row, sizes.together)
        speeds = decode_tok_s([(here, own), *having, *lacking])

        def machine(member: Member) -> GroupMachine:
            return _other(member, speeds[member.node_id], sizes, bare)

        found = cut_with_fetchers(
            size,
            _machine(here, speeds[here.node_id], sizes, self._rules().budget_bytes),
            [machine(member) for member, _ in having],
            [
                replace(machine(member), can_fetch=most_layers(member, max(bare.layers)))
                for member, _ in lacking
            ],
            least_tokens=min(limits.GROUP_LEAST_TOKENS, folder.context_tokens),
            most_tokens=limits.GROUP_STREAM_CONTEXTS * folder.context_tokens,
            every=bool(over),
        )
        width = own.shape.hidden_bytes or 2 * int(folder.config.get("hidden_size") or 0)
        hops_s = {member.node_id: _hop_s(member, width) for member, _ in [*having, *lacking]}
        return GroupPlan(found, own.digest, size, hops_s, named=bool(over))

    def _others(
        self, own: ModelCard, over: Sequence[str], *, even_left_out: bool
    ) -> tuple[_Machines, _Machines]:
        """The other machines that could hold a part: those with the files, and those that can fetch layers.

        Raises NoMachine as ``plan``.
        """
        named = [each for each in self._members.others("prefill") if not over or each.name in over]
        lacking = fetchers(named, own)
        can_fetch = {member.node_id for member, _ in lacking}
        having: _Machines = []
        for member in named:
            refusal = eligible(member, own.digest, even_left_out=even_left_out)
            model = member.model_with(own.digest)
            if refusal is None and model is not None:
                having.append((member, model))
            elif over and refusal is not None and member.node_id not in can_fetch:
                hint = hint_for(refusal.code, member.name, own.name)
                raise NoMachine(refusal.sentence, hint=hint, param="placement")
        if missing := set(over) - {member.name for member, _ in [*having, *lacking]}:
            raise NoMachine(f"{sorted(missing)[0]} has left the fleet.", param="placement")
        return having, lacking


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
