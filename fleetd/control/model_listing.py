"""The bodies of GET /fleet/v1/models and POST /fleet/v1/models/verify. Sizes are in bytes."""

from __future__ import annotations

import msgspec


class InstalledModel(msgspec.Struct, frozen=True):
    """A model on this machine. ``digest`` is None: computing it may take minutes, so only ``verify`` does."""

    name: str = ""
    source: str = ""
    architecture: str = ""
    weights_bytes: int = 0
    context_tokens: int = 0
    roles: list[str] = []
    path: str = ""
    loaded: bool = False
    digest: str | None = None


class OfferedModel(msgspec.Struct, frozen=True):
    """A model of the catalog.

    ``fits``: this machine has the memory for it. ``served``: fleetd can answer with it.
    """

    name: str = ""
    hub_id: str | None = None
    roles: list[str] = []
    memory_bytes: int = 0
    context_tokens: int = 0
    tier: str = ""
    installed: bool = False
    fits: bool = False
    served: bool = True


class ModelListing(msgspec.Struct, frozen=True):
    installed: list[InstalledModel] = []
    catalog: list[OfferedModel] = []


class ModelVerdict(msgspec.Struct, frozen=True):
    """The files of a model are intact, and this is their digest."""

    ok: bool = True
    digest: str = ""
