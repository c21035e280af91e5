"""What a worker is wanted for: a model, or some of its layers, and which machines are to hold it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fleetd.control.model_change import Split
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.settings import RingPlace
from fleetd.models.folder import ModelFolder


class WantedLayers(msgspec.Struct, frozen=True):
    """A model, or layers [first, last) of it; (0, 0) is all."""

    folder: ModelFolder
    first: int = 0
    last: int = 0
    # Names of the other machines that are to hold the model with this one, which holds it alone if there are
    # none; None leaves it open.
    over: frozenset[str] | None = None
    # How those machines are to hold it: each some of the layers, or a part of each; None leaves it open.
    split: Split | None = None
    # It is for a worker that is another rank than 0.
    ring: RingPlace | None = None

    @property
    def name(self) -> str:
        if self.ring is not None:
            return f"{self.folder.name}[rank {self.ring.rank} of {self.ring.size}]"
        return f"{self.folder.name}[{self.first}:{self.last}]" if self.last else self.folder.name

    @classmethod
    def whole(
        cls, folder: ModelFolder, over: Collection[str] | None = None, split: Split | None = None
    ) -> WantedLayers:
        """All layers of a model. ``over`` and ``split``: as the fields."""
        return cls(folder, over=None if over is None else frozenset(over), split=split)

    def is_held_by(self, model: LoadedModel) -> bool:
        """True if just the machines that are wanted hold it with this one, in the way that is wanted."""
        settings = model.first.settings
        if self.over is None:
            return True
        if self.split is not None and (settings.ring is not None) != (self.split == "tensors"):
            return False
        return {member.name for member in settings.group} == self.over
