"""Machine facts, from a made-up root folder where the real one would not do."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from fleetctl.verbs.status import _machine
from fleetd.fleet.own_card import facts
from fleetd.hardware import facts as hardware_facts
from fleetd.hardware import mlx_device
from fleetd.hardware.device_facts import DeviceFacts, ask_card, ask_mlx
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
    """Also one whose driver comes up after the daemon; what MLX says of it counts, once it says something."""
    monkeypatch.setenv("PATH", "")
    machine = HardwareProbe(tmp_path, ask_device=lambda: CARD, ask_card=lambda uuid: CARD_MEMORY[uuid])
    assert machine.settle().accelerator == "cpu"
    write(tmp_path, {"dev/nvidia0": ""})
    assert machine.read().accelerator == "cuda"
    # Under systemd its last file may come after the daemon, and until then MLX finds no GPU.
    found = DeviceFacts("cpu")
    late = HardwareProbe(tmp_path, ask_device=lambda: found, ask_card=lambda uuid: CARD_MEMORY[uuid])
    assert late.settle().accelerator == "cpu"
    found = CARD
    assert late.settle().accelerator == "cpu"
    write(tmp_path, {"dev/nvidia-uvm": ""})
    assert late.settle().accelerator == "cuda"
    # An MLX for CPUs computes on no card.
    assert HardwareProbe(tmp_path, ask_device=lambda: DeviceFacts("cpu")).settle().accelerator == "cpu"
    assert HardwareProbe(tmp_path, gpu=False, ask_device=lambda: CARD).settle().accelerator == "cpu"


@pytest.mark.usefixtures("on_linux")
def test_a_card_is_budgeted_by_its_own_memory(tmp_path: Path) -> None:
    """Of two cards it is the one that MLX computes on, whatever NVML's order; other programs' use counts."""
    card = dict(CARD_MEMORY)
    root = write(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": ""})
    machine = HardwareProbe(root, ask_device=lambda: CARD, ask_card=lambda uuid: card[uuid])
    found = machine.settle()
    assert (found.card_bytes, found.card_free_bytes, found.gpus) == (24 * GIB, 20 * GIB, 2)
    assert (found.model_memory_bytes, found.model_available_bytes) == (24 * GIB, 20 * GIB)
    assert (found.tier, found.gpu) == ("small", "NVIDIA GeForce RTX 4090")
    assert found.memory_bytes == psutil.virtual_memory().total
    assert facts(found).memory_bytes == 24 * GIB
    line = _machine({"machine": msgspec.to_builtins(found)})
    assert "NVIDIA GeForce RTX 4090 with 25.8 GB, 21.5 GB free, 1 of 2 is used" in line


@pytest.mark.usefixtures("on_linux")
@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("pynvml"), OSError("libnvidia-ml.so.1"), KeyError("x")]
)
def test_a_card_that_nvml_cannot_read_has_what_mlx_saw(tmp_path: Path, error: Exception) -> None:
    def fails(uuid: str) -> tuple[int, int]:
        raise error

    found = HardwareProbe(
        write(tmp_path, {"dev/nvidia0": ""}), ask_device=lambda: CARD, ask_card=fails
    ).settle()
    assert (found.card_bytes, found.card_free_bytes) == (24 * GIB, 23 * GIB)


def test_nvml_is_asked_for_the_card_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def memory(handle: str) -> SimpleNamespace:
        asked.append(handle)
        return SimpleNamespace(total=24 * GIB, free=7 * GIB, used=17 * GIB)

    nvml = SimpleNamespace(
        nvmlInit=lambda: asked.append("init"),
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert ask_card("GPU-1") == (24 * GIB, 7 * GIB)
    assert asked == ["init", "handle of GPU-1"]


def test_a_device_is_described_by_mlx_in_a_process_of_its_own() -> None:
    """Here that is whatever this machine has; its GPU, if it has one, has a name and a size."""
    found = ask_mlx()
    assert found == mlx_device.describe() or found.card_bytes
    assert found.kind == "cpu" or (found.name and (found.limit_bytes or found.uuid))


@pytest.mark.parametrize("integrated", [0, 1])
def test_cuda_is_described_with_its_memory_or_as_a_part_of_the_system(
    monkeypatch: pytest.MonkeyPatch, integrated: int
) -> None:
    """A GB10 says it has all of the system's memory, and counts the page cache as used (MLX takes it from
    cudaMemGetInfo, for NVML says nothing there): such a GPU is budgeted as the system is."""
    told = {"device_name": "NVIDIA GB10", "uuid": "GPU-1", "total_memory": 24 * GIB, "free_memory": 23 * GIB}
    mlx: Any = SimpleNamespace(
        gpu="gpu",
        is_available=lambda device: True,
        device_count=lambda device: 2,
        device_info=lambda device: told,
        metal=SimpleNamespace(is_available=lambda: False),
        distributed=SimpleNamespace(is_available=lambda name: name == "nccl"),
    )

    def attribute(value: Any, number: int, device: int) -> int:
        assert (number, device) == (18, 0)
        value._obj.value = integrated
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(mlx_device, "mx", mlx)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    found = mlx_device.describe()
    assert (found.kind, found.name, found.count) == ("cuda", "NVIDIA GB10", 2)
    assert found.collectives == ("nccl",)
    assert (found.card_bytes, found.card_free_bytes) == ((0, 0) if integrated else (24 * GIB, 23 * GIB))


# What MLX told before a second program took 3 GiB, which NVML tells.
CARD = DeviceFacts(
    "cuda", "NVIDIA GeForce RTX 4090", count=2, uuid="GPU-1", card_bytes=24 * GIB, card_free_bytes=23 * GIB
)
CARD_MEMORY = {"GPU-1": (24 * GIB, 20 * GIB)}


# ---- What it is made of ----------------------------------------------------------------------------------

STUDIO = """\
machdep.cpu.brand_string: Apple M3 Ultra
hw.model: Mac15,14
hw.perflevel0.physicalcpu: 20
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
    }


def test_a_mac_that_lacks_what_newer_ones_tell() -> None:
    facts = hardware_facts.mac_facts(INTEL_MAC)
    assert facts["cpu"] == "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"
    assert facts["performance_cores"] == 0


@pytest.mark.parametrize(
    "said", ["", "hw.model\n", "hw.perflevel0.physicalcpu: -1\n", "hw.perflevel0.physicalcpu: x\n"]
)
def test_a_mac_that_says_nothing_of_use(said: str) -> None:
    assert set(hardware_facts.mac_facts(said).values()) == {"", 0}


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
    spark = DeviceFacts("cuda", "NVIDIA GB10", uuid="GPU-1")
    machine = HardwareProbe(write(tmp_path, files), ask_device=lambda: spark).settle()
    assert (machine.product, machine.gpu, machine.accelerator) == ("NVIDIA DGX Spark", "NVIDIA GB10", "cuda")
    assert (machine.card_bytes, machine.gpus) == (0, 1)
    assert machine.model_memory_bytes == machine.memory_bytes
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
