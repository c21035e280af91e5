"""What `fleetctl doctor --prove` measured on one machine: a report that may be shown to anyone.

It holds no names that the owner has given, no addresses, paths or prompts, and no texts of errors, which
might hold them. Sizes are in bytes, speeds in tokens per second, times in seconds.
"""

from __future__ import annotations

import msgspec

from fleetd.control.model_facts import MeasuredSpeed, ModelShape


class ProofStep(msgspec.Struct, frozen=True):
    """One kind of measurement. ``error``: the kind of error that ended it, "" if it went well; ``skipped``:
    why it was not taken."""

    name: str
    seconds: float = 0.0
    error: str = ""
    skipped: str = ""


class MachineProof(msgspec.Struct, frozen=True):
    """The machine by its make, and the versions that computed. ``others_share``: of the processor, that other
    programs had during the whole measurement; None if the system does not say."""

    platform: str = ""
    python: str = ""
    product: str = ""
    cpu: str = ""
    accelerator: str = ""
    device: str = ""
    cores: int = 0
    versions: dict[str, str] = {}
    others_share: float | None = None


class ModelProof(msgspec.Struct, frozen=True):
    """The model by its make."""

    shape: ModelShape = ModelShape()
    # As measured at load.
    speed: MeasuredSpeed = MeasuredSpeed()
    # The verdict at load, in words.
    speculation: str = ""
    load_s: float = 0.0


class MemoryProof(msgspec.Struct, frozen=True):
    """What models may take, and why. ``device_limit_bytes``: what the GPU may hold by its driver, 0 where it
    says nothing; ``wired_limit_bytes``: what the owner of a Mac lets it hold, 0 for the system's choice."""

    total_bytes: int = 0
    available_bytes: int = 0
    device_limit_bytes: int = 0
    wired_limit_bytes: int = 0
    usable_bytes: int = 0
    peak_bytes: int = 0


class WidthProof(msgspec.Struct, frozen=True):
    """Whether a block of ``width`` tokens gives the bytes of single steps behind ``context`` tokens.
    ``rows``: of a single step, more than one if only wider steps have the same bytes; ``pass_s``: of a
    block."""

    context: int
    width: int
    same: bool
    pass_s: float = 0.0
    rows: int = 1


class ChunkProof(msgspec.Struct, frozen=True):
    """Prefill in chunks of ``tokens`` on an empty context."""

    tokens: int
    tok_s: float
    peak_bytes: int = 0


class SpeedProof(msgspec.Struct, frozen=True):
    """The engine against ``mlx_lm.stream_generate`` on the same weights in the same process, by turns;
    medians of ``runs``. ``mode``: "prefill", or how ``tokens`` were decoded."""

    mode: str
    tokens: int
    runs: int
    fleetd_tok_s: float
    mlx_lm_tok_s: float

    @property
    def ratio(self) -> float:
        return self.fleetd_tok_s / self.mlx_lm_tok_s


class SharedProof(msgspec.Struct, frozen=True):
    """A prefill divided by ``kind`` into a home's and a helper's part over a sealed stream. ``same``: its
    keys and values are those of a local prefill, byte for byte; None if they could not be compared."""

    kind: str
    tokens: int
    same: bool | None = None


class LinkProof(msgspec.Struct, frozen=True):
    """The path in use to one paired machine, as the daemon measured it. ``kind``: as ``PathView`` has it."""

    state: str
    kind: str = ""
    chip: str = ""
    rtt_ms: float | None = None
    bytes_per_s: float | None = None


class TogetherProof(msgspec.Struct, frozen=True):
    """One made-up prompt of ``tokens``, answered as the daemon plans and by this machine alone.
    ``plan``: its kind; ``same``: both answers have the same text, None if they could not be compared."""

    tokens: int
    plan: str
    exactness: str
    together_s: float
    alone_s: float
    same: bool | None = None


class HardwareProof(msgspec.Struct, frozen=True):
    """The whole report."""

    fleetd: str = ""
    seconds: float = 0.0
    steps: list[ProofStep] = []
    machine: MachineProof = MachineProof()
    model: ModelProof = ModelProof()
    memory: MemoryProof = MemoryProof()
    widths: list[WidthProof] = []
    chunks: list[ChunkProof] = []
    speeds: list[SpeedProof] = []
    shared: list[SharedProof] = []
    links: list[LinkProof] = []
    together: list[TogetherProof] = []
    # Whether the system listed the sleep assertion while it was held, and no more once it was released.
    awake_held: bool | None = None
    awake_released: bool | None = None
