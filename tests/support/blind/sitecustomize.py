"""On the import path of a program: nothing that it could ask about its machine answers."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import psutil


def _raises(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("host_statistics64(HOST_VM_INFO64) syscall failed: (ipc/mig) array not large enough")


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise OSError(1, "Operation not permitted")


def _unknown(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("unrecognized configuration name")


for name in ("virtual_memory", "swap_memory", "cpu_times", "cpu_count", "net_if_stats", "net_if_addrs"):
    setattr(psutil, name, _raises)
psutil.Process.create_time = _raises  # type: ignore[method-assign]
os.getloadavg = _refused
os.sched_getaffinity = _refused
os.sysconf = _unknown
