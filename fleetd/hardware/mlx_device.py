"""The device that MLX computes on here, as MLX and its driver describe it.

A worker calls ``describe``. The daemon, which never imports MLX, runs this as a program and reads its output:
so both budget the same figures of the same device, however many there are and in whatever order.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

import mlx.core as mx
import msgspec

from fleetd.hardware.device_facts import DeviceFacts

# cuda.h: CU_DEVICE_ATTRIBUTE_INTEGRATED.
_INTEGRATED = 18


def describe() -> DeviceFacts:
    """The GPU that workers would use, else the CPU."""
    if not mx.is_available(mx.gpu):
        return DeviceFacts("cpu")
    info = mx.device_info(mx.gpu)
    name = str(info.get("device_name", ""))
    if mx.metal.is_available():
        limit = int(info["max_recommended_working_set_size"])
        return DeviceFacts("metal", name, limit_bytes=limit, collectives=_collectives())
    facts = DeviceFacts(
        "cuda",
        name,
        count=mx.device_count(mx.gpu),
        uuid=str(info.get("uuid", "")),
        collectives=_collectives(),
    )
    if _shares_memory():
        return facts
    return msgspec.structs.replace(
        facts, card_bytes=int(info.get("total_memory", 0)), card_free_bytes=int(info.get("free_memory", 0))
    )


def _collectives() -> tuple[str, ...]:
    """The libraries for sums over machines that this build has, and that it could load."""
    return tuple(name for name in ("jaccl", "nccl") if mx.distributed.is_available(name))


def _shares_memory() -> bool:
    """True if the first CUDA device has no memory of its own but the system's, as a GB10 does."""
    value = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), _INTEGRATED, 0)
    return bool(value.value)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(describe()).decode())
