"""Macs that are not here: what real ones were recorded to say, and stand-ins for their kernel and programs.

Every recording names the public report that it was taken from, is shortened, and holds nothing that tells one
person or machine from another.

    with_mac(monkeypatch, mac, Kernel(mac))           the whole machine, as far as fleetd looks at it
    Kernel(mac, words=104, refuses_after=4)           libSystem: sysctl and the counts of pages
    Launchctl(), PeerSocket(uid), PMSET_ASSERTIONS    for services, control sockets and sleep
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from fleetctl.service.managers import CommandResult
from fleetd.hardware import darwin
from fleetd.hardware.darwin import DarwinKernel

GIB, MIB = 1 << 30, 1 << 20
PAGE_BYTES = 16_384


@dataclass(frozen=True)
class Mac:
    """``working_set_bytes``: Metal's recommendation where the report has it, else 0."""

    source: str
    name: str
    model: str
    chip: str
    cores: int
    fast_cores: int
    memory_bytes: int
    working_set_bytes: int = 0


MACS = {
    "studio": Mac("ml-explore/mlx-lm#883", "Mac Studio", "Mac15,14", "Apple M3 Ultra", 28, 20, 96 * GIB),
    "max": Mac("mondoohq/mql#6231", "MacBook Pro", "Mac15,8", "Apple M3 Max", 16, 12, 64 * GIB),
    "pro": Mac("Dr-Noob/cpufetch#183", "MacBook Pro", "MacBookPro18,1", "Apple M1 Pro", 10, 8, 16 * GIB),
    "ultra": Mac("Dr-Noob/cpufetch#145", "Mac Studio", "Mac13,2", "Apple M1 Ultra", 20, 16, 64 * GIB),
}

#: What Metal recommended at most: memory in GiB, ``iogpu.wired_limit_mb``, the recommendation in MiB, the
#: report.
WORKING_SETS = [
    (16, 0, 10_922.67, "ise-uiuc/magicoder#19, M1"),
    (16, 0, 11.84 * 1024, "AlexsJones/llmfit#754, M3"),
    (16, 14_000, 14_000.0, "AlexsJones/llmfit#754, the same with a limit of its owner"),
    (32, 0, 21_845.34, "ollama/ollama#434, M2 Max"),
    (96, 0, 73_728.0, "ggml-org/llama.cpp#3213, M2 Max"),
    (128, 0, 107.52 * 1024, "antirez/ds4#893, two machines, macOS 26"),
    (128, 114_688, 114_688.0, "antirez/ds4#893, the same with a limit of its owner"),
    (192, 180_000, 180_000.0, "ml-explore/mlx#1060, M2 Ultra with a limit of its owner"),
]

#: Pages of 16 KiB, free, active, inactive and wired: an M4 Pro of 24 GB with macOS 15.7.9
#: (PlummersSoftwareLLC/tmog-feedback#193).
PAGES = (13_573, 444_474, 437_999, 225_232)
AVAILABLE_BYTES = (13_573 + 437_999) * PAGE_BYTES
#: The words of a whole answer: macOS 15 (the same report), macOS 26.6 (jundot/omlx#2983), the beta of macOS
#: 27 (invoke-ai/InvokeAI#9326).
WORDS_15, WORDS_26, WORDS_27_BETA = 38, 62, 104
#: What psutil 7.2.2 raises there (exo-explore/exo#2161, giampaolo/psutil#2978).
PSUTIL_FAILS = "host_statistics64(HOST_VM_INFO64) syscall failed: (ipc/mig) array not large enough"


