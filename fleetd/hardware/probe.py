"""What this machine is: cheap facts, read without touching the accelerator.

The figures respect limits set from outside (cgroups, CPU affinity): a container with 8 GB on a 512 GB host
is a machine of 8 GB. Memory is the system's, which is the GPU's too on the machines this is made for.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from fleetd.control.daemon_status import HardwareReading
from fleetd.hardware import facts as hardware_facts
from fleetd.hardware.facts import text
from fleetd.hardware.memory import cgroup_folders, system_memory
from fleetd.models.catalog import tier_of
from fleetd.observe import get_logger

log = get_logger("fleetd.hardware")

_SYSCTL_S = 2.0


class HardwareProbe:
    """Reads the constant facts once and the changing one at every call.

    Args:
        gpu: whether models may run on a GPU.
    """

    def __init__(self, root: Path = Path("/"), *, gpu: bool = True) -> None:
        self._root = root
        self._cgroup = list(cgroup_folders(root))
        self._platform = f"{platform.system()} {platform.release()} {platform.machine()}"
        self._hostname = hardware_facts.short_host(platform.node())
        self._cores = cores()
        self._known, self._blind = (0, 0), False
        self._accelerator = _accelerator(root) if gpu else "cpu"
        self._product, self._cpu, self._gpu = "", "", ""
        self._fast_cores = self._wired_limit_bytes = 0
        if sys.platform == "darwin":
            self._look_at_mac()
        else:
            self._look_at_linux(root)

    def _look_at_mac(self) -> None:
        facts = hardware_facts.mac_facts(_output(["/usr/sbin/sysctl", *hardware_facts.SYSCTLS]))
        self._product, self._cpu = facts["product"], facts["cpu"] or platform.machine()
        # One chip is both; Intel Macs have GPUs that nothing here computes on.
        self._gpu = self._cpu if self._accelerator == "metal" else ""
        self._fast_cores = facts["performance_cores"]
        self._wired_limit_bytes = facts["wired_limit_bytes"]

    def _look_at_linux(self, root: Path) -> None:
        self._product = hardware_facts.linux_product(root)
        named = hardware_facts.linux_cpu(text(root / "proc/cpuinfo"))
        self._cpu = named or platform.processor() or platform.machine()
        self._gpu = hardware_facts.linux_gpu(root)
        self._fast_cores = hardware_facts.linux_fast_cores(root)

    def read(self) -> HardwareReading:
        total, available = self._memory()
        return HardwareReading(
            platform=self._platform,
            hostname=self._hostname,
            product=self._product,
            cpu=self._cpu,
            gpu=self._gpu,
            cores=self._cores,
            performance_cores=min(self._fast_cores or self._cores, self._cores),
            memory_bytes=total,
            available_bytes=available,
            wired_limit_bytes=self._wired_limit_bytes,
            tier=tier_of(total),
            accelerator=self._accelerator,
        )

    def _memory(self) -> tuple[int, int]:
        """Bytes in all and bytes free; the last reading where the system gives none now."""
        try:
            self._known = system_memory(self._cgroup)
        except (OSError, RuntimeError) as error:
            if not self._blind:
                log.warning("memory.unread", error=str(error), note="the last reading stands")
            self._blind = True
        else:
            self._blind = False
        return self._known


def cores() -> int:
    """Cores that this process may use."""
    # Absent on macOS, which has no CPU affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _accelerator(root: Path) -> str:
    """A guess good enough for status; the engine worker says what it really uses."""
    if sys.platform == "darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    if (root / "dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        return "cuda"
    return "cpu"


def _output(command: list[str]) -> str:
    """What the command prints, even if it reports an error; "" if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSCTL_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
