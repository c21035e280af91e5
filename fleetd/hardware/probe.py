"""What this machine is: cheap facts, and none of the waiting that drivers ask for.

The figures respect limits set from outside (cgroups, CPU affinity): a container with 8 GB on a 512 GB host
is a machine of 8 GB. Nothing here raises: what cannot be read is unknown, and the daemon serves.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal

from fleetd import limits
from fleetd.control.daemon_status import HardwareReading
from fleetd.hardware import darwin, memory
from fleetd.hardware import facts as hardware_facts
from fleetd.hardware.aside import Aside
from fleetd.hardware.device_facts import DeviceFacts, ask_card, ask_mlx
from fleetd.hardware.facts import text
from fleetd.limits import MIB
from fleetd.models.catalog import tier_of

_SYSCTL_S = 2.0


class HardwareProbe:
    """Reads the constant facts once and the changing ones at every call.

    Args:
        gpu: whether models may run on a GPU.
        ask_device: what models run on, by MLX itself.
        ask_card: bytes in all and free of the card with this id.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        gpu: bool = True,
        ask_device: Callable[[], DeviceFacts] = ask_mlx,
        ask_card: Callable[[str], tuple[int, int]] = ask_card,
    ) -> None:
        self._root = root
        self._may_use_gpu = gpu
        self._cgroup = list(memory.cgroup_folders(root))
        self._platform = f"{platform.system()} {platform.release()} {platform.machine()}"
        self._hostname = hardware_facts.short_host(platform.node())
        self._cores = cores()
        self._device = Aside("what models run on", ask_device)
        self._ask_card = ask_card
        self._card: Aside[tuple[int, int]] | None = None
        self._named: Aside[str] | None = None
        self._product, self._cpu, self._gpu = "", "", ""
        self._fast_cores = self._wired_limit_bytes = 0
        # What the answer about the device depends on.
        self._seen = (0, False)
        if sys.platform == "darwin":
            self._look_at_mac()
        else:
            self._look_at_linux(root)

    def _look_at_mac(self) -> None:
        facts = hardware_facts.mac_facts(_output(["/usr/sbin/sysctl", *hardware_facts.SYSCTLS], _SYSCTL_S))
        self._product, self._cpu = facts["product"], facts["cpu"] or platform.machine()
        # One chip is both; Intel Macs have GPUs that nothing here computes on.
        self._gpu = self._cpu if self._likely_accelerator() == "metal" else ""
        self._fast_cores = facts["performance_cores"]
        self._named = Aside("what this Mac is called", _mac_product)

    def _look_at_linux(self, root: Path) -> None:
        self._product = hardware_facts.linux_product(root)
        named = hardware_facts.linux_cpu(text(root / "proc/cpuinfo"))
        self._cpu = named or platform.processor() or platform.machine()
        self._gpu = hardware_facts.linux_gpu(root)
        self._fast_cores = hardware_facts.linux_fast_cores(root)

    def read(self) -> HardwareReading:
        found = memory.system_memory(self._cgroup, self._root)
        device = self._read_device()
        card_bytes, card_free_bytes = self._read_card(device)
        limit = 0
        if device.kind == "metal":
            limit = memory.metal_limit(found.total_bytes, self._wired_limit_bytes, device.limit_bytes)
        return HardwareReading(
            platform=self._platform,
            hostname=self._hostname,
            product=(self._named.read() if self._named is not None else "") or self._product,
            cpu=self._cpu,
            gpu=self._gpu or device.name,
            cores=self._cores,
            performance_cores=min(self._fast_cores or self._cores, self._cores),
            memory_bytes=found.total_bytes,
            available_bytes=found.available_bytes,
            wired_limit_bytes=self._wired_limit_bytes,
            tier=tier_of(card_bytes or found.total_bytes),
            accelerator=device.kind,
            free_unknown=found.free_unknown,
            pressure=found.pressure,
            device_limit_bytes=limit,
            card_bytes=card_bytes,
            card_free_bytes=card_free_bytes,
            gpus=device.count if device.kind != "cpu" else 0,
            collectives=list(device.collectives),
        )

    def settle(self, timeout_s: float = limits.DEVICE_ASK_S) -> HardwareReading:
        """A reading with the answers of everything that was asked aside, as far as they come in time."""
        # The device's answer tells whether there is a card to ask.
        for _ in range(2):
            self.read()
            for asked in (self._named, self._device, self._card):
                if asked is not None:
                    asked.wait(timeout_s)
        return self.read()

    def _read_device(self) -> DeviceFacts:
        """The device that MLX names, and a guess until it has named one; MLX is not asked about a CPU."""
        guess = self._likely_accelerator()
        if guess == "cpu":
            return DeviceFacts("cpu")
        kernel = darwin.kernel()
        wired_mb = kernel.integer("iogpu.wired_limit_mb") if kernel is not None else None
        self._wired_limit_bytes = (wired_mb or 0) * MIB
        # Metal's figure follows its owner's. CUDA finds no GPU before its driver has created the last file.
        seen = self._wired_limit_bytes, (self._root / "dev/nvidia-uvm").exists()
        if seen != self._seen:
            self._seen = seen
            self._device.forget()
        return self._device.read() or DeviceFacts(guess)

    def _read_card(self, device: DeviceFacts) -> tuple[int, int]:
        """Bytes in all and free of a card that has memory of its own; 0 if there is none."""
        if not device.card_bytes:
            return 0, 0
        if self._card is None:
            ask, uuid = self._ask_card, device.uuid
            self._card = Aside("memory of the GPU", lambda: ask(uuid), limits.CARD_MEMORY_S)
        return self._card.read() or (device.card_bytes, device.card_free_bytes)

    def _likely_accelerator(self) -> Literal["metal", "cuda", "cpu"]:
        """A guess from what is there: a driver may come up after the daemon."""
        if not self._may_use_gpu:
            return "cpu"
        if sys.platform == "darwin":
            return "metal" if platform.machine() == "arm64" else "cpu"
        return "cuda" if (self._root / "dev/nvidia0").exists() or self._has_smi else "cpu"

    @cached_property
    def _has_smi(self) -> bool:
        return shutil.which("nvidia-smi") is not None


def cores() -> int:
    """Cores that this process may use."""
    # Absent on macOS, which has no CPU affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    try:
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    except OSError:
        return os.cpu_count() or 1


def _mac_product() -> str:
    return hardware_facts.mac_product(_output([*hardware_facts.SYSTEM_PROFILER], limits.DEVICE_ASK_S))


def _output(command: list[str], within_s: float) -> str:
    """What the command prints, even if it reports an error; "" if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
