"""Which workers a model gets: one with all of it or some of its layers, the front of a group, or a rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from fleetd.control.model_facts import KvBits
from fleetd.engine.cpu import address_space
from fleetd.engine.daemon_side.group_front import GroupFront, GroupLife
from fleetd.engine.daemon_side.model_table import ModelTable
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.wanted_layers import WantedLayers
from fleetd.engine.settings import WorkerOptions, WorkerSettings
from fleetd.errors import ModelUnsupported, NoMachine
from fleetd.models import cpu_arithmetic, file_threads, model_sizes
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WeightRules, weight_need
from fleetd.models.model_sizes import ModelSizes
from fleetd.plan import chip_speeds, load_times

log = structlog.get_logger(__name__)

_ANY_BYTES = 1 << 50


async def no_drafter(folder: ModelFolder) -> Path | None:
    """None for any model."""
    return None


@dataclass
class WorkerMaker:
    """Makes workers, and starts none."""

    options: WorkerOptions = field(default_factory=WorkerOptions)
    # Where a folder's recorded checksums are (``ModelStore.record_path``).
    record_path: Callable[[ModelFolder], Path | None] = lambda folder: None
    # What decides how loads hold weights; without a daemon, on a CPU with memory for any model.
    weight_rules: Callable[[], WeightRules] = lambda: WeightRules(
        "cpu", available=cpu_arithmetic.installed(), budget_bytes=_ANY_BYTES
    )
    # About how many seconds a load of a model takes here.
    load_s: Callable[[ModelFolder], float] = lambda folder: chip_speeds.load_s(folder.weights_bytes)
    # The other machines for a model that does not fit this one, given its sizes and the names of those that
    # were asked for; None: none.
    groups: Callable[[ModelFolder, ModelSizes, Sequence[str]], GroupLife | None] = (
        lambda folder, sizes, over: None
    )
    # The same for a model whose layers are divided: the other ranks. Raises FleetError if it cannot be.
    ranks: Callable[[ModelFolder, Sequence[str], ModelSizes], GroupLife] | None = None
    # The folder of what drafts from a model's hidden states; None: what lies in its own folder, if anything.
    drafter: Callable[[ModelFolder], Awaitable[Path | None]] = no_drafter
    # In how many bits a model's keys and values are held, by its name; 0 is as they are computed.
    kv_bits: Callable[[str], KvBits] = lambda name: 0

    def takes_others(self, folder: ModelFolder) -> bool:
        """True if a load of the model would need other machines. Reads headers of files."""
        if folder.source == "part":
            return True
        rules = self.weight_rules()
        need = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
        return need.n_bytes > rules.budget_bytes

    async def sizes(self, wanted: WantedLayers) -> ModelSizes:
        """What a model's files say; of its layers only if other machines may hold some."""
        rules, other_machines = self.weight_rules(), bool(wanted.over)
        return await file_threads.look(model_sizes.read, wanted.folder, rules, layers=other_machines)

    def workers(
        self, wanted: WantedLayers, drafter: Path | None, sizes: ModelSizes, table: ModelTable
    ) -> Sequence[EngineProcess]:
        """What is to compute it, not started: one worker. ``drafter``: the folder of what drafts from its
        hidden states. ``sizes``: as its files have just told. ``table``: what is loaded beside it."""
        folder, need = wanted.folder, sizes.need
        rules = self.weight_rules()
        if need.arithmetic == "float32" and not rules.available:
            log.info("engine.float32", model=folder.name, reason="onnxruntime is not installed")
        settings = self._settings(wanted, drafter, table.held_bytes)
        options: dict[str, Any] = {
            "weights_bytes": need.n_bytes,
            "load_within_s": load_times.stall_s(self.load_s(folder)),
            "is_bounded": address_space.is_bounded(rules.accelerator),
            "restarts": table.deaths.get(wanted.name, 0),
            "on_work": table.end_idle_time,
            "on_reading": table.tell_of_prompts,
        }
        if wanted.split == "tensors" and wanted.over and self.ranks is not None:
            if folder.source == "part":
                raise ModelUnsupported(
                    f"{folder.name} is here in part, and machines that divide every layer need all files.",
                    hint="Deal its layers out (--split layers), or get all of it: "
                    f"fleetctl models pull {folder.name}",
                )
            ring = self.ranks(folder, sorted(wanted.over), sizes)
            options["weights_bytes"] //= 1 + len(wanted.over)
            return [GroupFront(self._settings(wanted, None, table.held_bytes), ring, **options)]
        if wanted.ring is not None:
            options["weights_bytes"] //= wanted.ring.size
        whole = not (wanted.last or wanted.ring)
        too_large = whole and (need.n_bytes > rules.budget_bytes or folder.source == "part")
        group = None
        if wanted.over or (wanted.over is None and too_large):
            group = self.groups(folder, sizes, sorted(wanted.over or ()))
        if group is not None:
            return [GroupFront(settings, group, **options)]
        if whole and folder.source == "part":
            raise NoMachine(
                f"{folder.name} is here in part, and there are no other machines that may hold the rest.",
                hint=f"Get all of it: fleetctl models pull {folder.name}",
            )
        return [EngineProcess(settings, **options)]

    def _settings(self, wanted: WantedLayers, drafter: Path | None, held_bytes: int) -> WorkerSettings:
        folder = wanted.folder
        record = self.record_path(folder)
        return WorkerSettings(
            name=wanted.name,
            path=str(folder.path),
            record=str(record) if record else "",
            drafter=str(drafter) if drafter else "",
            first_layer=wanted.first,
            last_layer=wanted.last,
            part_of=folder.name if wanted.last or wanted.ring else "",
            purpose=folder.purpose,
            held_bytes=held_bytes,
            ring=wanted.ring,
            # Layers for others hold rows as those who ask for them do.
            kv_bits=self.kv_bits(wanted.name),
            **{name: getattr(self.options, name) for name in WorkerOptions.__struct_fields__},
        )
