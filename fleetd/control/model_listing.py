"""The bodies of GET /fleet/v1/models and POST /fleet/v1/models/verify. Sizes are in bytes."""

from __future__ import annotations

import msgspec

from fleetd.control.daemon_status import MemoryBudget


class InstalledModel(msgspec.Struct, frozen=True):
    """A model on this machine. ``digest`` is None: computing it may take minutes, so only ``verify`` does.

    ``pinned``: it stays loaded while nothing asks for it, and is loaded at the daemon's start.

    ``tools``: how it writes tool calls, by the name of the format; "" if it writes none. ``thinking``: it can
    reason before it answers. ``ignored``: what lies in its folder as if it belonged to it, and is not used.
    """

    name: str = ""
    source: str = ""
    architecture: str = ""
    weights_bytes: int = 0
    context_tokens: int = 0
    roles: list[str] = []
    path: str = ""
    loaded: bool = False
    pinned: bool = False
    digest: str | None = None
    tools: str = ""
    thinking: bool = False
    ignored: list[str] = []


class OfferedModel(msgspec.Struct, frozen=True):
    """A model of the catalog.

    ``memory_bytes``: what it needs here, as an estimate. ``fits``: that much is usable now, or idle models
    would give it back. ``fits_if_freed``: it would be, were all memory of this machine free. ``served``:
    fleetd can answer with it. ``tools`` and ``thinking``: as an installed model has them.
    """

    name: str = ""
    hub_id: str | None = None
    roles: list[str] = []
    memory_bytes: int = 0
    context_tokens: int = 0
    tier: str = ""
    installed: bool = False
    fits: bool = False
    fits_if_freed: bool = False
    served: bool = True
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
    """``memory``: what "fits" is judged by, with ``evictable_bytes`` that idle models would give back."""

    installed: list[InstalledModel] = []
    catalog: list[OfferedModel] = []
    memory: MemoryBudget = MemoryBudget()
    evictable_bytes: int = 0
    importable: list[ImportableModel] = []
    unlisted: list[UnlistedModel] = []


class ModelVerdict(msgspec.Struct, frozen=True):
    """The files of a model are intact, and this is their digest."""

    ok: bool = True
    digest: str = ""
