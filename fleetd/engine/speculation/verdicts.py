"""Verdicts that were found before: a model is probed once on a machine, not at every load.

One file per model and device (``engine/findings.py``). What passes took is kept as well, for the cost curve:
it counts as shares of a single step, which is timed at every load.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import __version__, limits
from fleetd.engine.cached_results import CachedResult
from fleetd.engine.speculation.exactness_probe import PROBE_VERSION, ExactnessVerdict
from fleetd.hardware.probe import cores

_FOLDER = "verdicts"
# Variables by which BLAS and MLX choose their kernels, and how many threads share them.
_PREFIXES = ("MKL_", "KMP_", "OMP_", "MLX_")


class VerdictKey(msgspec.Struct, frozen=True):
    """What decides the verdict: equal where probing again would find the same.

    ``digest`` is the model's, "" where nobody knows it: then nothing is kept. Its files decide the dtype and
    the quantisation too. ``cores`` and ``environment`` also decide what passes cost.
    """

    digest: str
    device: str
    accelerator: str
    system: str
    versions: dict[str, str]
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
        """Of this process, as it would compute."""
        chosen = {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
        return cls(digest, device, accelerator, platform.platform(), versions, chosen, cores())


class _StoredVerdict(msgspec.Struct, frozen=True):
    width: Annotated[int, Meta(ge=1, le=limits.SPEC_WIDTH)]
    context: Annotated[int, Meta(ge=0)]
    text: str
    seconds: dict[Annotated[int, Meta(ge=1)], Annotated[float, Meta(gt=0)]]


class Verdicts:
    """``cache``: the home's folder for what can be found out again."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / _FOLDER

    def find(self, basis: VerdictKey) -> ExactnessVerdict | None:
        """None where the model has to be probed."""
        kept = self._cached(basis).find()
        return None if kept is None else ExactnessVerdict(kept.width, kept.context, kept.text, kept.seconds)

    def keep(self, basis: VerdictKey, verdict: ExactnessVerdict) -> None:
        """For the next load."""
        kept = _StoredVerdict(verdict.width, verdict.context, verdict.text, verdict.seconds)
        self._cached(basis).keep(kept)

    def _cached(self, basis: VerdictKey) -> CachedResult[_StoredVerdict]:
        name = f"{basis.digest[:32]}-{basis.device}.json"
        return CachedResult(self._folder / name if basis.digest else None, basis, _StoredVerdict)
