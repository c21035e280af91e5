"""This machine's own card: what it is, which models it has, how busy it is; sent when it changes.

The models folder is read rarely and in a thread. A model's first digest may take minutes of reading, so
digests are computed one at a time in the background, and the card goes out without them until then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import EngineStatus, HardwareReading, MemoryBudget, RequestCounts
from fleetd.control.model_facts import KvBits, MeasuredSpeed, ModelShape, WireBits, two_digits
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.errors import FleetError
from fleetd.limits import MIB
from fleetd.models import file_threads
from fleetd.models.catalog import find
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, CpuSizes, WeightRules, cpu_sizes_of, sizes_by_config
from fleetd.models.model_store import ModelStore
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.plan.load_times import LoadTimes
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.process.observe import get_logger
from fleetd.process.periodic import keep_running

log = get_logger("fleetd.fleet.own_card")

# How often the models folder is read, and how often the card is compared with the last one sent.
_LISTING_S, _LOOK_S = 15.0, 0.25
# Free memory changes all the time; a smaller change than this is not sent.
_MEMORY_STEP_BYTES = 256 * MIB
# What is left of prompts changes with every chunk; it is sent in steps, rounded up.
_UNREAD_STEP = 1024


class _FailedDigest(msgspec.Struct, frozen=True):
    """``again_s``: when it is tried again, ``pause_s`` after the failure; monotonic seconds."""

    reason: str
    pause_s: float
    again_s: float


# Of a folder: its path, when it was made, and its size.
_Key = tuple[str, float, int]


class Readings(msgspec.Struct, frozen=True):
    """What a card tells of this moment; all are asked anew for each card."""

    machine: Callable[[], HardwareReading]
    # What models may take of a machine, with so many bytes free.
    budget: Callable[[HardwareReading, int], MemoryBudget]
    engines: Callable[[], Sequence[EngineStatus]]
    counts: Callable[[], RequestCounts]
    # Of the prompts of running requests, the tokens that are not prefilled yet.
    unread_tokens: Callable[[], int]
    draining: Callable[[], bool]
    # What may carry the sums of ranks besides a sealed ring.
    collectives: Callable[[], list[str]] = list
    # What decides how that machine holds weights.
    weight_rules: Callable[[HardwareReading], WeightRules] = lambda machine: WeightRules(machine.accelerator)
    # In how many bits a load would hold a model's keys and values, by its name.
    kv_bits: Callable[[str], KvBits] = lambda name: 0
    # In how many bits helpers may send this machine keys and values.
    wire_bits: WireBits = 0


class CardMaker:
    """Args:
    bare: what stays the same while the daemon runs.
    speeds: learns what the engines have measured.
    load_times: learns what loads take.
    publish: sends a new card to all peers; None without a fleet, and then no file is hashed for it.
    """

    def __init__(
        self,
        bare: Card,
        models: ModelStore,
        readings: Readings,
        *,
        speeds: ModelSpeeds,
        load_times: LoadTimes | None = None,
        profiles: ProfileStore | None = None,
        publish: Callable[[Card], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bare, self._models, self._now = bare, models, readings
        self._publish = publish
        self._speeds = speeds
        self._profiles = profiles or ProfileStore()
        # Model → whether it can score, as its last worker or a stored profile says.
        self._scoring: dict[str, str] = {}
        # Model → what its profile finds.
        self._recall: dict[str, float] = {}
        self._monotonic = monotonic
        # Worker → its process id and the speed that is recorded already.
        self._seeded: dict[str, tuple[int | None, MeasuredSpeed]] = {}
        # Model → what its last worker here told: the next one will tell the same. A worker with some layers
        # tells the precision alone.
        self._shapes: dict[str, ModelShape] = {}
        self._arithmetic: dict[str, str] = {}
        self._load_times = load_times or LoadTimes()
        self._installed: list[ModelFolder] = []
        self._on_cpu: dict[_Key, CpuSizes] = {}
        self._digests: dict[_Key, str] = {}
        self._undigested: dict[_Key, _FailedDigest] = {}
        self._sequence = 0
        self._available_bytes = 0
        self._part_bytes = 0
        self._look = asyncio.Event()

    def card(self) -> Card:
        """The card as of now; ``sequence`` is that of the last card sent."""
        machine = self._now.machine()
        # The figure stays the same until it has moved by a step: the page cache changes it all the time.
        if abs(machine.model_available_bytes - self._available_bytes) >= _MEMORY_STEP_BYTES:
            self._available_bytes = machine.model_available_bytes
        engines = {engine.model: engine for engine in self._now.engines()}
        idle = [engine for engine in engines.values() if engine.evictable]
        parts = _parts(engines.values())
        self._seed(engines.values())
        counts, rules = self._now.counts(), self._now.weight_rules(machine)
        return replace(
            self._bare,
            sequence=self._sequence,
            machine=facts(machine),
            models=[
                self._model(folder, rules, engines.get(folder.name), parts.get(folder.name))
                for folder in self._installed
            ],
            available_bytes=self._available_bytes,
            usable_bytes=self._now.budget(machine, self._available_bytes).usable_bytes,
            evictable_bytes=sum(e.memory_bytes for e in idle),
            # Parts of other machines' prompts take turns with this machine's own requests.
            running=counts.running + sum(engine.assisting for engine in engines.values()),
            waiting=counts.waiting,
            vectors=sum(
                engine.prefilling + engine.waiting
                for engine in engines.values()
                if engine.shape.purpose != "chat"
            ),
            unread_tokens=-(-self._now.unread_tokens() // _UNREAD_STEP) * _UNREAD_STEP,
            draining=self._now.draining(),
            collectives=self._now.collectives(),
            rank_cores=sum(engine.ranks > 0 and engine.state == "ready" for engine in engines.values()),
            load=_load(machine.cores),
            part_bytes=self._part_bytes,
        )

    def changed(self) -> None:
        """Read the models folder again: models came or went."""
        self._look.set()

    async def run(self) -> None:
        """Send the first card at once, then one at each change, and after each CARD_REPEAT_S without one."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_running("list models", self._list_models), name="list models")
            # Also without a fleet: what a load finds out, and prompts on the disk, are kept by digest.
            group.create_task(keep_running("find digests", self._find_digests), name="find digests")
            sent, sent_at = None, 0.0
            loop = asyncio.get_running_loop()
            while True:
                card = self.card()
                if sent is None or card != sent or loop.time() - sent_at >= limits.CARD_REPEAT_S:
                    self._sequence += 1
                    sent, sent_at = replace(card, sequence=self._sequence), loop.time()
                    if self._publish is not None:
                        self._publish(sent)
                await asyncio.sleep(_LOOK_S)

    async def _list_models(self) -> None:
        while True:
            self._look.clear()
            try:
                for_cpu = self._now.machine().accelerator == "cpu"
                installed, on_cpu, known = await file_threads.look(self._listed, for_cpu)
                self._installed, self._on_cpu = installed, on_cpu
                self._digests |= known
            except (FleetError, OSError) as error:
                log.warning("card.models_unreadable", error=str(error))
            try:
                async with asyncio.timeout(_LISTING_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    def _cpu_sizes(self, folder: ModelFolder) -> CpuSizes:
        known = self._on_cpu.get(_key(folder))
        return known or sizes_by_config(folder.weights_bytes, folder.config)

    def _listed(self, for_cpu: bool) -> tuple[list[ModelFolder], dict[_Key, CpuSizes], dict[_Key, str]]:
        """The models, what they take on a CPU, and the digests that take no hashing: a request right after a
        start needs its own."""
        folders = list(self._models.installed())
        on_cpu = {
            _key(folder): cpu_sizes_of(folder.path, folder.weights_bytes, folder.config)
            for folder in (folders if for_cpu else ())
        }
        self._part_bytes = self._models.part_bytes() // limits.GIB * limits.GIB
        new = [folder for folder in folders if _key(folder) not in self._digests]
        known = {_key(folder): self._known_digest(folder) for folder in new}
        return folders, on_cpu, {key: digest for key, digest in known.items() if digest}

    def _known_digest(self, folder: ModelFolder) -> str:
        """Its digest; "" if it has to be hashed, or has just been removed."""
        try:
            return self._scored(folder, self._models.known_digest(folder))
        except (FleetError, OSError):
            return ""

    @property
    def undigested(self) -> dict[str, str]:
        """Models whose files could not be hashed when that was tried last, and why."""
        return {
            folder.name: failed.reason
            for folder in self._installed
            if (failed := self._undigested.get(_key(folder))) is not None
        }

    async def _find_digests(self) -> None:
        while True:
            for folder in list(self._installed):
                await self._find_digest(folder)
            await asyncio.sleep(_LOOK_S)

    async def _find_digest(self, folder: ModelFolder) -> None:
        """Hash its files unless they are hashed, or could not be a short while ago."""
        key = _key(folder)
        failed = self._undigested.get(key)
        if key in self._digests or (failed is not None and self._monotonic() < failed.again_s):
            return
        try:
            self._digests[key] = await file_threads.read_whole(self._digest, folder)
        # Whatever is wrong with one model's files keeps no other from being hashed.
        except Exception as error:
            self._no_digest(folder, error)
        else:
            self._undigested.pop(key, None)

    def _no_digest(self, folder: ModelFolder, error: Exception) -> None:
        before = self._undigested.get(_key(folder))
        pause_s = min(limits.DIGEST_AGAIN_MOST_S, 2 * before.pause_s) if before else limits.DIGEST_AGAIN_S
        reason = str(error) or type(error).__name__
        log.warning("card.no_digest", model=folder.name, error=reason, again_in_s=pause_s)
        self._undigested[_key(folder)] = _FailedDigest(reason, pause_s, self._monotonic() + pause_s)

    def _digest(self, folder: ModelFolder) -> str:
        """Its digest. Reads files."""
        return self._scored(folder, str(self._models.digest(folder)))

    def _scored(self, folder: ModelFolder, digest: str) -> str:
        """Take over whether a profile is known under its digest, which is returned. Reads files."""
        if digest and (profile := self._profiles.find(digest)) is not None:
            self._scoring.setdefault(folder.name, "ready" if profile.heads else "unable")
            self._recall[folder.name] = profile.recall
        return digest

    def _seed(self, engines: Iterable[EngineStatus]) -> None:
        """Record what the engines have measured since they were looked at last."""
        for engine in engines:
            # What several machines measure of a model that they hold together, none does alone.
            if engine.state != "ready" or engine.ranks or engine.members:
                continue
            if not engine.part_of:
                self._scoring[engine.model] = engine.scoring
            before = self._seeded.get(engine.model)
            if before != (engine.pid, engine.speed):
                self._seeded[engine.model] = engine.pid, engine.speed
                # Measured again, it is the same load.
                self._measured(engine, new_load=before is None or before[0] != engine.pid)

    def _measured(self, engine: EngineStatus, *, new_load: bool) -> None:
        name, speed = engine.part_of or engine.model, engine.speed
        if engine.part_of:
            # Some layers decode nothing, and their fingerprint is not that of the whole model.
            speed = replace(speed, decode_tok_s=self._speeds.of(name).decode_tok_s)
            known = self._shapes.get(name, ModelShape())
            self._shapes[name] = replace(
                known,
                dtype=engine.shape.dtype,
                cpu_arithmetic=engine.shape.cpu_arithmetic,
                wire_token_bytes=known.wire_token_bytes or engine.shape.wire_token_bytes,
            )
        else:
            if new_load:
                stages = [(step.name, step.seconds) for step in engine.load_steps]
                on_disk = (found.weights_bytes for found in self._installed if found.name == name)
                self._load_times.took(name, next(on_disk, engine.shape.weights_bytes), stages)
            self._shapes[name], self._arithmetic[name] = engine.shape, engine.arithmetic
        self._speeds.seed(name, speed, now_s=self._monotonic())

    def _model(
        self, folder: ModelFolder, rules: WeightRules, engine: EngineStatus | None, part: EngineStatus | None
    ) -> ModelCard:
        entry, files = find(folder.name), folder.shape
        # Of its files, which are read on another thread.
        need = rules.need(folder.weights_bytes, folder.config, lambda: self._cpu_sizes(folder))
        known = self._shapes.get(folder.name) or replace(files, kv_bits=self._now.kv_bits(folder.name))
        state = {"ready": "loaded", "loading": "loading"}.get(engine.state if engine else "", "installed")
        helping = part if part is not None and state == "installed" else None
        holder = engine if state == "loaded" else helping
        return ModelCard(
            name=folder.name,
            digest=self._digests.get(_key(folder), ""),
            revision=folder.revision,
            source=folder.source,
            roles=list(entry.roles) if entry is not None else [folder.purpose],
            memory_bytes=need.n_bytes + WORKING_BYTES,
            state=state,  # type: ignore[arg-type]  # the values of the mapping above
            # A worker's weights may take more in memory than in the files, which are the same everywhere.
            shape=replace(
                known,
                architecture=files.architecture,
                weights_bytes=files.weights_bytes,
                context_tokens=files.context_tokens,
                # A load that is still to come will choose it.
                cpu_arithmetic=known.cpu_arithmetic or need.arithmetic,
                wire_bits=self._now.wire_bits,
            ),
            speed=self._speeds.of(folder.name).rounded(),
            kv_budget_bytes=holder.kv_budget_bytes if holder is not None else 0,
            prefix_budget_bytes=holder.prefix_budget_bytes if holder is not None else 0,
            part_first=helping.first_layer if helping is not None else 0,
            part_last=helping.last_layer if helping is not None else 0,
            part_total=helping.shape.layers if helping is not None else 0,
            part_asked_by=", ".join(helping.asked_by)[: limits.CARD_TEXT_CHARS]
            if helping is not None
            else "",
            arithmetic=self._arithmetic.get(folder.name, ""),
            scoring=self._scoring.get(folder.name, ""),
            scoring_recall=self._recall.get(folder.name, 0.0),
            exactness=engine.speculation[: limits.CARD_TEXT_CHARS] if engine and state == "loaded" else "",
            load_s=two_digits(self._load_times.seconds(folder.name, folder.weights_bytes)),
        )


def _load(cores: int) -> int:
    """Programs that want to run, per core; 0 if the system does not say."""
    try:
        return round(os.getloadavg()[0] / max(1, cores))
    except OSError:
        return 0


def facts(machine: HardwareReading) -> MachineFacts:
    """The part of a reading that stays the same."""
    return MachineFacts(
        platform=machine.platform,
        product=machine.product,
        chip=machine.gpu or machine.cpu,
        cores=machine.cores,
        memory_bytes=machine.model_memory_bytes,
        tier=machine.tier,
        accelerator=machine.accelerator,
    )


def _parts(engines: Iterable[EngineStatus]) -> dict[str, EngineStatus]:
    """The worker with most of a model's layers, among workers that have only some, for each model."""
    ready = [each for each in engines if each.part_of and each.state == "ready" and not each.ranks]
    return {e.part_of: e for e in sorted(ready, key=lambda e: e.last_layer - e.first_layer)}


def _key(folder: ModelFolder) -> _Key:
    return str(folder.path), folder.created_s, folder.weights_bytes
