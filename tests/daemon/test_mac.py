"""What fleetd makes of a Mac, from what real ones were recorded to say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from darwin import (
    AVAILABLE_BYTES,
    GIB,
    MACS,
    MIB,
    PSUTIL_FAILS,
    WORDS_15,
    WORDS_26,
    WORDS_27_BETA,
    WORKING_SETS,
    Kernel,
    PeerSocket,
    PsutilMemory,
    Raises,
    profile,
    with_mac,
)

from fleetd import limits
from fleetd.hardware import darwin, facts, memory
from fleetd.hardware.darwin import DarwinKernel
from fleetd.hardware.device_facts import DeviceFacts
from fleetd.hardware.memory import MemoryReading, budget, metal_limit, system_memory
from fleetd.hardware.probe import HardwareProbe
from fleetd.process import peercred

STUDIO = MACS["studio"]
METAL = DeviceFacts("metal", STUDIO.chip, limit_bytes=80 * GIB)


@pytest.fixture(autouse=True)
def _said_anew() -> None:
    memory._say_unread.cache_clear()


def probe(device: DeviceFacts = METAL) -> HardwareProbe:
    return HardwareProbe(ask_device=lambda: device)


# ---- Memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "refuses_after"), [(WORDS_15, None), (WORDS_26, None), (WORDS_27_BETA, 0), (WORDS_27_BETA, 4)]
)
def test_free_memory_is_read_from_every_kernel(words: int, refuses_after: int | None) -> None:
    """A kernel that wants more words says how many; none is ever asked for more than it has."""
    library = Kernel(STUDIO, words=words, refuses_after=refuses_after)
    kernel = DarwinKernel(library)
    assert [kernel.free_bytes() for _ in range(8)] == [AVAILABLE_BYTES] * 8
    assert library.hosts == 1, "each call counts a reference to the port"


def test_a_kernel_that_refuses_everything_is_asked_twice() -> None:
    class Greedy(Kernel):
        def host_statistics64(self, host: int, flavor: int, words: Any, count: Any) -> int:
            self.calls += 1
            count._obj.value += 1
            return -307

    library = Greedy(STUDIO)
    assert DarwinKernel(library).free_bytes() is None
    assert library.calls == 2


def test_a_count_beyond_what_any_answer_may_have_is_not_believed() -> None:
    library = Kernel(STUDIO, words=5000, refuses_after=0)
    assert DarwinKernel(library).free_bytes() is None


def test_psutil_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Kernel(STUDIO)
    with_mac(monkeypatch, STUDIO, library)
    assert system_memory(()) == MemoryReading(96 * GIB, AVAILABLE_BYTES, pressure="normal")
    assert library.calls == 0


def test_a_mac_that_psutil_cannot_read_has_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_mac(monkeypatch, STUDIO, Kernel(STUDIO, words=WORDS_27_BETA, refuses_after=3), psutil_fails=True)
    readings = {system_memory(()) for _ in range(6)}
    assert readings == {MemoryReading(96 * GIB, AVAILABLE_BYTES, pressure="normal")}
    assert capsys.readouterr().out.count(PSUTIL_FAILS) == 1


def test_what_nothing_says_is_unknown_and_not_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Kernel(STUDIO)
    library.silent = True
    with_mac(monkeypatch, STUDIO, library, psutil_fails=True)
    monkeypatch.setattr(os, "sysconf", Raises(ValueError("unrecognized configuration name")))
    found = system_memory(())
    assert found == MemoryReading(limits.ASSUMED_MEMORY_BYTES, limits.ASSUMED_MEMORY_BYTES, free_unknown=True)
    assert budget(found).usable_bytes == limits.ASSUMED_MEMORY_BYTES


def test_the_total_comes_from_sysctl_where_the_counts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Countless(Kernel):
        def host_statistics64(self, *_: Any) -> int:
            return 5

    with_mac(monkeypatch, STUDIO, Countless(STUDIO), psutil_fails=True)
    assert system_memory(()) == MemoryReading(96 * GIB, 96 * GIB, free_unknown=True, pressure="normal")


@pytest.mark.parametrize(("level", "pressure"), [(1, "normal"), (2, "warning"), (4, "critical"), (3, "")])
def test_a_mac_says_how_short_of_memory_it_is(
    monkeypatch: pytest.MonkeyPatch, level: int, pressure: str
) -> None:
    library = Kernel(STUDIO, kern__memorystatus_vm_pressure_level=level)
    with_mac(monkeypatch, STUDIO, library)
    found = system_memory(())
    assert found.pressure == pressure
    # Small Macs live with a warning for hours; at "critical" macOS ends programs.
    assert (budget(found).usable_bytes == 0) == (pressure == "critical")
    assert budget(found, overcommit=True).usable_bytes == 96 * GIB


# ---- What the GPU may hold -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "wired_mb", "told_mib", "source"), WORKING_SETS)
def test_metals_own_figure_counts_and_the_guess_is_never_above_it(
    gib: int, wired_mb: int, told_mib: float, source: str
) -> None:
    told = int(told_mib * MIB)
    assert metal_limit(gib * GIB, wired_mb * MIB, told) == pytest.approx(told, rel=1e-6)
    if not wired_mb:
        assert metal_limit(gib * GIB, 0) <= told + MIB


def test_models_of_one_gpu_share_what_it_may_hold() -> None:
    """48 GiB of 64 may be held, of which a model holds 40: free memory alone would allow 18 more."""
    free = MemoryReading(64 * GIB, 18 * GIB)
    found = budget(free, device_limit_bytes=48 * GIB, held_bytes=40 * GIB)
    assert (found.usable_bytes, found.largest_bytes) == (8 * GIB, 48 * GIB)
    assert budget(free, device_limit_bytes=48 * GIB, held_bytes=60 * GIB).usable_bytes == 0
    # Without a limit of the GPU what is free says it all.
    assert budget(free, held_bytes=40 * GIB).usable_bytes == 18 * GIB


def test_a_limit_that_its_owner_changes_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library, asked = Kernel(STUDIO), []
    with_mac(monkeypatch, STUDIO, library)

    def ask() -> DeviceFacts:
        asked.append(library.integers["iogpu.wired_limit_mb"])
        return METAL

    machine = HardwareProbe(ask_device=ask)
    assert machine.settle().device_limit_bytes == 80 * GIB
    library.set("iogpu.wired_limit_mb", 90 * 1024)
    changed = machine.settle()
    assert (changed.device_limit_bytes, changed.wired_limit_bytes) == (90 * GIB, 90 * GIB)
    # Metal's figure follows it, so it is asked for again.
    assert asked == [0, 90 * 1024]


def test_until_metal_has_answered_its_limit_is_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mac(monkeypatch, STUDIO, Kernel(STUDIO))
    machine = HardwareProbe(ask_device=Raises(subprocess.TimeoutExpired("mlx_device", 30.0)))
    assert machine.settle().device_limit_bytes == 72 * GIB
    assert machine.read().accelerator == "metal"


def test_an_mlx_without_a_gpu_is_a_cpu_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """FITS HERE, routing and the card must not count on what no worker will use."""
    with_mac(monkeypatch, STUDIO, Kernel(STUDIO))
    found = probe(DeviceFacts("cpu")).settle()
    assert (found.accelerator, found.device_limit_bytes, found.gpus) == ("cpu", 0, 0)


# ---- Names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mac", "product"),
    [
        ("studio", "Mac Studio (M3 Ultra)"),
        ("max", "MacBook Pro (M3 Max)"),
        ("pro", "MacBook Pro (M1 Pro)"),
        ("ultra", "Mac Studio (M1 Ultra)"),
    ],
)
def test_a_mac_is_called_as_people_call_it(monkeypatch: pytest.MonkeyPatch, mac: str, product: str) -> None:
    found = MACS[mac]
    programs = with_mac(monkeypatch, found, Kernel(found))
    machine = HardwareProbe(ask_device=lambda: METAL)
    # system_profiler takes its time: until then it is what the kernel calls it.
    assert machine.read().product in (found.model, product)
    reading = machine.settle()
    assert (reading.product, reading.cpu, reading.gpu) == (product, found.chip, found.chip)
    assert (reading.cores, reading.performance_cores) == (found.cores, found.fast_cores)
    assert (reading.memory_bytes, reading.hostname) == (found.memory_bytes, "studio")
    machine.read()
    assert sorted(programs.asked) == ["sysctl", "system_profiler"]


@pytest.mark.parametrize(
    "said", ["", "{}", "[]", '{"SPHardwareDataType": []}', '{"SPHardwareDataType": [{}]}', "nonsense"]
)
def test_a_profile_of_no_use_names_nothing(said: str) -> None:
    assert facts.mac_product(said) == ""


def test_an_intel_mac_is_named_without_a_chip() -> None:
    said = profile(STUDIO).replace('"chip_type"', '"cpu_type"')
    assert facts.mac_product(said) == "Mac Studio"


# ---- Every probe may fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (psutil, "virtual_memory", RuntimeError(PSUTIL_FAILS)),
        (psutil, "virtual_memory", PermissionError(1, "not permitted")),
        (psutil, "cpu_times", RuntimeError("host_statistics(HOST_CPU_LOAD_INFO) failed")),
        (subprocess, "run", FileNotFoundError(2, "sysctl")),
        (subprocess, "run", subprocess.TimeoutExpired("sysctl", 2.0)),
        (os, "cpu_count", NotImplementedError()),
    ],
)
def test_a_probe_that_fails_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: Exception
) -> None:
    with_mac(monkeypatch, STUDIO, Kernel(STUDIO))
    if name != "cpu_count":
        monkeypatch.setattr(where, name, Raises(error))
    else:
        monkeypatch.setattr(where, name, lambda: None)
    found = probe().settle()
    assert found.memory_bytes == 96 * GIB
    assert found.available_bytes == AVAILABLE_BYTES
    assert found.cores >= 1
    assert found.accelerator == "metal"


# ---- Sockets ---------------------------------------------------------------------------------------------


class Transport:
    def __init__(self, sock: PeerSocket) -> None:
        self._sock = sock

    def get_extra_info(self, name: str) -> PeerSocket:
        assert name == "socket"
        return self._sock


@pytest.mark.parametrize(("version", "uid"), [(0, 501), (1, None)])
def test_a_mac_tells_whose_the_other_end_of_a_socket_is(
    monkeypatch: pytest.MonkeyPatch, version: int, uid: int | None
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    transport: Any = Transport(PeerSocket(501, version))
    assert peercred.peer_uid(transport) == uid


# ---- Elsewhere -------------------------------------------------------------------------------------------


def test_there_is_no_such_kernel_on_linux() -> None:
    if sys.platform == "darwin":
        kernel = darwin.kernel()
        assert kernel is not None
        assert (kernel.integer("hw.memsize") or 0) >= 8 * GIB
        assert 0 < (kernel.free_bytes() or 0) < psutil.virtual_memory().total
    else:
        assert darwin.kernel() is None


def test_linux_is_short_of_memory_where_programs_wait_and_little_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rest = "avg60=0.00 avg300=0.00 total=1\n"
    monkeypatch.setattr(darwin, "kernel", lambda: None)
    file = tmp_path / "proc/pressure/memory"
    file.parent.mkdir(parents=True)
    found = {}
    for free_gib in (1, 4, 20):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free_gib: psutil_memory(free))
        for some, full in ((0.0, 0.0), (12.0, 2.0), (60.0, 40.0)):
            file.write_text(f"some avg10={some:.2f} {rest}full avg10={full:.2f} {rest}")
            found[free_gib, some] = system_memory((), tmp_path).pressure
    short = {key: pressure for key, pressure in found.items() if pressure != "normal"}
    assert short == {(1, 12.0): "warning", (1, 60.0): "critical", (4, 12.0): "warning", (4, 60.0): "warning"}
    file.unlink()
    assert system_memory((), tmp_path).pressure == ""


def psutil_memory(free_gib: int) -> PsutilMemory:
    return PsutilMemory(48 * GIB, free_gib * GIB)
