"""What a machine is called and made of, from what its kernel and drivers say.

Pure readers of those texts, and nothing that waits for a device.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

#: Asked of sysctl on a Mac, all at once; kernels that lack one of them still tell the others.
SYSCTLS = ("machdep.cpu.brand_string", "hw.model", "hw.perflevel0.physicalcpu")
#: Asked of a Mac for what people call it. "mini" leaves out serial numbers; JSON is in no human language.
SYSTEM_PROFILER = ("/usr/sbin/system_profiler", "-json", "-detailLevel", "mini", "SPHardwareDataType")

# What boards without a name of their own say instead.
_NAMELESS = {"system product name", "default string", "to be filled by o.e.m.", "not specified", "none"}
# Cores of this share of the fastest one's capacity count as fast: those of one kind differ in their clocks.
_FAST_SHARE = 0.75


class MacFacts(TypedDict):
    cpu: str
    product: str
    performance_cores: int


def mac_facts(sysctl: str) -> MacFacts:
    """Facts in what ``sysctl`` prints for SYSCTLS, a line ``name: value`` each; "" or 0 if missing."""
    found = dict(line.split(": ", 1) for line in sysctl.splitlines() if ": " in line)
    return MacFacts(
        cpu=found.get("machdep.cpu.brand_string", "").strip(),
        product=found.get("hw.model", "").strip(),
        performance_cores=_count(found.get("hw.perflevel0.physicalcpu", "")),
    )


def mac_product(profile: str) -> str:
    """A name from ``SYSTEM_PROFILER``: "Mac Studio (M3 Ultra)", "MacBook Pro" on Intel, "" from nothing of
    use.
    """
    try:
        found = json.loads(profile)["SPHardwareDataType"][0]
        name, chip = str(found["machine_name"]), str(found.get("chip_type", "")).removeprefix("Apple ")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return f"{name} ({chip})" if chip else name


def linux_cpu(cpuinfo: str) -> str:
    """The processor's name: x86 kernels give "model name", ARM kernels "Model" on boards and nothing on
    servers.
    """
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return ""


def linux_product(root: Path) -> str:
    """The machine's name as its firmware gives it: "NVIDIA DGX Spark", "Raspberry Pi 5 Model B Rev 1.0"."""
    for file in ("sys/class/dmi/id/product_name", "proc/device-tree/model"):
        name = text(root / file).strip("\0 \n\t").replace("_", " ")
        if name and name.lower() not in _NAMELESS:
            return name
    return ""


def linux_gpu(root: Path) -> str:
    """The first NVIDIA GPU's name, from its driver; "" if there is none."""
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        if found := re.search(r"^Model:\s*(\S.*?)\s*$", text(file), re.MULTILINE):
            return found[1]
    return ""


def linux_fast_cores(root: Path) -> int:
    """How many cores are of the faster kind; 0 if the kernel makes no difference."""
    # Intel lists them; ARM kernels give every core's capacity.
    if listed := text(root / "sys/devices/cpu_core/cpus").strip():
        return _ranges(listed)
    files = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpu_capacity")
    capacities = [_count(text(file)) for file in files]
    return sum(capacity >= _FAST_SHARE * max(capacities) for capacity in capacities)


def short_host(name: str) -> str:
    """A host name as people say it: "studio" for "studio.local"."""
    return name.strip().partition(".")[0]


def text(path: Path) -> str:
    """A small file of the kernel's, or "" if it is not there."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _count(value: str) -> int:
    value = value.strip()
    return int(value) if value.isdecimal() and len(value) < 19 else 0


def _ranges(listed: str) -> int:
    """Length of a list as the kernel writes it: "0-7,16" has nine entries."""
    count = 0
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            count += int(last or first) - int(first) + 1
    return max(0, count)
