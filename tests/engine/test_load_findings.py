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
from fleetd.engine.load_findings import FindingsKey, LoadFindings
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
    again = load()
    assert computed == []
    assert stages == ["verifying", "reading", "reading the tokenizer", "warming up"]
    # Speeds in doubt are measured again in idle time, and the next load has those.
    again.keep_speeds(Speeds(300.0, 12.0, 1e-6, 0.05))
    assert load().facts.prefill_tok_s == 300.0
    assert computed == []
    changing = dict.fromkeys(("load_s", "kv_budget_bytes"), 0)
    assert msgspec.structs.replace(again.facts, **changing) == msgspec.structs.replace(
        first.facts, **changing
    )
    assert again.together == first.together
    assert (again.sparse is None) == (first.sparse is None)
