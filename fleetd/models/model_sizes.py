"""What a model's files say of its size, read at once: who plans with it needs no disk, which may be gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from fleetd.errors import FleetError, ModelCorrupt, ModelUnsupported
from fleetd.models import hub_parts, parts
from fleetd.models.cpu_arithmetic import CpuArithmetic
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_parts import HubListing
from fleetd.models.memory_need import LayerBytes, WeightNeed, WeightRules, layer_bytes, weight_need

#: As ``WeightNeed`` has it; "" is as weights are in the files, which a GPU holds.
Arithmetic = CpuArithmetic | Literal[""]
_RANKS: Arithmetic = "float32"


class ModelSizes(msgspec.Struct, frozen=True):
    """``need``: of this machine's memory, for all weights."""

    need: WeightNeed
    # Of each layer, in the arithmetic of this machine's workers, of ranks on CPUs, and as they are in files.
    # Empty if layers were not looked at, or cannot be told apart.
    layers: Mapping[Arithmetic, LayerBytes] = {}
    # Why they cannot.
    unclear: FleetError | None = None
    # Of a model that is here in part: what the hub lists of it, and how many layers are here.
    listing: HubListing | None = None
    layers_here: int = 0

    def each_layer(self, arithmetic: Arithmetic) -> LayerBytes:
        """Raises ModelCorrupt, ModelUnsupported: its layers cannot be told apart."""
        if (found := self.layers.get(arithmetic)) is None:
            raise self.unclear or ModelUnsupported("Its layers were not looked at.")
        return found


def read(folder: ModelFolder, rules: WeightRules, *, layers: bool = True) -> ModelSizes:
    """Read the headers of a model's files, which are kept. Raises ModelCorrupt for a part without its list.

    Args:
        rules: how this machine holds weights.
        layers: also of a model that fits this machine: other machines may be to hold some of it.
    """
    need = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
    in_part = folder.source == "part"
    if not layers and not in_part and need.n_bytes <= rules.budget_bytes:
        return ModelSizes(need)
    found: dict[Arithmetic, LayerBytes] = {}
    unclear: FleetError | None = None
    for arithmetic in {need.arithmetic, _RANKS, ""}:
        try:
            found[arithmetic] = layer_bytes(folder.path, folder.config, arithmetic)
        except (ModelCorrupt, ModelUnsupported) as error:
            unclear = error
        except OSError as error:
            unclear = ModelCorrupt(f"The files of {folder.name} cannot be read: {error.strerror or error}.")
    if not in_part:
        return ModelSizes(need, found, unclear)
    listing = hub_parts.read(folder.path).listing
    return ModelSizes(need, found, unclear, listing, parts.layers_in(folder.path))
