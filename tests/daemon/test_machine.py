"""Machine facts, from a made-up root folder where the real one would not do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleetd.hardware import facts as hardware_facts
from fleetd.hardware.probe import HardwareProbe
from fleetd.limits import GIB


@pytest.fixture
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run."""
    monkeypatch.setattr(sys, "platform", "linux")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_this_machine_has_plausible_facts() -> None:
    machine = HardwareProbe().read()
    assert machine.cores >= 1
    assert machine.cpu
    assert 0 < machine.available_bytes <= machine.memory_bytes <= psutil.virtual_memory().total
    assert machine.tier in ("tiny", "small", "standard", "large")


@pytest.mark.parametrize(
    "files",
    [
        {  # version 2, limit on the parent
            "proc/self/cgroup": "0::/box/inner\n",
            "sys/fs/cgroup/box/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{GIB // 2}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
        },
        {  # version 1
            "proc/self/cgroup": "3:cpu:/\n7:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB // 4}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {  # a container that sees its own group as the top
            "proc/self/cgroup": "0::/not/mounted/here\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB // 4}\n",
        },
    ],
)
def test_a_cgroup_limit_is_the_machines_memory(tmp_path: Path, files: dict[str, str]) -> None:
    machine = HardwareProbe(write(tmp_path, files)).read()
    assert machine.memory_bytes == GIB
    assert machine.available_bytes == GIB - GIB // 4
    assert machine.tier == "tiny"


def test_garbage_in_the_kernels_files_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "x\n0::\n\n", "sys/fs/cgroup/memory.max": "what\n", "proc/cpuinfo": "\0:\n"}
    assert HardwareProbe(write(tmp_path, files)).read().memory_bytes == psutil.virtual_memory().total


@pytest.mark.usefixtures("on_linux")
def test_the_cpu_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Fast CPU 9000\n"})
    assert HardwareProbe(root).read().cpu == "Fast CPU 9000"


@pytest.mark.usefixtures("on_linux")
def test_an_nvidia_device_means_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert HardwareProbe(tmp_path).read().accelerator == "cpu"
    assert HardwareProbe(write(tmp_path, {"dev/nvidia0": ""})).read().accelerator == "cuda"


# ---- What it is made of ----------------------------------------------------------------------------------

STUDIO = """\
machdep.cpu.brand_string: Apple M3 Ultra
hw.model: Mac15,14
hw.perflevel0.physicalcpu: 20
iogpu.wired_limit_mb: 460800
"""
INTEL_MAC = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz
hw.model: MacBookPro16,1
"""
GB10 = """\
Model: \t\t NVIDIA GB10
IRQ:   \t\t 313
GPU UUID: \t GPU-2dee1e25-0000-0000-0000-000000000000
Bus Type: \t PCIe
Bus Location: \t 000f:01:00.0
GPU Excluded:\t No
"""
ARM_CORE = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd85\n"


def test_a_mac_studio() -> None:
    assert hardware_facts.mac_facts(STUDIO) == {
        "cpu": "Apple M3 Ultra",
        "product": "Mac15,14",
        "performance_cores": 20,
        "wired_limit_bytes": 450 * GIB,
    }


def test_a_mac_that_lacks_what_newer_ones_tell() -> None:
    facts = hardware_facts.mac_facts(INTEL_MAC)
    assert facts["cpu"] == "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"
    assert (facts["performance_cores"], facts["wired_limit_bytes"]) == (0, 0)


@pytest.mark.parametrize(
    "said", ["", "hw.model\n", "iogpu.wired_limit_mb: -1\n", "hw.perflevel0.physicalcpu: x\n"]
)
def test_a_mac_that_says_nothing_of_use(said: str) -> None:
    assert set(hardware_facts.mac_facts(said).values()) == {"", 0}


def test_a_mac_is_read_with_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        # As sysctl ends where it does not know one of the names.
        return subprocess.CompletedProcess(command, 1, STUDIO, "sysctl: unknown oid 'x'")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "node", lambda: "studio.local")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(28)), raising=False)
    monkeypatch.setattr(subprocess, "run", answer)
    machine = HardwareProbe().read()
    assert asked == [["/usr/sbin/sysctl", *hardware_facts.SYSCTLS]]
    assert (machine.hostname, machine.product, machine.accelerator) == ("studio", "Mac15,14", "metal")
    assert machine.cpu == machine.gpu == "Apple M3 Ultra"
    assert (machine.cores, machine.performance_cores) == (28, 20)
    assert machine.wired_limit_bytes == 450 * GIB


@pytest.mark.usefixtures("on_linux")
def test_a_spark(tmp_path: Path) -> None:
    """Its memory is the system's: its driver knows of no other."""
    files = {
        "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
        "proc/cpuinfo": ARM_CORE * 20,
        "proc/driver/nvidia/gpus/000f:01:00.0/information": GB10,
        "dev/nvidia0": "",
    }
    # Fast and slow cores, of which the fast ones run at two clocks.
    for core in range(20):
        capacity = (1024, 1000)[core % 2] if core >= 10 else 700
        files[f"sys/devices/system/cpu/cpu{core}/cpu_capacity"] = f"{capacity}\n"
    machine = HardwareProbe(write(tmp_path, files)).read()
    assert (machine.product, machine.gpu, machine.accelerator) == ("NVIDIA DGX Spark", "NVIDIA GB10", "cuda")
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert hardware_facts.linux_fast_cores(tmp_path) == 10
    assert machine.performance_cores == min(10, machine.cores)
    assert machine.cpu != "0x41"


@pytest.mark.usefixtures("on_linux")
@pytest.mark.parametrize(
    ("files", "product"),
    [
        ({"sys/class/dmi/id/product_name": "ROG STRIX\n"}, "ROG STRIX"),
        ({"sys/class/dmi/id/product_name": "System Product Name\n"}, ""),
        ({"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}, "Raspberry Pi 5 Model B Rev 1.0"),
        ({"sys/class/dmi/id/product_name": "\n", "proc/device-tree/model": "Board\0"}, "Board"),
        ({}, ""),
    ],
)
def test_the_product_is_what_the_firmware_calls_it(
    tmp_path: Path, files: dict[str, str], product: str
) -> None:
    assert HardwareProbe(write(tmp_path, files)).read().product == product


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"sys/devices/cpu_core/cpus": "0-15\n"}, 16),
        ({"sys/devices/cpu_core/cpus": "0-3,8,10-11\n"}, 7),
        ({"sys/devices/cpu_core/cpus": "garbage,-,9-1\n"}, 0),
        (
            {
                "sys/devices/system/cpu/cpu0/cpu_capacity": "1024",
                "sys/devices/system/cpu/cpu1/cpu_capacity": "x",
            },
            1,
        ),
        ({}, 0),
    ],
)
def test_fast_cores_are_counted(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert hardware_facts.linux_fast_cores(write(tmp_path, files)) == count


@pytest.mark.usefixtures("on_linux")
def test_cores_that_are_all_alike_are_all_fast(tmp_path: Path) -> None:
    machine = HardwareProbe(tmp_path).read()
    assert machine.performance_cores == machine.cores


@pytest.mark.parametrize(
    ("name", "short"), [("studio.local", "studio"), ("spark-1f2e", "spark-1f2e"), ("a.b.c", "a"), ("", "")]
)
def test_hosts_are_called_by_their_first_name(name: str, short: str) -> None:
    assert hardware_facts.short_host(name) == short
