"""``python -m fleetd.proof --home DIR --model NAME``: measure, one JSON object per line on stdout.

With ``--steps decode=6 widths=8`` only these are taken, in this order, each for so many seconds.

    {"began": NAME}                                   a step begins
    {"step": {...}, "found": {FIELD: value, ...}}     it ended; fields of ``HardwareProof``

A step that fails ends alone. Started by `fleetctl doctor --prove`, which collects the lines: whatever ends
this process, the steps before it are kept. Texts of errors go to stderr only, because they may hold names.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fleetd import config
from fleetd.control.hardware_proof import MachineProof, MemoryProof, ModelProof, ProofStep
from fleetd.engine.settings import WorkerSettings
from fleetd.hardware.other_load import CpuReading
from fleetd.hardware.probe import HardwareProbe
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.models.model_store import ModelStore
from fleetd.proof import sleep_assertion
from fleetd.proof.local_worker import LocalWorker
from fleetd.storage import paths

# Seconds for each step that can be cut short; together with the load they stay within ten minutes.
BUDGETS_S = {"widths": 180.0, "chunks": 90.0, "prefill": 90.0, "decode": 90.0, "shared": 60.0}


class ProofLines:
    """Runs steps and writes a line before and after each."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def step(self, name: str, measure: Callable[[], dict[str, Any]]) -> bool:
        """Measure and write; False if there is no result."""
        self._line({"began": name})
        begun, found, error, skipped = time.monotonic(), dict[str, Any](), "", ""
        try:
            found = measure()
        except ModuleNotFoundError:
            skipped = "not available in this version"
        except Exception as failed:  # one step's boundary: the others still tell something
            sys.stderr.write(f"{name}: {type(failed).__name__}: {failed}\n")
            error = type(failed).__name__
        self._line({"step": ProofStep(name, time.monotonic() - begun, error, skipped), "found": found})
        return not (error or skipped)

    def _line(self, value: Any) -> None:
        self._out.write(msgspec.json.encode(value).decode() + "\n")
        self._out.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fleetd.proof")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--steps", nargs="*", type=_budget, default=BUDGETS_S.items(), metavar="NAME=SECONDS",
        help=f"only these, in this order; of {', '.join(BUDGETS_S)}",
    )  # fmt: skip
    arguments = parser.parse_args()
    # Libraries print what they like; the lines have the pipe for themselves.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return _measure(ProofLines(out), arguments.home, arguments.model, dict(arguments.steps))


def _budget(text: str) -> tuple[str, float]:
    """A step and its seconds. Raises ValueError for anything else."""
    name, _, seconds = text.partition("=")
    if name not in BUDGETS_S:
        raise ValueError(name)
    return name, float(seconds)


def _measure(proof: ProofLines, home: Path, model: str, budgets_s: Mapping[str, float]) -> int:
    before = CpuReading.now()
    proof.step("sleep assertion", sleep_assertion.measure)
    workers: list[LocalWorker] = []

    def load() -> dict[str, Any]:
        begun = time.monotonic()
        workers.append(LocalWorker(_settings(paths.resolve(home), model)))
        loaded = _loaded(workers[0], time.monotonic() - begun)
        # Again at the end; this much is known whatever ends the process.
        return loaded | _machine(workers[0], before)

    if not proof.step("load", load):
        return 1
    worker = workers[0]
    # Not before a worker has set up what MLX binds to.
    from fleetd.proof import measurements

    steps: dict[str, tuple[str, Callable[[LocalWorker, float], Iterable[Any]]]] = {
        "widths": ("widths", measurements.widths),
        "chunks": ("chunks", measurements.chunks),
        "prefill": ("speeds", measurements.prefill),
        "decode": ("speeds", measurements.decode),
        "shared": ("shared", measurements.shared),
    }
    for name, within_s in budgets_s.items():
        field, measured = steps[name]

        def run(
            field: str = field,
            measured: Callable[[LocalWorker, float], Iterable[Any]] = measured,
            within_s: float = within_s,
        ) -> dict[str, Any]:
            return {field: list(measured(worker, within_s))}

        proof.step(name, run)
    proof.step("machine", lambda: _machine(worker, before))
    return 0


def _settings(home: paths.HomeFolder, model: str) -> WorkerSettings:
    """The worker's settings as this home's daemon has them, but nothing kept from before is used."""
    settings = config.load(home.config)
    engine = settings.engine
    store = ModelStore(
        Path(settings.models.dir).expanduser().absolute() if settings.models.dir else home.models,
        hub_cache=Path(settings.models.hub_cache).expanduser() if settings.models.hub_cache else None,
    )
    folder = store.resolve(model or settings.models.default)
    return WorkerSettings(
        name=folder.name,
        path=str(folder.path),
        record=str(store.record_path(folder)),
        device=engine.device,
        threads=engine.threads,
        cpu_arithmetic=engine.cpu_arithmetic,
        max_memory_bytes=engine.max_memory_bytes,
        memory_fraction=engine.memory_fraction,
        overcommit=engine.overcommit,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        speculation=settings.speculation.mode,
    )


def _loaded(worker: LocalWorker, load_s: float) -> dict[str, Any]:
    facts = worker.facts
    return {
        "model": ModelProof(
            # Texts of errors may hold names.
            replace(facts.shape, unshareable=""),
            facts.speed,
            facts.speculation,
            load_s,
        )
    }


def _memory(worker: LocalWorker) -> MemoryProof:
    import mlx.core as mx

    reading, facts = HardwareProbe().settle(), worker.facts
    # What the load had before it divided it.
    usable = facts.shape.weights_bytes + WORKING_BYTES + facts.kv_budget_bytes + worker.loaded.shares.prefix
    return MemoryProof(
        total_bytes=reading.memory_bytes,
        available_bytes=reading.available_bytes,
        device_limit_bytes=int(mx.device_info().get("max_recommended_working_set_size", 0)),
        wired_limit_bytes=reading.wired_limit_bytes,
        usable_bytes=usable,
        peak_bytes=int(mx.get_peak_memory()),
    )


def _machine(worker: LocalWorker, before: CpuReading | None) -> dict[str, Any]:
    from fleetd.engine.shared_prefill.sharable import accelerator_name

    reading, after = HardwareProbe().settle(), CpuReading.now()
    machine = MachineProof(
        platform=reading.platform,
        python=platform.python_version(),
        product=reading.product,
        cpu=reading.cpu,
        accelerator=accelerator_name(worker.facts.device),
        device=worker.facts.device,
        cores=reading.cores,
        versions=dict(worker.facts.versions),
        others_share=after.others_share(before) if after is not None and before is not None else None,
    )
    return {"machine": machine, "memory": _memory(worker)}


if __name__ == "__main__":
    sys.exit(main())
