"""What a worker finds out about a model by computing with it, stored for the next load of the same files.

One file per model and device. The files, the device, the libraries and the variables that choose their
kernels decide all of it but the speeds, which also depend on what else the machine did meanwhile. Speeds in
doubt are kept too, until they have been measured again in idle time.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from pathlib import Path

import msgspec

from fleetd.engine.cpu import products
from fleetd.engine.measure.calibrate import Measurement
from fleetd.engine.protocol import Arithmetic
from fleetd.engine.speculation.verdicts import VerdictKey
from fleetd.storage.cached_results import CachedResult

_FOLDER = "loads"
# Raised when what was found before would be found otherwise: other checks, other fingerprints.
FINDINGS_VERSION = 3
# Raised when blocks of an earlier version must not be used.
BLOCKS_VERSION = 2
# Ends of the names of variables that set how many threads compute, which changes no bytes where it is exact.
_THREADS = ("_NUM_THREADS", "_MAX_THREADS", "_THREAD_LIMIT")
# Libraries that compute beside MLX on a CPU.
_BESIDE = ("numpy", "mkl")


def versions(cpu_arithmetic: str = "") -> dict[str, str]:
    """Versions of the libraries that compute and that make prompts: two arithmetics have other libraries."""
    names = ("mlx", "mlx-lm", "transformers", *(("onnxruntime",) if cpu_arithmetic == "int8" else ()))
    return {name: importlib.metadata.version(name) for name in names}


class LoadFindings(msgspec.Struct, frozen=True):
    # Whether answers can be decoded in one batch.
    together: bool
    # Why prompts must be prefilled whole; "" if they need not be.
    dense_reason: str
    # None if no other machine can help.
    arithmetic: Arithmetic | None
    measured: Measurement
    # A hash of the tokenizer's vocabulary.
    vocabulary: str


class FindingsKey(msgspec.Struct, frozen=True):
    """Equal if a load would find the same. Nothing is stored if the ``model``'s digest is unknown."""

    model: VerdictKey
    beside: dict[str, str]
    exact: bool
    findings: int = FINDINGS_VERSION

    @classmethod
    def now(cls, model: VerdictKey) -> FindingsKey:
        """The key of this process, as it would compute now."""
        beside = {}
        for name in _BESIDE:
            with suppress(importlib.metadata.PackageNotFoundError):
                beside[name] = importlib.metadata.version(name)
        return cls(model, beside, products.exact())

    def cached(self, cache: Path) -> CachedResult[LoadFindings]:
        """Where they are stored. ``cache``: the home's folder for what can be found out again."""
        return CachedResult(self.model.file(cache / _FOLDER), self, LoadFindings)


class BlockBasis(msgspec.Struct, frozen=True):
    """What decides the bytes of keys and values besides the tokens: equal where the same tokens give the same
    ones.

    ``arithmetic``: what every layer made of the same numbers. A system, a version of fleetd or a number of
    cores that changes bytes changes it.
    """

    digest: str
    device: str
    accelerator: str
    versions: dict[str, str]
    environment: dict[str, str]
    beside: dict[str, str]
    arithmetic: str
    blocks: int = BLOCKS_VERSION


def block_basis(key: FindingsKey, arithmetic: Arithmetic | None) -> bytes:
    """The basis of the names of this model's blocks; b"" if its digest is unknown, or how a member computes.

    If the layers have no fingerprint, or a CPU rounds by the number of its threads, only a machine that is
    the same in everything computes the same bytes.
    """
    model = key.model
    if not model.digest or not model.members_known:
        return b""
    text = arithmetic.text if arithmetic is not None else ""
    if not text or (model.device == "cpu" and not key.exact):
        return msgspec.json.encode(key, order="sorted")
    kernels = {name: value for name, value in model.environment.items() if not name.endswith(_THREADS)}
    basis = BlockBasis(
        model.digest, model.device, model.accelerator, model.versions, kernels, key.beside, text
    )
    return msgspec.json.encode(basis, order="sorted")


def part_basis(device: str, arithmetic: Arithmetic) -> bytes:
    """What decides the bytes of some layers' keys and values, besides the layers' weights and what goes in;
    b"" if the layers have no fingerprint."""
    if not arithmetic.text:
        return b""
    # The worker that answers names blocks by the model's digest.
    key = FindingsKey.now(VerdictKey.now("part", device, arithmetic.accelerator, arithmetic.versions))
    return block_basis(key, arithmetic)
