"""What this machine could run: the catalog's models and those of the hub, with where each has room."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from fleetd.config import EngineSettings
from fleetd.control.daemon_status import DaemonStatus
from fleetd.control.fleet_view import PeerView
from fleetd.control.model_listing import FoundModel, FoundModels, ModelFit, OfferedModel
from fleetd.hardware.memory import metal_limit
from fleetd.models import catalog
from fleetd.models.abilities import of_entry
from fleetd.models.catalog import CatalogEntry
from fleetd.models.choosing import Room, fit, in_order, recommended
from fleetd.models.hub_search import HubModel, HubPage
from fleetd.models.memory_need import WeightRules, estimated, estimated_files

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
            status.fleet.name, rules, memory.largest_bytes, memory.usable_bytes + evictable_bytes
        )
        self.others = [_other(peer) for peer in status.fleet.peers if peer.memory_bytes]

    def fit(self, entry: CatalogEntry) -> ModelFit:
        """Where a model of the catalog has room."""
        return fit(lambda rules: estimated(entry, rules).n_bytes, self.here, self.others)

    @property
    def memory_reason(self) -> str:
        """Why models need more memory here than their files have, as a sentence; "" if they do not."""
        rules = self.here.rules
        if rules.accelerator != "cpu":
            return ""
        return _UNPACKED if rules.setting == "float32" or not rules.available else _WIDER


def _other(peer: PeerView) -> Room:
    """Another machine, as it is after an installation: it does not tell what models may take there."""
    limit = metal_limit(peer.memory_bytes, 0) if peer.accelerator == "metal" else peer.memory_bytes
    most = int(limit * EngineSettings().memory_fraction)
    return Room(peer.name, WeightRules(peer.accelerator, "auto", True, most), most)


def offered(installed: Set[str], rooms: Rooms) -> list[OfferedModel]:
    """The catalog in the order in which people look at it."""
    entries = catalog.entries()
    needs = {entry.name: estimated(entry, rooms.here.rules).n_bytes for entry in entries}
    fits = {entry.name: rooms.fit(entry) for entry in entries}
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
            served=entry.served,
            tools=of_entry(entry).shown_tools,
            thinking=entry.thinking,
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
        fit=fit(need, rooms.here, rooms.others) if known else ModelFit(),
        downloads=model.downloads,
        gated=model.gated,
        installed=model.hub_id in installed,
    )