class Kernel:
    """libSystem as far as fleetd calls it.

    ``words``: those of a whole answer. From the call ``refuses_after`` on an array with fewer is refused,
    with the number that is wanted: so did a beta of macOS 27 (jundot/omlx#1749). More than a whole answer has
    corrupts memory, as the kernel itself complains (jundot/omlx#2983), and fails the test.
    """

    def __init__(
        self, mac: Mac, *, words: int = WORDS_15, refuses_after: int | None = None, **integers: int
    ) -> None:
        self.integers = {
            "hw.memsize": mac.memory_bytes,
            "vm.pagesize": PAGE_BYTES,
            # giampaolo/psutil#2725: 1, 2 or 4; any user may ask for it by its name.
            "kern.memorystatus_vm_pressure_level": 1,
            "iogpu.wired_limit_mb": 0,
            **{name.replace("__", "."): value for name, value in integers.items()},
        }
        self.words, self.refuses_after = words, refuses_after
        self.calls = self.hosts = 0
        self.silent = False

    def set(self, name: str, value: int) -> None:
        self.integers[name] = value

    def sysctlbyname(self, name: bytes, value: Any, size: Any, _new: None, _length: int) -> int:
        if self.silent or name.decode() not in self.integers:
            return -1  # ENOENT
        number = self.integers[name.decode()]
        data = number.to_bytes(8 if number >= 1 << 31 or name.startswith(b"hw.mem") else 4, sys.byteorder)
        ctypes.memmove(value, data, len(data))
        size._obj.value = len(data)
        return 0

    def mach_host_self(self) -> int:
        self.hosts += 1
        return 0x0D03

    def host_statistics64(self, host: int, flavor: int, words: Any, count: Any) -> int:
        assert (host, flavor) == (0x0D03, 4)
        asked = count._obj.value
        assert asked <= self.words, "host_statistics64() count is larger than expected"
        self.calls += 1
        if self.silent:
            return 5  # KERN_FAILURE
        if self.refuses_after is not None and self.calls > self.refuses_after and asked < self.words:
            count._obj.value = self.words
            return -307  # MIG_ARRAY_TOO_LARGE
        for place, pages in enumerate(PAGES):
            words[place] = pages
        count._obj.value = min(asked, self.words)
        return 0


@dataclass
class MacPrograms:
    """What a Mac's programs print; ``asked`` are the names of those that were run."""

    mac: Mac
    asked: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[Any]:
        name = os.path.basename(command[0])
        self.asked.append(name)
        return subprocess.CompletedProcess(list(command), 0, self._output(name, command[1:]), "")

    def _output(self, name: str, arguments: Sequence[str]) -> str:
        if name == "sysctl":
            # Dr-Noob/cpufetch#139 has the names and the form.
            told = {
                "machdep.cpu.brand_string": self.mac.chip,
                "hw.model": self.mac.model,
                "hw.perflevel0.physicalcpu": str(self.mac.fast_cores),
            }
            return "".join(f"{key}: {told[key]}\n" for key in arguments if key in told)
        if name == "system_profiler":
            return profile(self.mac)
        raise FileNotFoundError(name)


def profile(mac: Mac) -> str:
    """``system_profiler -json -detailLevel mini SPHardwareDataType``; mondoohq/mql#6231 has its fields."""
    slow = mac.cores - mac.fast_cores
    found = {
        "_name": "hardware_overview",
        "chip_type": mac.chip,
        "machine_model": mac.model,
        "machine_name": mac.name,
        "number_processors": f"proc {mac.cores}:{mac.fast_cores}:{slow}",
        "physical_memory": f"{mac.memory_bytes // GIB} GB",
    }
    return json.dumps({"SPHardwareDataType": [found]}, indent=2)


def with_mac(
    patch: pytest.MonkeyPatch, mac: Mac, kernel: Kernel, *, psutil_fails: bool = False
) -> MacPrograms:
    """Make this process believe that it runs on ``mac``, until the test ends."""
    programs = MacPrograms(mac)
    patch.setattr(sys, "platform", "darwin")
    patch.setattr(platform, "machine", lambda: "arm64")
    patch.setattr(platform, "system", lambda: "Darwin")
    patch.setattr(platform, "release", lambda: "25.3.0")
    patch.setattr(platform, "node", lambda: "studio.local")
    patch.setattr(os, "cpu_count", lambda: mac.cores)
    patch.delattr(os, "sched_getaffinity", raising=False)
    patch.setattr(subprocess, "run", programs)
    asked = DarwinKernel(kernel)
    patch.setattr(darwin, "kernel", lambda: asked)
    memory = Raises(RuntimeError(PSUTIL_FAILS)) if psutil_fails else lambda: PsutilMemory(mac.memory_bytes)
    patch.setattr(psutil, "virtual_memory", memory)
    return programs


