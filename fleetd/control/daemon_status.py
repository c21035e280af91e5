"""The bodies of GET /fleet/v1/status and /fleet/v1/env: the daemon and what it does, and how to reach it.

Sizes are in bytes, times and ages in seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.control.fleet_view import FleetView
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.text.bounded import Count, Share

#: How short the system is of memory, in its own judgement; "" where it does not say.
Pressure = Literal["", "normal", "warning", "critical"]
EngineState = Literal["loading", "ready", "failed", "stopping"]


class HttpAddress(msgspec.Struct, frozen=True):
    host: str = ""
    port: int = 0


class HardwareReading(msgspec.Struct, frozen=True):
    """One reading of the machine; ``available_bytes``, ``pressure`` and ``card_free_bytes`` change by the
    second.

    ``product`` and ``gpu`` are "" where unknown. ``performance_cores``: those of ``cores`` that are of the
    faster kind. ``wired_limit_bytes``: what a Mac's owner lets the GPU have; 0 is the system's choice.
    ``tier``: a name of ``fleetd.models.catalog``. ``accelerator``: metal, cuda or cpu. ``free_unknown``:
    nothing says what is free, and ``available_bytes`` is all memory. ``pressure``: normal, warning or
    critical, as the system judges it; "" where it does not. ``device_limit_bytes``: what the GPU of a Mac may
    hold. ``card_bytes``: memory of a GPU that has its own, where models are then; 0 elsewhere. ``gpus``: how
    many there are, of which one is used.
    """

    platform: str = ""
    hostname: str = ""
    product: str = ""
    cpu: str = ""
    gpu: str = ""
    cores: int = 0
    performance_cores: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    wired_limit_bytes: int = 0
    tier: str = ""
    accelerator: str = ""
    free_unknown: bool = False
    pressure: Pressure = ""
    device_limit_bytes: int = 0
    card_bytes: int = 0
    card_free_bytes: int = 0
    gpus: int = 0
    # What MLX has for sums over machines besides its ring: "jaccl", "nccl".
    collectives: list[str] = []

    @property
    def model_memory_bytes(self) -> int:
        """The memory that models live in: the card's, or the system's."""
        return self.card_bytes or self.memory_bytes

    @property
    def model_available_bytes(self) -> int:
        """What is free of it."""
        return self.card_free_bytes if self.card_bytes else self.available_bytes


class MemoryBudget(msgspec.Struct, frozen=True):
    """What models may take of the memory they live in, which is the system's or that of a GPU.

    All models together may hold ``fraction`` of what is free or held by them, of which the GPU may hold
    ``device_limit_bytes`` (0 is no limit), and at most ``max_bytes`` where that is not 0. ``usable_bytes`` is
    what is left of that beside ``held_bytes`` (what loaded models hold), and no more than
    ``available_bytes``; nothing while ``pressure`` is critical. ``largest_bytes`` is the same with all memory
    free and no model loaded. With ``overcommit`` that much is usable whatever is free or held, within
    ``max_bytes``.
    ``free_unknown``: nothing says what is free, and all of it is taken to be.
    """

    total_bytes: Count = 0
    available_bytes: Count = 0
    free_unknown: bool = False
    pressure: Pressure = ""
    device_limit_bytes: Count = 0
    held_bytes: Count = 0
    fraction: Share = 1.0
    max_bytes: Count = 0
    overcommit: bool = False
    usable_bytes: Count = 0
    largest_bytes: Count = 0


class HeldLayers(msgspec.Struct, frozen=True):
    """Layers [``first``, ``last``) of a model, on another machine."""

    # The machine's.
    name: str
    first: int
    last: int
    # While they are loaded: what the machine does, and bytes that are in its memory, of all; else "" and 0.
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    # Hidden states of the machine before it come through the one that answers: the two do not reach each
    # other.
    relayed: bool = False


Carried = Literal["", "sealed", "plain", "partly plain", "RDMA", "NCCL"]


class EngineStatus(msgspec.Struct, frozen=True):
    """One worker."""

    # The model's name; of a worker that has only some of its layers, with these.
    model: str = ""
    # An ``EngineState``; "" for a worker that is not known.
    state: str = ""
    # What a load does: "reading"; "" once it is over.
    stage: str = ""
    # Progress of the ``stage``: ``done`` of ``total``, in its own unit.
    done: int = 0
    total: int = 0
    # What computes: "cpu", "metal" or "cuda"; None until it is loaded.
    device: str | None = None
    # What the model is, over the layers that are held.
    shape: ModelShape = ModelShape()
    # As measured at load, or since then in idle time.
    speed: MeasuredSpeed = MeasuredSpeed()
    # Bytes of the device's memory that the worker holds.
    memory_bytes: int = 0
    # Bytes of running requests' keys and values, and the most that these may have.
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    # Bytes of earlier prompts in the prefix cache, and the most that these may have.
    prefix_bytes: int = 0
    prefix_budget_bytes: int = 0
    # How many prompts the prefix cache keeps.
    prefix_entries: int = 0
    # Bytes of keys and values that wait to be written to the disk, and of those that were.
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    # Prompts of which nothing was written, or not all.
    disk_dropped: int = 0
    # Equal where two machines compute the same bytes of the same files; "" if that is not known.
    arithmetic: str = ""
    # The probe's verdict, whether drafts can be verified without changing a byte, as a sentence.
    speculation: str = ""
    # What drafts from the model's own hidden states: "mtp: …", "off: …" with the reason, or "" if no head
    # lies beside the model.
    draft_head: str = ""
    # What each stage of the load took, in seconds.
    load_steps: list[StepView] = []
    # "ready" if it can score prompts, "unmeasured" until its profile is found, "unable" if it never can.
    scoring: str = ""
    # The model that it has only the layers [``first_layer``, ``last_layer``) of, to help others; "" if it has
    # all of them.
    part_of: str = ""
    first_layer: int = 0
    last_layer: int = 0
    # Of a model whose layers are divided between ``ranks`` machines, which of them this is; 0 answers.
    rank: int = 0
    ranks: int = 0
    # How what the ranks send each other travels: sealed, or over a link that the owners of both machines have
    # declared private, plain over TCP, by RDMA or by NCCL.
    carried: Carried = ""
    # The machines for which it has these layers, by name.
    asked_by: list[str] = []
    # Of a model over several machines, what the others hold.
    members: list[HeldLayers] = []
    # Why it is cut otherwise than at first, as a sentence: what its machines were measured to take.
    cut_anew: str = ""
    # While it loads, why it is loaded once more in the middle of an answer: the machine that was lost.
    again: str = ""
    # Requests by what is done for them; ``assisting``: parts of other machines' prompts.
    prefilling: int = 0
    decoding: int = 0
    waiting: int = 0
    assisting: int = 0
    # Whether it is kept loaded whatever other models need.
    pinned: bool = False
    # Forward passes since the load.
    steps: int = 0
    # Seconds since the last progress, while there is a request.
    progress_age_s: float = 0.0
    # Seconds since the last request.
    idle_s: float = 0.0
    # How often the worker had to be started again.
    restarts: int = 0
    pid: int | None = None
    # Why it failed.
    error: str | None = None

    @property
    def busy(self) -> bool:
        """True while requests run or wait on this worker."""
        return self.prefilling + self.decoding + self.waiting > 0

    @property
    def evictable(self) -> bool:
        """True while the worker would give its memory back to a model that needs it."""
        return self.state == "ready" and not self.busy and not self.assisting and not self.pinned


class RunningPull(msgspec.Struct, frozen=True):
    """A model, or layers of one, that are being fetched.

    ``stage``: what is done now, with the file: "downloading model.safetensors"; "" before anything is.
    """

    model: str = ""
    stage: str = ""
    # Bytes of the stage that are there, of all; 0 of 0 if that is not known.
    done_bytes: int = 0
    total_bytes: int = 0


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that has not ended. A word of its prompt or answer is never in it.

    ``stage``: what it does now, in words for people; ``done`` of ``total`` is the progress of that, in tokens
    or bytes, and 0 of 0 if nothing counts it. ``at_s``: Unix time of its arrival; ``age_s``: its seconds.
    ``client``: the program that asked, as in a trace.
    ``plan``: how its prompt is read; its ``cuts`` say which machine computes what.
    """

    id: str = ""
    model: str = ""
    route: str = ""
    asked_by: str = ""
    client: str = ""
    at_s: float = 0.0
    age_s: float = 0.0
    stage: str = ""
    done: int = 0
    total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    exactness: str = ""
    plan: OptionView = OptionView()


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests now, and since start; a cancelled one is neither completed nor failed."""

    running: int = 0
    waiting: int = 0
    completed: int = 0
    failed: int = 0


class ClientSettings(msgspec.Struct, frozen=True):
    """The body of GET /fleet/v1/env: what a client on this machine needs.

    ``base_url`` is OpenAI's, and None if the daemon listens on its socket alone. ``large`` and ``small``:
    the models behind other vendors' names. ``ollama_url``: where Ollama's clients need no token, "" without
    such an address.
    """

    base_url: str | None = None
    api_key: str = ""
    large: str = ""
    small: str = ""
    ollama_url: str = ""


class PowerView(msgspec.Struct, frozen=True):
    """``held``: the system is kept from sleeping for lack of use, because this machine computes for somebody.

    ``refused``: why that could not be done when it was last wanted, as a part of a sentence; "" if it could.
    """

    held: bool = False
    refused: str = ""


class DaemonStatus(msgspec.Struct, frozen=True):
    """The whole body. ``http`` is None if the daemon listens on its socket alone; ``ollama``: the address
    at which Ollama's clients need no token, None without one; ``ollama_missing``: why there is none although
    the settings ask for one. ``undigested``: models whose files could not be hashed, and why; no work with
    these is shared."""

    version: str = ""
    pid: int = 0
    home: str = ""
    socket: str = ""
    http: HttpAddress | None = None
    ollama: HttpAddress | None = None
    ollama_missing: str = ""
    uptime_s: float = 0.0
    ready: bool = False
    draining: bool = False
    default_model: str = ""
    undigested: dict[str, str] = {}
    machine: HardwareReading = HardwareReading()
    memory: MemoryBudget = MemoryBudget()
    engines: list[EngineStatus] = []
    # Models on their way to this machine's disk.
    pulls: list[RunningPull] = []
    requests: RequestCounts = RequestCounts()
    # Requests of this machine's clients that have not ended, oldest first. Empty in the events, which tell
    # them by themselves.
    running: list[RunningRequest] = []
    power: PowerView = PowerView()
    fleet: FleetView = FleetView()
