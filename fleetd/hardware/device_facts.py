"""What is known of the device that models run on, and who tells it: MLX in a process of its own, and NVML."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.text.decoding import from_json


class DeviceFacts(msgspec.Struct, frozen=True):
    """``kind``: what MLX computes on. ``count``: how many GPUs the system has; the first one is used.

    ``limit_bytes``: what Metal lets the GPU hold in all. ``card_bytes``: the memory of a card that has its
    own, of which ``card_free_bytes`` are free; 0 where models live in the system's memory. ``collectives``:
    what MLX has for sums over machines besides its ring.
    """

    kind: Literal["metal", "cuda", "cpu"]
    name: str = ""
    limit_bytes: int = 0
    count: int = 1
    uuid: str = ""
    card_bytes: int = 0
    card_free_bytes: int = 0
    collectives: tuple[str, ...] = ()


def ask_mlx() -> DeviceFacts:
    """Run ``mlx_device`` and wait for it. Raises OSError, SubprocessError or msgspec.MsgspecError."""
    done = subprocess.run(
        [sys.executable, "-m", "fleetd.hardware.mlx_device"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=limits.DEVICE_ASK_S,
        check=True,
    )
    return from_json(done.stdout, DeviceFacts)


def ask_card(uuid: str) -> tuple[int, int]:
    """Bytes in all and bytes free of an NVIDIA card with memory of its own, all programs' use counted.

    Raises ImportError without nvidia-ml-py, and pynvml.NVMLError.
    """
    nvml: Any = importlib.import_module("pynvml")
    # It counts its callers, and costs nothing from the second time on.
    nvml.nvmlInit()
    found = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
    return int(found.total), int(found.free)
