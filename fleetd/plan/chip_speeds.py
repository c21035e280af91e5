"""Modelled speeds: how fast a chip should run a model, from its maker's published figures.

Decoding reads all weights once per token, so memory bandwidth bounds it. Prefill multiplies every weight with
every token, so arithmetic bounds it. Only the order of machines has to be about right: the first load of a
model measures its speed, and a measurement always replaces the estimate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

# The share of the published figures that real programs reach.
DECODE_SHARE = 0.6
PREFILL_SHARE = 0.6
# Attention reaches this share of the speed of other prefill work: products over a head are small, and softmax
# comes between them.
ATTENTION_SHARE = 0.5
# Nearly every model in use is quantised to 4 bits, plus half a bit of scales. Only prefill estimates use it,
# and an error is the same factor on every machine.
BITS_PER_WEIGHT = 4.5

# A load reads the weights from the disk, and starts an engine.
DISK_BYTES_PER_S = 2e9
ENGINE_START_S = 3.0


class Hardware(msgspec.Struct, frozen=True):
    """Peak memory bandwidth, and peak matrix arithmetic: in half precision, or as a CPU computes."""

    bytes_per_s: float
    flops: float
    # The same of attention, if that is computed in another precision; 0 if it is not.
    attention_flops: float = 0.0

    def prefill_tok_s(self, weights_bytes: int) -> float:
        weights = max(1, weights_bytes) * 8 / BITS_PER_WEIGHT
        return PREFILL_SHARE * self.flops / (2 * weights)

    def prefill_context_s(self, layers: int, hidden_width: int) -> float:
        """Seconds that each token of context adds to each token: a product with a key and one with a value.

        Args:
            hidden_width: of one hidden state; all heads together are assumed to be as wide.
        """
        flops = self.attention_flops or self.flops
        return 4 * layers * hidden_width / (PREFILL_SHARE * ATTENTION_SHARE * flops)

    def decode_tok_s(self, weights_bytes: int) -> float:
        return DECODE_SHARE * self.bytes_per_s / max(1, weights_bytes)


def _of(gb_per_s: float, tflops: float) -> Hardware:
    return Hardware(gb_per_s * 1e9, tflops * 1e12)


# By generation and variant. If a variant is sold with two widths of memory, the narrower one: the first load
# corrects too low a figure, while too high a figure makes requests wait. The fifth generation has
# matrix units.
APPLE: dict[tuple[int, str], Hardware] = {
    (1, ""): _of(68, 2.6),
    (1, "Pro"): _of(200, 5.2),
    (1, "Max"): _of(400, 10.4),
    (1, "Ultra"): _of(800, 20.8),
    (2, ""): _of(100, 3.6),
    (2, "Pro"): _of(200, 6.8),
    (2, "Max"): _of(400, 13.5),
    (2, "Ultra"): _of(800, 27.0),
    (3, ""): _of(100, 3.5),
    (3, "Pro"): _of(150, 6.3),
    (3, "Max"): _of(300, 14.0),
    (3, "Ultra"): _of(819, 26.0),
    (4, ""): _of(120, 4.2),
    (4, "Pro"): _of(273, 8.5),
    (4, "Max"): _of(410, 16.0),
    (5, ""): _of(153, 16.0),
    (5, "Pro"): _of(307, 32.0),
    (5, "Max"): _of(460, 60.0),
}
_NEWEST = max(generation for generation, _ in APPLE)

GB10 = _of(273, 100)
# Any GPU that is not in the table: the figures of a modest one.
CUDA = _of(270, 30)
# Two channels of memory (70 GB/s) and AVX2. Weights that the file has in 4 bits take seven times its bytes as
# float32, and a fourth more than it packed for int8. In int8 a core multiplies two and a half times as much
# as through BLAS, as it did on x86-64 with AVX-512. Attention is float32's.
CPU_BYTES_PER_S = {"float32": 10e9, "int8": 55e9}
CPU_FLOPS_PER_CORE = {"float32": 50e9, "int8": 125e9}
CPU_CORES = 16

# The fastest machines of each kind that are sold, or will be within some years: twice an M5 Ultra; a B200;
# a server with twelve channels of memory and matrix units.
ANY_METAL = _of(2000, 250)
ANY_CUDA = _of(8000, 2500)
ANY_CPU_BYTES_PER_S = 400e9
ANY_CPU_FLOPS_PER_CORE = {"float32": 200e9, "int8": 600e9}
ANY_CPU_CORES = 256

_APPLE_CHIP = re.compile(r"\bM([1-9]\d?)(?: (Pro|Max|Ultra))?\b")


def hardware_of(chip: str, accelerator: str, cores: int, arithmetic: str = "") -> Hardware:
    """The figures of a chip, by its name in the operating system or driver; modest ones if it is unknown.

    Args:
        arithmetic: of a CPU with a model (``ModelShape.cpu_arithmetic``); "" counts as float32.
    """
    if accelerator == "metal":
        return _apple(chip)
    if accelerator == "cuda":
        return GB10 if "GB10" in chip else CUDA
    most = min(max(1, cores), CPU_CORES)
    flops, attention = (_of_cpu(CPU_FLOPS_PER_CORE, each) * most for each in (arithmetic, "float32"))
    return Hardware(_of_cpu(CPU_BYTES_PER_S, arithmetic), flops, attention)


def compiles_late(accelerator: str) -> bool:
    """True if MLX compiles kernels on such a device when they are first used, for up to a minute each: what a
    size of pass takes for the first time there is no speed."""
    return accelerator == "cuda"


def _of_cpu(figures: Mapping[str, float], arithmetic: str) -> float:
    """A CPU's figure; the one for float32 if a card names another arithmetic."""
    return figures.get(arithmetic, figures["float32"])


def most_of(chip: str, accelerator: str, cores: int, arithmetic: str = "") -> Hardware:
    """What such hardware can do at most. A chip that is not in the table: the fastest one of its kind."""
    if accelerator == "metal":
        found = _APPLE_CHIP.search(chip)
        known = found is not None and (int(found[1]), found[2] or "") in APPLE
        return _apple(chip) if known else ANY_METAL
    if accelerator == "cuda" and "GB10" in chip:
        return GB10
    if accelerator == "cpu":
        flops = _of_cpu(ANY_CPU_FLOPS_PER_CORE, arithmetic) * min(max(1, cores), ANY_CPU_CORES)
        return Hardware(ANY_CPU_BYTES_PER_S, flops)
    return ANY_CUDA


def _apple(chip: str) -> Hardware:
    found = _APPLE_CHIP.search(chip)
    if found is None:
        return APPLE[1, ""]
    generation, variant = min(int(found[1]), _NEWEST), found[2] or ""
    # A chip that is newer than this table is at least as fast as the one before it.
    while (generation, variant) not in APPLE:
        generation -= 1
    return APPLE[generation, variant]


def load_s(weights_bytes: int) -> float:
    """Seconds to load an installed model."""
    return ENGINE_START_S + weights_bytes / DISK_BYTES_PER_S
