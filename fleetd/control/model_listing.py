"""The bodies of GET /fleet/v1/models and POST /fleet/v1/models/verify. Sizes are in bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.control.daemon_status import MemoryBudget
from fleetd.text.bounded import Count

#: Where a model can run: "here"; here once memory is "freed"; only "elsewhere", on another paired machine; on
#: several machines "together", this one among them; or on "none" of the fleet's machines.
FitWhere = Literal["here", "freed", "elsewhere", "together", "none"]


class ModelFit(msgspec.Struct, frozen=True):
    """Where a model has room, by what machines may hold at most; what is free parts here from freed."""

    where: FitWhere = "here"
    # Other paired machines by name: those that have room for it or, of "together", those that hold it with
    # this one, in the order of their layers.
    machines: list[str] = []
    # Bytes that are missing here: that have to be freed or, with all memory free, that this machine lacks; of
    # "none" those that it lacks together with others, if that is less.
    short_bytes: Count = 0

    @property
    def loads_here(self) -> bool:
        """True if it can be loaded here, at once or with more memory free."""
        return self.where in ("here", "freed")


class InstalledModel(msgspec.Struct, frozen=True):
    """A model on this machine."""

    name: str = ""
    source: str = ""
    architecture: str = ""
    weights_bytes: Count = 0
    context_tokens: Count = 0
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
    # A user's messages may have images.
    images: bool = False
    fit: ModelFit = ModelFit()
    # Files in its folder that look as if they belonged to it, and are not used.
    ignored: list[str] = []
    # What drafts for it besides its own text: "head", in its files; "sidecar", a head in a file beside them;
    # the name of the model that the settings name; "" if nothing does. One that reads hidden states goes
    # before a head of the model's own.
    drafter: str = ""
    # Why that does not draft, and what does instead; "" if it does, or if the model is not loaded.
    drafter_off: str = ""


class OfferedModel(msgspec.Struct, frozen=True):
    """A model of the catalog."""

    name: str = ""
    aliases: list[str] = []
    hub_id: str | None = None
    # What it is good for: "chat", "coding", "compressor", "draft".
    roles: list[str] = []
    # A remark for people.
    note: str = ""
    # Bytes that a pull fetches, about.
    download_bytes: Count = 0
    # What it needs here, as an estimate.
    memory_bytes: Count = 0
    context_tokens: Count = 0
    tier: str = ""
    installed: bool = False
    fit: ModelFit = ModelFit()
    # For which of "chat", "coding" and "draft" this is the one to take on this machine.
    recommended: list[str] = []
    # As an installed model has them.
    tools: str = ""
    thinking: bool = False
    # The smallest model of the catalog whose drafts it can verify, which `fleetctl models pull NAME
    # --with-drafter` gets too, and the repository of an MTP head for it; "" if none is known.
    draft: str = ""
    head: str = ""


class ImportableModel(msgspec.Struct, frozen=True):
    """A GGUF file of another program on this machine, which `fleetctl models add NAME` imports."""

    name: str = ""
    program: str = ""
    path: str = ""
    size_bytes: Count = 0


class UnlistedModel(msgspec.Struct, frozen=True):
    """A folder that looks like a model and cannot be asked for; ``reason`` is a sentence."""

    path: str = ""
    reason: str = ""


class ModelInPart(msgspec.Struct, frozen=True):
    """Some layers of a model that lie on this machine's disk, without the whole model."""

    name: str = ""
    # How many layers are here, and how many the model has.
    layers: Count = 0
    of_layers: Count = 0
    # Bytes on the disk, and of the whole model's weights.
    disk_bytes: Count = 0
    weights_bytes: Count = 0
    # This machine answers with it, together with others; else another machine does.
    own: bool = False
    # The layers came from the hub; else from the machine that answers.
    from_hub: bool = False
    loaded: bool = False


class ModelListing(msgspec.Struct, frozen=True):
    """All models that this machine has or could have."""

    installed: list[InstalledModel] = []
    # First those that fit here, recommended ones before others and larger ones before smaller ones.
    catalog: list[OfferedModel] = []
    # Why models need more memory here than their files have, as a sentence; "" if they do not.
    memory_reason: str = ""
    # What ``fit`` is judged by.
    memory: MemoryBudget = MemoryBudget()
    # Bytes that idle models would give back.
    evictable_bytes: Count = 0
    importable: list[ImportableModel] = []
    unlisted: list[UnlistedModel] = []
    # Models of which single layers are here.
    in_part: list[ModelInPart] = []


class FoundModel(msgspec.Struct, frozen=True):
    """A model of the hub, as a search has found it."""

    hub_id: str = ""
    # Its files: "mlx", "safetensors" or "gguf".
    files: str = ""
    # ``model_type`` of its config, or the architecture of its GGUF files.
    architecture: str = ""
    # Bytes that a pull fetches, about; 0 if the hub does not say.
    download_bytes: Count = 0
    # What it needs here, as an estimate; 0 if its size is not known.
    memory_bytes: Count = 0
    fit: ModelFit = ModelFit()
    # How often it was downloaded in the last month.
    downloads: Count = 0
    # The hub gives it only to people who have accepted its terms.
    gated: bool = False
    installed: bool = False


class FoundModels(msgspec.Struct, frozen=True):
    """The body of GET /fleet/v1/models/search: models of the hub that can be read here, by words."""

    words: str = ""
    # Those that fit here first, then by downloads.
    models: list[FoundModel] = []
    # How many more the hub had, of files that are not read or types that are not known.
    others: Count = 0


class ModelVerdict(msgspec.Struct, frozen=True):
    """The files of a model are intact, and this is their digest."""

    ok: bool = True
    digest: str = ""
