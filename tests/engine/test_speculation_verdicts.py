"""Verdicts on the disk: found again where they still hold, and only there; what they say of costs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asking import folder_of

from fleetd.engine.load import loading
from fleetd.engine.protocol import Loading
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.settings import GroupMember, WorkerSettings
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.verdicts import VerdictKey, VerdictMember
from fleetd.errors import DiskFull
from fleetd.models import digest as digests
from fleetd.storage import durable

KEY = VerdictKey("ab" * 32, "cpu", "x86_64 AVX2", "Linux-6", {"mlx": "0.32"}, {"MKL_CBWR": "AVX2,STRICT"}, 2)
FOUND = ExactnessVerdict(8, ANY, "exact: blocks of up to 8 tokens", {1: 0.01, 4: 0.012, 8: 0.02})


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    KEY.cached(tmp_path).keep(FOUND)
    return tmp_path


def file_of(cache: Path) -> Path:
    (found,) = (cache / "verdicts").iterdir()
    return found


def test_a_verdict_is_found_again(kept: Path, tmp_path: Path) -> None:
    assert KEY.cached(kept).find() == FOUND
    assert KEY.cached(tmp_path).find() == FOUND
    other = ExactnessVerdict(text="declined: blocks of 2 tokens give other logits at 30 tokens of context")
    KEY.cached(kept).keep(other)
    assert KEY.cached(kept).find() == other


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "cd" * 32},
        {"device": "metal"},
        {"accelerator": "x86_64 AVX512"},
        {"system": "Linux-7"},
        {"versions": {"mlx": "0.33"}},
        {"environment": {"MKL_CBWR": "AVX2"}},
        {"environment": {}},
        {"cores": 4},
        {"fleetd": "0.0.1"},
        {"probe": 0},
        {"members": [VerdictMember(2, 4, "these layers", "this kind")]},
    ],
    ids=str,
)
def test_whatever_it_rests_on_may_change_it(kept: Path, change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(KEY, **change).cached(kept).find() is None
    assert KEY.cached(kept).find() == FOUND


def test_models_and_devices_have_a_file_each(kept: Path) -> None:
    others = [msgspec.structs.replace(KEY, digest="cd" * 32), msgspec.structs.replace(KEY, device="cuda")]
    for width, key in enumerate(others, 2):
        key.cached(kept).keep(ExactnessVerdict(width, 100))
    assert [verdict.width for key in (KEY, *others) if (verdict := key.cached(kept).find())] == [8, 2, 3]


def test_a_model_over_machines_has_a_verdict_of_its_own(kept: Path) -> None:
    """Kernels of each machine decide it: neither the whole model's holds, nor that of other machines."""

    def over(first: int, arithmetic: str, kind: str) -> VerdictKey:
        members = [GroupMember(first, 4, "s", "n", arithmetic, kind=kind)]
        return msgspec.structs.replace(
            KEY, members=VerdictKey.now("", "cpu", "", {}, members=members).members
        )

    group = over(2, "these layers", "M2")
    assert group.cached(kept).find() is None
    group.cached(kept).keep(msgspec.structs.replace(FOUND, width=4))
    assert (group.cached(kept).find() or FOUND).width == 4
    assert KEY.cached(kept).find() == FOUND
    for other in (over(1, "these layers", "M2"), over(2, "others", "M2"), over(2, "these layers", "M3")):
        assert other.cached(kept).find() is None
    # How a machine computes may be unknown: then it may have changed by the next load.
    for unknown in (over(2, "", "M2"), over(2, "these layers", "")):
        unknown.cached(kept).keep(FOUND)
        assert unknown.cached(kept).find() is None


def test_a_damaged_file_is_no_verdict(kept: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path)
    whole = file.read_bytes()
    assert b'"width":8' in whole
    damaged = [
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        b"\xff" + whole,
        whole.replace(b'"width":8', b'"width":9'),
    ]
    damaged += [b"[" * 60_000, b"{}", whole + b" " * (1 << 16)]
    for raw in damaged:
        file.write_bytes(raw)
        assert KEY.cached(kept).find() is None
    KEY.cached(kept).keep(FOUND)
    assert KEY.cached(kept).find() == FOUND


def test_what_cannot_be_read_or_written_costs_a_probe_and_no_more(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert KEY.cached(kept).find() is None

    def full(path: Path, data: bytes) -> None:
        raise DiskFull(os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "replace", full)
    KEY.cached(kept).keep(FOUND)
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    KEY.cached(blocked).keep(FOUND)
    assert KEY.cached(blocked).find() is None


def test_a_model_that_nobody_hashed_is_probed_each_time(tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(KEY, digest="")
    unknown.cached(tmp_path).keep(FOUND)
    assert unknown.cached(tmp_path).find() is None
    assert not list(tmp_path.iterdir())


def test_only_variables_that_choose_kernels_count() -> None:
    environ = {"MKL_CBWR": "AVX2", "MLX_SDPA_BLOCKS": "32", "HOME": "/home/a", "PATH": "x"}
    assert VerdictKey.now("", "cpu", "", {}, environ).environment == {
        "MKL_CBWR": "AVX2",
        "MLX_SDPA_BLOCKS": "32",
    }


def test_costs_are_those_of_today() -> None:
    """The machine is half as fast as when it was probed: so are wider passes, until they were seen."""
    assert FOUND.at_pace(0.02).seconds == pytest.approx({1: 0.02, 4: 0.024, 8: 0.04})
    nothing = ExactnessVerdict(text="declined: a ArraysCache cannot take tokens back")
    assert nothing.at_pace(0.02) == nothing


def test_the_second_load_does_not_probe(
    chain_path: Path, tmp_path: Path, cpu_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[ExactnessVerdict] = []
    probe = loading.probe

    def counting(*args: Any, **kwargs: Any) -> ExactnessVerdict:
        probed.append(probe(*args, **kwargs))
        return probed[-1]

    monkeypatch.setattr(loading, "probe", counting)
    record, said = tmp_path / "record.json", list[Loading]()
    settings = WorkerSettings("m", str(chain_path), str(record), device="cpu", cache=str(tmp_path))

    def load() -> loading.Loaded:
        return loading.load(settings, "cpu", said.append)

    load()
    assert len(probed) == 1  # and nobody knew which model it is
    digests.digest(folder_of(chain_path), record)
    first = load().verdict
    again = load()
    assert len(probed) == 2
    assert first.exact
    assert (again.verdict.width, again.verdict.context, again.verdict.text) == (
        first.width,
        first.context,
        first.text,
    )
    assert again.facts.speculation == first.text
    assert again.verdict.seconds[1] == pytest.approx(1 / again.facts.speed.decode_tok_s)
    shares = [s / again.verdict.seconds[1] for s in again.verdict.seconds.values()]
    assert shares == pytest.approx([s / first.seconds[1] for s in first.seconds.values()])
