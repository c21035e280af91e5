"""What a load finds out is stored: the next load of the same files computes none of it again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asking import folder_of

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.load import loading
from fleetd.engine.load.load_findings import FindingsKey, LoadFindings, block_basis
from fleetd.engine.measure.calibrate import Measurement, calibration
from fleetd.engine.measure.idle_calibration import IdleCalibration
from fleetd.engine.protocol import Arithmetic, Loading
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill import sharable
from fleetd.engine.sparse_prefill import sparse
from fleetd.engine.speculation.verdicts import VerdictKey
from fleetd.models import digest as digests

MODEL = VerdictKey("ab" * 32, "cpu", "x86_64 AVX2", "Linux-6", {"mlx": "0.32"}, {}, 2)
KEY = FindingsKey(MODEL, {"numpy": "2"}, exact=True)
ARITHMETIC = Arithmetic("x86_64 AVX2", "float32", {"mlx": "0.32"}, layers=[b"12345678"])
FOUND = LoadFindings(True, "", ARITHMETIC, Measurement(MeasuredSpeed(300.0, 12.0, 1e-6, 0.05)), "cafe")


@pytest.mark.parametrize(
    "change",
    [
        {"model": msgspec.structs.replace(MODEL, digest="cd" * 32)},
        {"model": msgspec.structs.replace(MODEL, versions={"mlx": "0.33"})},
        {"beside": {"numpy": "3"}},
        {"exact": False},
        {"findings": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_findings_hold_for_what_they_were_found_with(tmp_path: Path, change: dict[str, Any]) -> None:
    KEY.cached(tmp_path).keep(FOUND)
    assert KEY.cached(tmp_path).find() == FOUND
    assert msgspec.structs.replace(KEY, **change).cached(tmp_path).find() is None


def test_findings_of_an_unknown_model_are_not_stored(tmp_path: Path) -> None:
    unknown = FindingsKey(msgspec.structs.replace(MODEL, digest=""), {}, exact=True)
    unknown.cached(tmp_path).keep(FOUND)
    assert not list(tmp_path.iterdir())


def of_machine(**model: Any) -> FindingsKey:
    return msgspec.structs.replace(KEY, model=msgspec.structs.replace(MODEL, **model))


@pytest.mark.parametrize(
    "change",
    [
        {"cores": 64},
        {"system": "Linux-7"},
        {"fleetd": "9.9"},
        {"environment": {"OMP_NUM_THREADS": "1"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_machines_that_compute_the_same_bytes_name_their_blocks_alike(change: dict[str, Any]) -> None:
    assert block_basis(of_machine(**change), ARITHMETIC) == block_basis(KEY, ARITHMETIC) != b""
    # But not where nothing shows it: a CPU that rounds by its threads, layers without a fingerprint.
    inexact = (msgspec.structs.replace(each, exact=False) for each in (of_machine(**change), KEY))
    assert len({block_basis(each, ARITHMETIC) for each in inexact}) == 2
    for unknown in (None, msgspec.structs.replace(ARITHMETIC, layers=[])):
        assert block_basis(of_machine(**change), unknown) != block_basis(KEY, unknown)


@pytest.mark.parametrize(
    "other",
    [
        of_machine(digest="cd" * 32),
        of_machine(device="metal"),
        of_machine(accelerator="x86_64 AVX512"),
        of_machine(versions={"mlx": "0.33"}),
        of_machine(environment={"MLX_METAL_FAST": "1"}),
        msgspec.structs.replace(KEY, beside={"numpy": "3"}),
    ],
)
def test_what_may_change_bytes_changes_the_names_of_blocks(other: FindingsKey) -> None:
    assert block_basis(other, ARITHMETIC) != block_basis(KEY, ARITHMETIC)


def test_layers_that_make_other_numbers_and_files_that_are_unknown_share_no_blocks() -> None:
    other = msgspec.structs.replace(ARITHMETIC, layers=[b"87654321"])
    assert block_basis(KEY, other) != block_basis(KEY, ARITHMETIC)
    assert block_basis(of_machine(digest=""), ARITHMETIC) == b""


_KEYS = """
import hashlib, sys
from fleetd.engine.cpu import products
if not products.preload_blas():
    sys.exit(print("none"))
import mlx.core as mx
from fleetd.engine.cpu import mlx_functions
mx.set_default_device(mx.cpu)
mlx_functions.install()
import tiny_architectures, tiny_models
from mlx_lm.models.cache import make_prompt_cache
model = tiny_architectures.tiny("llama", num_hidden_layers=2, vocab_size=tiny_models.VOCAB)
cache, prompt = make_prompt_cache(model), tiny_models.prompt(1500)
for start in range(0, len(prompt), 256):
    mx.eval(model(mx.array([prompt[start : start + 256]]), cache=cache))