@dataclass(frozen=True)
class PsutilMemory:
    total: int
    available: int = AVAILABLE_BYTES


@dataclass(frozen=True)
class Raises:
    """In the place of any function."""

    error: Exception

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


# ---- Services, sleep and sockets -------------------------------------------------------------------------

#: ``launchctl print``, shortened; wazuh/wazuh-packages#2206.
LAUNCHCTL_PRINT = """\
{target} = {{
	active count = 1
	path = {path}
	state = {state}

	program = /opt/fleetd/bin/fleetd
	arguments = {{
		/opt/fleetd/bin/fleetd
	}}

	default environment = {{
		PATH => /usr/bin:/bin:/usr/sbin:/sbin
	}}

	minimum runtime = 10
	exit timeout = 5
	runs = 2
	successive crashes = 0
{pid}	last exit code = {code}
}}
"""

#: ``pmset -g assertions`` while caffeinate holds one, shortened; newmarcel/KeepingYouAwake#92.
PMSET_ASSERTIONS = """\
2017-11-07 15:57:23 -0800
Assertion status system-wide:
   BackgroundTask                 0
   UserIsActive                   1
   PreventUserIdleDisplaySleep    0
   PreventSystemSleep             1
   PreventUserIdleSystemSleep     1
   NetworkClientActive            1
Listed by owning process:
   pid 366(caffeinate): [0x00000025000180ba] 03:16:41 PreventUserIdleSystemSleep named: "caffeinate command-line tool"
	Details: caffeinate asserting on behalf of 'sh' (pid 365)
	Localized=THE CAFFEINATE TOOL IS PREVENTING SLEEP.
"""  # noqa: E501  (as it is printed)


@dataclass
class Launchctl:
    """launchd as ``fleetctl.service.managers`` asks it: bootstrap, bootout, enable and print.

    ``lingers``: how often a job that was booted out is still there when it is asked for.
    """

    lingers: int = 0
    pid: int = 3318
    asked: list[str] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)
    _leaving: dict[str, int] = field(default_factory=dict)

    def __call__(self, arguments: Sequence[str]) -> CommandResult:
        assert arguments[0] == "launchctl"
        verb, *rest = arguments[1:]
        self.asked.append(verb)
        answer: Callable[..., CommandResult] = getattr(self, f"_{verb}")
        return answer(*rest)

    def _enable(self, target: str) -> CommandResult:
        return CommandResult(0, "")

    def _bootstrap(self, domain: str, path: str) -> CommandResult:
        target = f"{domain}/{os.path.basename(path).removesuffix('.plist')}"
        if target in self.loaded:
            return CommandResult(5, "Bootstrap failed: 5: Input/output error\n")
        self.loaded[target] = path
        return CommandResult(0, "")

    def _bootout(self, target: str) -> CommandResult:
        self._leaving[target] = self.lingers
        return CommandResult(0, "")

    def _print(self, target: str) -> CommandResult:
        left = self._leaving.get(target)
        if left is not None:
            self._leaving[target] = left - 1
            if left <= 0:
                del self._leaving[target]
                self.loaded.pop(target, None)
        if target not in self.loaded:
            return CommandResult(113, f'Could not find service "{target.rpartition("/")[2]}" in domain\n')
        shown = LAUNCHCTL_PRINT.format(
            target=target, path=self.loaded[target], state="running", pid=f"\tpid = {self.pid}\n", code=0
        )
        return CommandResult(0, shown)


@dataclass
class PeerSocket:
    """A Unix socket of macOS that tells whose the other end is.

    The structure is that of <sys/ucred.h>, described in unix(4): jnr/jnr-unixsocket#36.
    """

    uid: int
    version: int = 0
    family: int = 1  # AF_UNIX

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (0, 1), "SOL_LOCAL and LOCAL_PEERCRED"
        told = struct.pack("=IIh2x16I", self.version, self.uid, 1, 20, *[0] * 15)
        assert size == len(told) == 76
        return told
