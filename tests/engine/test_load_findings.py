"""What a load finds out is stored: the next load of the same files computes none of it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asking import folder_of

from fleetd.engine import loading
from fleetd.engine.calibrate import Speeds
from fleetd.engine.load_findings import FindingsKey, LoadFindings, OtherWork
from fleetd.engine.protocol import Arithmetic, Loading
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill import sharable
from fleetd.engine.sparse_prefill import sparse
from fleetd.engine.speculation.verdicts import VerdictKey
from fleetd.models import digest as digests

MODEL = VerdictKey("ab" * 32, "cpu", "x86_64 AVX2", "Linux-6", {"mlx": "0.32"}, {}, 2)
KEY = FindingsKey(MODEL, {"numpy": "2"}, exact=True)
ARITHMETIC = Arithmetic("x86_64 AVX2", "float32", {"mlx": "0.32"}, layers=[b"12345678"], sparse="")
FOUND = LoadFindings(True, "", ARITHMETIC, Speeds(300.0, 12.0, 1e-6, 0.05), "cafe")


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


def test_this_process_is_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [(100.0, 60.0, 10.0), (110.0, 69.0, 17.0)]
    monkeypatch.setattr(OtherWork, "_read", staticmethod(lambda: readings.pop(0)))
    assert OtherWork().share == pytest.approx(0.2)
    monkeypatch.undo()
    assert 0 <= OtherWork().share <= 1


def test_findings_of_an_unknown_model_are_not_stored(tmp_path: Path) -> None:
    unknown = FindingsKey(msgspec.structs.replace(MODEL, digest=""), {}, exact=True)
    unknown.cached(tmp_path).keep(FOUND)
    assert not list(tmp_path.iterdir())


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
        (sparse, "_check_model"),
    ):
        count(module, name)
    record = tmp_path / "record.json"
    # Of the first measurement, at the second and at the third load, and of the third one's measurement.
    shares = [0.5, 0.5, 0.1, 0.1]
    monkeypatch.setattr(OtherWork, "share", property(lambda others: shares.pop(0)))
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
        ["_check_model", "_vocabulary_hash", "arithmetic", "calibrate", "decodes_together", "probe"]
    )
    assert stages[-2:] == ["measuring", "probing for exactness"]
    # The first one's speeds were those of a busy machine, which it still is at the second.
    load()
    assert computed == []
    load()
    assert computed == ["calibrate"]
    assert stages[-1] == "measuring"
    again = load()
    assert computed == []
    assert stages == ["verifying", "reading", "reading the tokenizer", "warming up"]
    speeds = ("prefill_tok_s", "decode_tok_s", "prefill_context_s", "prefill_fixed_s")
    changing = dict.fromkeys(("load_s", "kv_budget_bytes", *speeds), 0)
    assert msgspec.structs.replace(again.facts, **changing) == msgspec.structs.replace(
        first.facts, **changing
    )
    assert again.together == first.together
    assert (again.sparse is None) == (first.sparse is None)
