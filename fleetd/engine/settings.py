"""What the daemon tells a worker at start. It travels in the argument list: nothing secret belongs here."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.cache.settings import DiskCacheSettings
from fleetd.control.model_facts import KvBits, ModelPurpose


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How every worker of this machine runs. 0 means: choose for the device.

    ``max_memory_bytes`` bounds weights, KV and prefix cache of all workers together; ``memory_fraction``
    applies to what the device reports as usable where that is smaller. ``overcommit``: as if all memory were
    free.
    ``wire_weights``: macOS may not page weights out.
    """

    device: Literal["auto", "cpu", "gpu"] = "auto"
    threads: int = 0
    # Of products with weights on a CPU (``cpu.arithmetic``).
    cpu_arithmetic: Literal["auto", "float32", "int8"] = "auto"
    max_memory_bytes: int = 0
    memory_fraction: float = 0.85
    overcommit: bool = False
    wire_weights: bool = True
    max_streams: int = 16
    prefill_chunk_tokens: int = 0
    prefix_cache_bytes: int = 0
    # Whether drafts are verified: where that pays, wherever there are some, or never.
    speculation: Literal["auto", "on", "off"] = "auto"
    # The home's cache folder, for what need not be found out at every load; "" stores nothing.
    cache: str = ""
    # Where keys and values of prompts are kept on the disk; None keeps none.
    blocks: DiskCacheSettings | None = None


class GroupMember(msgspec.Struct, frozen=True):
    """Layers [first, last) of a group's model, which another machine has. ``stream``: the id under which the
    socket to it is handed over. ``arithmetic``, ``kind``: ``Arithmetic.text`` and ``kind`` of these layers
    there; "" if they are unknown, and then neither prompts are kept on disks nor verdicts on drafts.
    ``direct``: hidden states come to it straight from the member before it, if that is not the machine that
    answers."""

    first: int
    last: int
    stream: str
    name: str = ""
    arithmetic: str = ""
    direct: bool = False
    kind: str = ""


#: What carries the sums of ranks: MLX's ring over TCP, RDMA between Macs, or NCCL.
Backend = Literal["ring", "jaccl", "nccl"]


class RingPlace(msgspec.Struct, frozen=True):
    """A worker's place among ranks that each have a part of every layer. ``port``: of this machine, where it
    listens for the rank before; ``next_port``: also of this machine, behind which the next rank is.
    ``interface``: of this machine, at the other end of which the other rank is; for backends but the ring.
    ``daemon``: the id of the process that carries its bytes; 0 is the worker's parent."""

    rank: int
    size: int
    port: int
    next_port: int
    backend: Backend = "ring"
    interface: str = ""
    daemon: int = 0


class WorkerSettings(WorkerOptions, frozen=True):
    """One worker's model, and how to run it."""

    name: str
    path: str
    # Where the model's recorded checksums are, for folders that are not ours to write into.
    record: str = ""
    # The folder of what drafts from the model's hidden states; "": what lies in its own folder, if any does.
    drafter: str = ""
    # What other workers of this machine hold of the memory that models may.
    held_bytes: int = 0
    # Layers [first, last) only, for a worker that helps others and answers nothing itself; (0, 0) is all.
    first_layer: int = 0
    last_layer: int = 0
    # Then the model's own name; ``name`` tells this part of it from others.
    part_of: str = ""
    # What the model gives.
    purpose: ModelPurpose = "chat"
    # Bits in which keys and values of its sequences are held; 0 is as they are computed.
    kv_bits: KvBits = 0
    # The other machines of a group, whose model this worker answers with: it has the layers before the first
    # of them, the embedding and the head. Rows of so many tokens have room with each of them.
    group: tuple[GroupMember, ...] = ()
    group_tokens: int = 0
    # Its place if layers are divided, and not dealt out; rank 0 answers, and ``group`` has the others.
    ring: RingPlace | None = None
    # Several blocks of one answer are under way if that is measured to be faster. No setting of people: False
    # is for measuring (``bench groups``).
    blocks_ahead: bool = True
