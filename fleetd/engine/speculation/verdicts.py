"""Stored verdicts: a model is probed once on a machine, not at every load.

One file per model and device, and one more of the model over several machines: there the kernels of each
machine decide, and the whole model's verdict says nothing. What passes took is stored as well, for the cost
curve: it counts as shares of a single step, which is timed at every load.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fleetd import __version__
from fleetd.engine.settings import GroupMember
from fleetd.engine.speculation.exactness_probe import PROBE_VERSION, ExactnessVerdict
from fleetd.hardware.probe import cores
from fleetd.storage.cached_results import CachedResult

_FOLDER = "verdicts"
# Variables by which BLAS and MLX choose their kernels, and how many threads share them.
_PREFIXES = ("MKL_", "KMP_", "OMP_", "MLX_")


class VerdictMember(msgspec.Struct, frozen=True):
    """Another machine's part of the model, as ``GroupMember`` has it."""

    first: int
    last: int
    arithmetic: str
    kind: str


class VerdictKey(msgspec.Struct, frozen=True):
    """What decides the verdict: two keys are equal if probing again would find the same."""

    # The model's, whose files decide the dtype and the quantisation too; "" if it is unknown, and then
    # nothing is stored.
    digest: str
    # "cpu" or "gpu", and what the accelerator is called.
    device: str
    accelerator: str
    # The operating system and its version.
    system: str
    # Of the libraries that compute, by name.
    versions: dict[str, str]
    # Variables that choose kernels and threads. These and ``cores`` also decide what passes cost.
    environment: dict[str, str]
    cores: int
    # The other machines that have layers of it.
    members: list[VerdictMember] = []
    fleetd: str = __version__
    probe: int = PROBE_VERSION

    @classmethod
    def now(
        cls,
        digest: str,
        device: str,
        accelerator: str,
        versions: dict[str, str],
        environ: Mapping[str, str] = os.environ,
        *,
        members: Sequence[GroupMember] = (),
    ) -> VerdictKey:
        """The key of this process, as it would compute now."""
        chosen = {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
        parts = [VerdictMember(each.first, each.last, each.arithmetic, each.kind) for each in members]
        return cls(digest, device, accelerator, platform.platform(), versions, chosen, cores(), parts)

    @property
    def members_known(self) -> bool:
        """False if another machine has not told how it computes."""
        return all(member.arithmetic and member.kind for member in self.members)

    def file(self, folder: Path) -> Path | None:
        """A file in ``folder`` of this model, device, and being whole or over machines; None if the model's
        digest is unknown."""
        several = "-group" if self.members else ""
        return folder / f"{self.digest[:32]}-{self.device}{several}.json" if self.digest else None

    def cached(self, cache: Path) -> CachedResult[ExactnessVerdict]:
        """Where the verdict is stored: nowhere if the digest, or how a member computes, is unknown.
        ``cache``: the home's folder for what can be found out again."""
        file = self.file(cache / _FOLDER) if self.members_known else None
        return CachedResult(file, self, ExactnessVerdict)
