"""Stored verdicts: a model is probed once on a machine, not at every load.

One file per model and device. What passes took is stored as well, for the cost curve: it counts as shares of
a single step, which is timed at every load.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetd import __version__
from fleetd.engine.speculation.exactness_probe import PROBE_VERSION, ExactnessVerdict
from fleetd.hardware.probe import cores
from fleetd.storage.cached_results import CachedResult

_FOLDER = "verdicts"
# Variables by which BLAS and MLX choose their kernels, and how many threads share them.
_PREFIXES = ("MKL_", "KMP_", "OMP_", "MLX_")


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
    ) -> VerdictKey:
        """The key of this process, as it would compute now."""
        chosen = {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
        return cls(digest, device, accelerator, platform.platform(), versions, chosen, cores())

    def cached(self, cache: Path) -> CachedResult[ExactnessVerdict]:
        """Where the verdict is stored. ``cache``: the home's folder for what can be found out again."""
        name = f"{self.digest[:32]}-{self.device}.json"
        return CachedResult(cache / _FOLDER / name if self.digest else None, self, ExactnessVerdict)