arrays = [array for layer in cache for array in (layer.keys, layer.values)]
print(hashlib.sha256(b"".join(bytes(memoryview(mx.contiguous(each))) for each in arrays)).hexdigest())
"""


@pytest.mark.long
def test_the_number_of_threads_changes_no_bytes_of_keys_and_values() -> None:
    found = set()
    for threads in ("1", "2", "7"):
        support = str(Path(__file__).parents[1] / "support")
        environment = os.environ | {"MKL_NUM_THREADS": threads, "PYTHONPATH": support}
        done = subprocess.run(
            [sys.executable, "-c", _KEYS], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    if found == {"none"}:
        pytest.skip("MKL could not be loaded: a CPU's bytes are not exact here")
    assert len(found) == 1


def test_the_second_load_only_reads_and_warms_up(
    chain_path: Path, tmp_path: Path, cpu_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []

    def count(module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            computed.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for module, name in (
        (loading, "calibrate"),
        (loading, "decodes_together"),
        (loading, "probe"),
        (loading, "_vocabulary_hash"),
        (sharable, "arithmetic"),
        (sparse, "check_positions"),
    ):
        count(module, name)
    record = tmp_path / "record.json"
    settings = WorkerSettings("m", str(chain_path), str(record), device="cpu", cache=str(tmp_path))
    digests.digest(folder_of(chain_path), record)
    stages: list[str] = []

    def load() -> loading.Loaded:
        computed.clear()
        stages.clear()

        def report(loading: Loading) -> None:
            if loading.stage not in stages:
                stages.append(loading.stage)

        return loading.load(settings, "cpu", report)

    first = load()
    assert sorted(computed) == sorted(
        ["_vocabulary_hash", "arithmetic", "calibrate", "check_positions", "decodes_together", "probe"]
    )
    assert stages[-2:] == ["measuring", "probing for exactness"]
    again = load()
    assert computed == []
    assert stages == ["verifying", "reading", "reading the tokenizer", "warming up"]
    # Speeds in doubt are measured again in idle time, and the next load has those.
    again.keep_measured(Measurement(MeasuredSpeed(300.0, 12.0, 1e-6, 0.05)))
    assert load().facts.speed.prefill_tok_s == 300.0
    assert computed == []
    # Shares of what this machine has free at the moment, and how long it took.
    changing = dict.fromkeys(("load_s", "kv_budget_bytes", "prefix_budget_bytes"), 0)
    assert msgspec.structs.replace(again.facts, **changing) == msgspec.structs.replace(
        first.facts, **changing
    )
    assert again.facts.prefix_budget_bytes == again.shares.prefix > 0
    assert again.together == first.together
    assert (again.sparse is None) == (first.sparse is None)


def test_figures_in_doubt_are_measured_again_in_idle_time_and_kept_for_the_next_load(
    chain_path: Path, tmp_path: Path, cpu_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubtful = Measurement(MeasuredSpeed(1.0, 1.0, doubt="other programs had 60% of the processor"))
    monkeypatch.setattr(loading, "calibrate", lambda *args: doubtful)
    monkeypatch.setattr(limits, "CALIBRATE_AGAIN_S", 0.0)
    record = tmp_path / "record.json"
    settings = WorkerSettings("m", str(chain_path), str(record), device="cpu", cache=str(tmp_path))
    digests.digest(folder_of(chain_path), record)
    loaded = loading.load(settings, "cpu", lambda _: None)
    facts = loaded.facts
    assert (facts.speed.doubt, facts.speed.prefill_tok_s) == (doubtful.speed.doubt, 1.0)
    measured: list[Any] = []
    idle = IdleCalibration(
        lambda: calibration(loaded.model, "cpu", facts.vocab_size, facts.shape.context_tokens),
        facts,
        measured.append,
        keep=loaded.keep_measured,
    )
    while not measured:
        idle.turn(idle=True)
    assert measured[0].speed.prefill_tok_s > 1.0
    again = loading.load(settings, "cpu", lambda _: None).facts
    assert again.speed == measured[0].speed


@pytest.mark.parametrize("replaced", [False, True])
def test_prompts_are_kept_as_soon_as_the_files_of_their_model_are_hashed(
    chain_path: Path, tmp_path: Path, cpu_installed: None, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(loading, "calibrate", lambda *args: Measurement(MeasuredSpeed(300.0, 12.0)))
    model, record = shutil.copytree(chain_path, tmp_path / "m"), tmp_path / "record.json"
    settings = WorkerSettings(
        "m", str(model), str(record), device="cpu", cache=str(tmp_path), speculation="off"
    )
    early = loading.load(settings, "cpu", lambda _: None).basis
    assert early.value == b""
    if replaced:
        # Then what is hashed is not what was loaded.
        config = model / "config.json"
        config.write_text(config.read_text() + "\n")
    digests.digest(folder_of(model), record)
    early.look()
    later = loading.load(settings, "cpu", lambda _: None).basis
    assert later.value
    assert early.value == (b"" if replaced else later.value)
