"""Machine facts, from a made-up root folder where the real one would not do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fleetd.limits import GIB
from fleetd.machine import Prober


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_this_machine_has_plausible_facts() -> None:
    machine = Prober().read()
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
    machine = Prober(write(tmp_path, files)).read()
    assert machine.memory_bytes == GIB
    assert machine.available_bytes == GIB - GIB // 4
    assert machine.tier == "tiny"


def test_garbage_in_the_kernels_files_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "x\n0::\n\n", "sys/fs/cgroup/memory.max": "what\n", "proc/cpuinfo": "\0:\n"}
    assert Prober(write(tmp_path, files)).read().memory_bytes == psutil.virtual_memory().total


def test_the_cpu_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Fast CPU 9000\n"})
    assert Prober(root).read().cpu == "Fast CPU 9000"


def test_an_nvidia_device_means_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Prober(tmp_path).read().accelerator == "cpu"
    assert Prober(write(tmp_path, {"dev/nvidia0": ""})).read().accelerator == "cuda"
