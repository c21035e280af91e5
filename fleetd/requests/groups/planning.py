"""Which machines hold a model that does not fit this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelUnsupported, OutOfMemory
from fleetd.models.cpu_arithmetic import CpuArithmetic
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes, layer_bytes
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, Shortage, cut_with_fetchers
from fleetd.requests.groups.client import FleetGroup
from fleetd.requests.groups.machine_speeds import decode_tok_s
from fleetd.requests.groups.part_fetchers import fetchers, most_layers
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.ports import FleetPort

Arithmetic = CpuArithmetic | Literal[""]


class GroupPlan(msgspec.Struct, frozen=True):
    """A cut, or why there is none; and the digest of the files that it is for."""

    found: GroupCut | Shortage
    digest: str


class FleetGroups:
    """Args:
    room_bytes: what models may take of this machine's memory, all but what runs unloaded.
    """

    def __init__(self, partners: FleetPort, members: Members, room_bytes: Callable[[], int]) -> None:
        self._partners, self._members, self._room_bytes = partners, members, room_bytes

    def __call__(self, folder: ModelFolder, arithmetic: Arithmetic) -> FleetGroup | None:
        """The machines that hold a model with this one; None if there are no others to ask.

        Raises OutOfMemory if they do not have the memory for it.
        """
        planned = self.plan(folder, arithmetic)
        if planned is None:
            return None
        if isinstance(planned.found, Shortage):
            missing = planned.found.missing_bytes / 1e9
            raise OutOfMemory(
                f"{folder.name} does not fit this machine, and with the others {missing:.1f} GB are missing.",
                hint="Unload models there (fleetctl peers), or choose a smaller one (fleetctl models).",
            )
        return FleetGroup(self._partners, folder.name, planned.digest, planned.found)

    def plan(self, folder: ModelFolder, arithmetic: Arithmetic) -> GroupPlan | None:
        """The cut that a group would have; None if there are no others to ask. Nothing is begun."""
        own = self._members.here().model(folder.name)
        if own is None or not own.digest:
            return None
        others = self._members.others("prefill")
        having = [
            (member, model)
            for member in others
            if eligible(member, own.digest) is None and (model := member.model_with(own.digest)) is not None
        ]
        lacking = fetchers(others, own)
        if not having and not lacking:
            return None
        try:
            sizes = layer_bytes(folder.path, folder.config, arithmetic)
            bare = layer_bytes(folder.path, folder.config, "")
        except (ModelCorrupt, ModelUnsupported, OSError):
            return None
        here = self._members.here()
        speeds = decode_tok_s([(here, own), *having, *lacking])

        def machine(member: Member) -> GroupMachine:
            return _machine(member, speeds[member.node_id], sizes, bare)

        found = cut_with_fetchers(
            GroupModelSize(len(sizes.layers), sizes.outside, sizes.row),
            GroupMachine(
                here.node_id,
                here.name,
                self._room_bytes(),
                speeds[here.node_id],
                max(sizes.layers),
            ),
            [machine(member) for member, _ in having],
            [
                replace(machine(member), can_fetch=most_layers(member, max(bare.layers)))
                for member, _ in lacking
            ],
            least_tokens=min(limits.GROUP_LEAST_TOKENS, folder.context_tokens),
            most_tokens=limits.GROUP_STREAM_CONTEXTS * folder.context_tokens,
        )
        return GroupPlan(found, own.digest)


def _machine(member: Member, speed: float, sizes: LayerBytes, bare: LayerBytes) -> GroupMachine:
    """``sizes``: of layers on a CPU, ``bare``: as they are in the files, which a GPU holds."""
    on_cpu = member.card.machine.accelerator == "cpu"
    layer = max((sizes if on_cpu else bare).layers)
    room = max(0, member.card.usable_bytes - WORKING_BYTES)
    return GroupMachine(member.node_id, member.name, room, speed, layer)
