"""Verdicts that were found before: a model is probed once on a machine, not at every load.

One small file per model and device in the home's cache folder. It says what its verdict rests on; where any
of that is other now, or the file is damaged, the model is probed again. What passes took is kept as well, for
the cost curve: it counts as shares of a single step, which is timed at every load.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import __version__, durable, limits
from fleetd.engine.spec.probe import PROBE_VERSION, Verdict
from fleetd.errors import FleetError

_FOLDER = "verdicts"
# Variables by which BLAS and MLX choose their kernels, and how many threads share them.
_PREFIXES = ("MKL_", "KMP_", "OMP_", "MLX_")


class Basis(msgspec.Struct, frozen=True):
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
    ) -> Basis:
        """Of this process, as it would compute."""
        chosen = {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
        return cls(digest, device, accelerator, platform.platform(), versions, chosen, _cores())


class _Kept(msgspec.Struct, frozen=True):
    basis: Basis
    width: Annotated[int, Meta(ge=1, le=limits.SPEC_WIDTH)]
    context: Annotated[int, Meta(ge=0)]
    text: str
    seconds: dict[Annotated[int, Meta(ge=1)], Annotated[float, Meta(gt=0)]]


class _File(msgspec.Struct, frozen=True):
    """``sha256``: of ``kept`` as it is written; a flipped bit must not make a width exact."""

    sha256: str
    kept: msgspec.Raw


class Verdicts:
    """``cache``: the home's folder for what can be found out again."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / _FOLDER

    def find(self, basis: Basis) -> Verdict | None:
        """None where the model has to be probed."""
        if not basis.digest:
            return None
        try:
            raw = durable.read(self._file(basis), limits.SPEC_VERDICT_BYTES)
            if raw is None or len(raw) > limits.SPEC_VERDICT_BYTES:
                return None
            file = msgspec.json.decode(raw, type=_File)
            if hashlib.sha256(file.kept).hexdigest() != file.sha256:
                return None
            kept = msgspec.json.decode(file.kept, type=_Kept)
        except (FleetError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return Verdict(kept.width, kept.context, kept.text, kept.seconds) if kept.basis == basis else None

    def keep(self, basis: Basis, verdict: Verdict) -> None:
        """For the next load. A disk that does not take it costs that load a probe."""
        if not basis.digest:
            return
        kept = msgspec.json.encode(
            _Kept(basis, verdict.width, verdict.context, verdict.text, verdict.seconds)
        )
        file = _File(hashlib.sha256(kept).hexdigest(), msgspec.Raw(kept))
        with suppress(FleetError):
            durable.private_folder(self._folder)
            durable.replace(self._file(basis), msgspec.json.encode(file))

    def _file(self, basis: Basis) -> Path:
        return self._folder / f"{basis.digest[:32]}-{basis.device}.json"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
