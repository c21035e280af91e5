"""The bodies of GET /fleet/v1/models and POST /fleet/v1/models/verify. Sizes are in bytes."""

from __future__ import annotations

import msgspec

from fleetd.control.daemon_status import MemoryBudget


class InstalledModel(msgspec.Struct, frozen=True):
    """A model on this machine."""

    name: str = ""
    source: str = ""
    architecture: str = ""
    weights_bytes: int = 0
    context_tokens: int = 0
    roles: list[str] = []
    path: str = ""
    loaded: bool = False
    # It stays loaded while nothing asks for it, and is loaded at the daemon's start.
    pinned: bool = False
    # None: computing it may take minutes, so only ``verify`` does.
    digest: str | None = None
    # The name of the format in which it writes tool calls; "grammar" if its chat template knows none, and it
    # is told one and held to it; "" if it has no chat template.
    tools: str = ""
    # It can reason before it answers.
    thinking: bool = False
    # Files in its folder that look as if they belonged to it, and are not used.
    ignored: list[str] = []


class OfferedModel(msgspec.Struct, frozen=True):
    """A model of the catalog."""

    name: str = ""
    hub_id: str | None = None
    roles: list[str] = []
    # What it needs here, as an estimate.
    memory_bytes: int = 0
    context_tokens: int = 0
    tier: str = ""
    installed: bool = False
    # That much is usable now, or unloading idle models would make it so.
    fits: bool = False
    # It would fit if all memory of this machine were free.
    fits_if_freed: bool = False
    # fleetd can answer with it.
    served: bool = True
    # As an installed model has them.
    tools: str = ""
    thinking: bool = False


class ImportableModel(msgspec.Struct, frozen=True):
    """A GGUF file of another program on this machine, which `fleetctl models add NAME` imports."""

    name: str = ""
    program: str = ""
    path: str = ""
    size_bytes: int = 0


class UnlistedModel(msgspec.Struct, frozen=True):
    """A folder that looks like a model and cannot be asked for; ``reason`` is a sentence."""

    path: str = ""
    reason: str = ""


class ModelListing(msgspec.Struct, frozen=True):
    """All models that this machine has or could have."""

    installed: list[InstalledModel] = []
    catalog: list[OfferedModel] = []
    # What ``fits`` is judged by.
    memory: MemoryBudget = MemoryBudget()
    # Bytes that idle models would give back.
    evictable_bytes: int = 0
    importable: list[ImportableModel] = []
    unlisted: list[UnlistedModel] = []


class ModelVerdict(msgspec.Struct, frozen=True):
    """The files of a model are intact, and this is their digest."""

    ok: bool = True
    digest: str = ""
