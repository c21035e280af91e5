"""What this machine could run: models on its disk, of the catalog and of the hub, and where each has room."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

from fleetd import limits
from fleetd.config import EngineSettings
from fleetd.control.daemon_status import DaemonStatus
from fleetd.control.fleet_view import PeerView
from fleetd.control.model_listing import FoundModel, FoundModels, ModelFit, OfferedModel
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.hardware.memory import metal_limit
from fleetd.models import catalog
from fleetd.models.abilities import of_entry
from fleetd.models.catalog import CatalogEntry
from fleetd.models.choosing import Room, fit, in_order, recommended
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_search import HubModel, HubPage
from fleetd.models.memory_need import (
    WORKING_BYTES,
    LayerBytes,
    WeightRules,
    estimated,
    estimated_files,
    even_layer_bytes,
    layer_bytes,
    needed_bytes,
    weight_need,
)
from fleetd.plan import chip_speeds
from fleetd.plan.group_cut import GroupMachine, GroupModelSize, Shortage, cut

_UNPACKED = (
    "On this machine's CPU weights are unpacked to 32 bits: a model needs up to seven times the memory "
    "of its files."
)
_WIDER = "On this machine's CPU weights take about a fourth more memory than their files."


class Rooms:
    """This machine and the others of the fleet as places for models."""

    def __init__(self, status: DaemonStatus, rules: WeightRules, evictable_bytes: int) -> None:
        """``evictable_bytes``: what idle models would give back here."""
        memory = status.memory
        self.here = Room(
            status.fleet.name,
            rules,
            memory.largest_bytes,
            memory.usable_bytes + evictable_bytes,
            bytes_per_s=_bytes_per_s(status.machine.gpu or "", status.machine.accelerator),
        )
        self.others = [_other(peer) for peer in status.fleet.peers if peer.memory_bytes]

    def of_entry(self, entry: CatalogEntry) -> ModelFit:
        """Where a model of the catalog has room."""
        return self.of_size(lambda rules: estimated(entry, rules).n_bytes)

    def of_size(self, need: Callable[[WeightRules], int]) -> ModelFit:
        """Where a model has room that needs so many bytes on a machine that holds weights so."""
        return self._fit(need, lambda rules: even_layer_bytes(need(rules) - WORKING_BYTES))

    def of_folder(self, folder: ModelFolder) -> ModelFit:
        """Where a model of this machine has room. Reads headers of files."""

        def layers(rules: WeightRules) -> LayerBytes:
            need = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
            return layer_bytes(folder.path, folder.config, need.arithmetic)

        return self._fit(partial(needed_bytes, folder), layers)

    def _fit(
        self, need: Callable[[WeightRules], int], layers: Callable[[WeightRules], LayerBytes]
    ) -> ModelFit:
        """On one machine, or on as few as hold it together."""
        found = fit(need, self.here, self.others)
        others = [room for room in self.others if room.sees_prompts]
        if found.where != "none" or not others:
            return found
        try:
            held = layers(self.here.rules)
            machines = [_machine(room, layers(room.rules)) for room in (self.here, *others)]
        except (ModelCorrupt, ModelUnsupported, OSError):
            return found  # it is not cut
        size = GroupModelSize(len(held.layers), held.outside, held.row)
        least = limits.GROUP_LEAST_TOKENS
        together = cut(size, machines[0], machines[1:], least_tokens=least, most_tokens=least)
        if isinstance(together, Shortage):
            return ModelFit("none", [], min(found.short_bytes, together.missing_bytes))
        names = [part.machine.name for part in together.parts[1:]]
        return ModelFit("together", names, found.short_bytes)

    @property
    def memory_reason(self) -> str:
        """Why models need more memory here than their files have, as a sentence; "" if they do not."""
        rules = self.here.rules
        if rules.accelerator != "cpu":
            return ""
        return _UNPACKED if rules.setting == "float32" or not rules.available else _WIDER


def _machine(room: Room, held: LayerBytes) -> GroupMachine:
    """``held``: the model's layers as the machine would hold them."""
    return GroupMachine(
        room.name, room.name, max(0, room.most_bytes - WORKING_BYTES), room.bytes_per_s, max(held.layers)
    )


def _other(peer: PeerView) -> Room:
    """Another machine, as it is after an installation: it does not tell what models may take there."""
    limit = metal_limit(peer.memory_bytes, 0) if peer.accelerator == "metal" else peer.memory_bytes
    most = int(limit * EngineSettings().memory_fraction)
    return Room(
        peer.name,
        WeightRules(peer.accelerator, "auto", True, most),
        most,
        sees_prompts=peer.sees_prompts,
        bytes_per_s=_bytes_per_s(peer.chip, peer.accelerator),
    )


def _bytes_per_s(chip: str, accelerator: str) -> float:
    return chip_speeds.hardware_of(chip, accelerator, 0).decode_tok_s(1)


def offered(installed: Set[str], rooms: Rooms) -> list[OfferedModel]:
    """The catalog in the order in which people look at it."""
    entries = catalog.entries()
    needs = {entry.name: estimated(entry, rooms.here.rules).n_bytes for entry in entries}
    fits = {entry.name: rooms.of_entry(entry) for entry in entries}
    chosen = recommended(entries, needs, rooms.here.most_bytes)
    return [
        OfferedModel(
            name=entry.name,
            aliases=list(entry.aliases),
            hub_id=entry.hub_id,
            roles=list(entry.roles),
            note=entry.note,
            download_bytes=entry.download_bytes,
            memory_bytes=needs[entry.name],
            context_tokens=entry.context_tokens,
            tier=entry.tier,
            installed=entry.name in installed or entry.hub_id in installed,
            fit=fits[entry.name],
            recommended=chosen.get(entry.name, []),
            tools=of_entry(entry).shown_tools,
            thinking=entry.thinking,
            draft=entry.draft,
            head=entry.head,
        )
        for entry in in_order(entries, fits, chosen)
    ]


def found_models(words: str, page: HubPage, installed: Set[str], rooms: Rooms) -> FoundModels:
    """The models of a search: those that load here first, then by downloads."""
    found = [_found(model, installed, rooms) for model in page.models]
    found.sort(key=lambda model: (not model.fit.loads_here, model.files != "mlx", -model.downloads))
    return FoundModels(words, found, page.others)


def _found(model: HubModel, installed: Set[str], rooms: Rooms) -> FoundModel:
    config = {"quantization": {"bits": model.bits}} if model.bits else {}
    need = partial(estimated_files, model.download_bytes, config)
    known = model.download_bytes > 0
    return FoundModel(
        hub_id=model.hub_id,
        files=model.files,
        architecture=model.architecture,
        download_bytes=model.download_bytes,
        memory_bytes=need(rooms.here.rules) if known else 0,
        fit=rooms.of_size(need) if known else ModelFit(),
        downloads=model.downloads,
        gated=model.gated,
        installed=model.hub_id in installed,
    )
