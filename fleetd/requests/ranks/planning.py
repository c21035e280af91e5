"""Which machines divide the layers of a model, and for how many tokens they have room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from fleetd import limits
from fleetd.errors import ModelUnsupported, NoMachine, OutOfMemory
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, LayerBytes
from fleetd.models.model_sizes import ModelSizes
from fleetd.plan.ranks import undividable
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.members.named_machines import hint_for
from fleetd.requests.ports import FleetPort
from fleetd.requests.promised_memory import OwnPromise
from fleetd.requests.ranks.client import FleetRanks, RankMachine
from fleetd.requests.ranks.fabrics import Fabrics
from fleetd.requests.ranks.prices import MeasuredSums
from fleetd.requests.ranks.rank_memory import Promise, arithmetic, rank_bytes


class PlannedRanks(msgspec.Struct, frozen=True):
    """``others``: the machines of the other ranks. ``tokens``: whose keys and values have room on each
    machine. ``room_bytes``: of this machine, for its rank."""

    digest: str
    others: tuple[Member, ...]
    tokens: int
    room_bytes: int
    on_cpu: bool


class RankPlanner:
    """Args:
    free_bytes: of this machine, with all other models unloaded.
    sums: is told what rings measure.
    fabrics: what this machine offers to carry sums with; None: sealed tunnels.
    """

    def __init__(
        self,
        partners: FleetPort,
        members: Members,
        promise: Promise,
        free_bytes: Callable[[], int],
        sums: MeasuredSums | None = None,
        fabrics: Fabrics | None = None,
    ) -> None:
        self._fabrics = fabrics
        self._partners, self._members = partners, members
        self._promise, self._free_bytes = promise, free_bytes
        self._sums = sums or MeasuredSums()

    def __call__(self, folder: ModelFolder, over: Sequence[str], sizes: ModelSizes) -> FleetRanks:
        """This machine and those ``over``, by name. ``sizes``: of the model, with its layers.

        Raises ModelUnsupported if such a model is not divided by so many, NoMachine if one of them cannot
        help, OutOfMemory if one has not the room.
        """
        size = 1 + len(over)
        found = self.check(folder, over, sizes)
        whole = sizes.each_layer(arithmetic(on_cpu=found.on_cpu))
        n_bytes = rank_bytes(whole, size, found.tokens)
        return FleetRanks(
            self._partners,
            folder.name,
            found.digest,
            [RankMachine(other.node_id, other.name) for other in found.others],
            len(whole.layers),
            found.tokens,
            OwnPromise(
                partial(self._promise, f"Rank 0 of {size} of {folder.name}", n_bytes, found.room_bytes)
            ),
            partial(self._sums.took, [other.name for other in found.others]),
            self._fabrics,
        )

    def check(self, folder: ModelFolder, over: Sequence[str], sizes: ModelSizes) -> PlannedRanks:
        """The machines and the room that they have. Nothing is begun. Raises as a call."""
        size = 1 + len(over)
        if why := undividable(folder.config, size):
            hint = "Deal its layers out instead: --split layers."
            raise ModelUnsupported(why, hint=hint, param="split")
        here = self._members.here()
        own = here.model(folder.name)
        if own is None or not own.digest:
            raise NoMachine(
                f"This machine does not know yet which files its {folder.name} is made of.",
                hint="Send it again once they are hashed (fleetctl models).",
            )
        others = [self._able(name, own.digest, folder.name) for name in over]
        room = self._free_bytes()
        rooms = {"This machine": (room, here)} | {
            other.name: (other.card.usable_bytes - WORKING_BYTES, other) for other in others
        }
        tokens = min(
            _tokens(
                folder,
                sizes.each_layer(arithmetic(on_cpu=member.card.machine.accelerator == "cpu")),
                size,
                each,
                name,
            )
            for name, (each, member) in rooms.items()
        )
        on_cpu = here.card.machine.accelerator == "cpu"
        return PlannedRanks(own.digest, tuple(others), tokens, room, on_cpu)

    def _able(self, name: str, digest: str, model: str) -> Member:
        found = [each for each in self._members.others("prefill") if each.name == name]
        if not found:
            raise NoMachine(f"{name} has left the fleet.", param="placement")
        if (refusal := eligible(found[0], digest, even_left_out=True)) is not None:
            hint = hint_for(refusal.code, name, model)
            raise NoMachine(refusal.sentence, hint=hint, param="placement")
        return found[0]


def _tokens(folder: ModelFolder, found: LayerBytes, size: int, room_bytes: int, name: str) -> int:
    """Tokens whose keys and values have room beside the weights of a rank. ``found``: of whole layers. Raises
    OutOfMemory."""
    weights = rank_bytes(found, size, 0)
    each = max(1, len(found.layers) * found.row // size)
    tokens = int(limits.RANK_ROWS_SHARE * (room_bytes - weights)) // each
    least = min(limits.GROUP_LEAST_TOKENS, folder.context_tokens)
    if tokens < least:
        raise OutOfMemory(
            f"{name} has no room for one of {size} parts of {folder.name}: it takes "
            f"{(weights + least * each) / 1e9:.1f} GB.",
            hint="Unload models there (fleetctl peers), or name more machines.",
        )
    return min(tokens, limits.GROUP_STREAM_CONTEXTS * folder.context_tokens)
