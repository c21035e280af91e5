"""Quantised weights on a CPU: speed beside llama.cpp and beside float32, memory, and the first token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.figures import Figure, Taking, alternated, at_least, at_most, ratios
from bench.harness import card_models, prompts, random_gguf
from bench.harness.card_parts import MeasuredParts
from bench.harness.child import ROOT, Child
from bench.harness.daemon import MODEL, Daemon
from bench.harness.gguf_file import gguf
from bench.harness.samples import Samples
from fleetd.limits import GIB
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.models.gguf.conversion import import_gguf

LONG_TOKENS, DECODE_TOKENS = 4000, 128
# The larger model reads fewer tokens: all of them take minutes on one core.
_LARGER, _LARGER_TOKENS, _LARGER_DECODE = "dense-1.7b", 512, 48
_LARGEST = "dense-4b-4bit"
_ONE: dict[str, Any] = {
    "FLEETD_ENGINE_THREADS": "1",
    "FLEETD_SPECULATION_MODE": "off",
    "FLEETD_CACHE_DISK": "off",
}
_FLOAT32: dict[str, Any] = {"FLEETD_ENGINE_CPU_ARITHMETIC": "float32"}
_SHORT = [{"role": "user", "content": "Say hello."}]
_CACHE = ROOT / ".cache" / "bench"


def measure(runs: int) -> Taking:
    parts = MeasuredParts()
    return Taking(parts.of(_figures(parts, runs)), _HOW)


def _figures(parts: MeasuredParts, runs: int) -> Iterator[Figure]:
    with parts.part("the default model"):
        yield from _default(runs)
    with parts.part("the first token after a second load"):
        yield from _second_load(runs)
    with parts.part(_LARGER):
        yield from _larger(max(1, runs // 2))
    with parts.part(_LARGEST):
        yield from _largest()


# ---- The default model -----------------------------------------------------------------------------------


def _default(runs: int) -> Iterator[Figure]:
    opening, seen = prompts.encoded(MODEL, prompts.OPENINGS[1]), Samples()
    with (
        Daemon(**_ONE) as ours,
        Daemon(**_ONE, **_FLOAT32) as float32,
        Child("llama_cpp", str(gguf()), "1") as llama,
    ):
        for daemon in (ours, float32):
            daemon.warm()
        llama.ask(tokens=opening, max_tokens=8)
        for run in range(runs):
            long = prompts.tokens(MODEL, 8100 + run, LONG_TOKENS)
            for side in alternated(run, ("ours", "float32", "llama.cpp")):
                if side == "llama.cpp":
                    _ask_llama(llama, opening, DECODE_TOKENS, long, seen)
                else:
                    _ask(ours if side == "ours" else float32, side, opening, DECODE_TOKENS, long, seen)
    yield from _speeds("the default model", LONG_TOKENS, seen, decode_bar=0.45)
    yield Figure(
        f"The default model: prefill of {LONG_TOKENS:,} tokens over float32",
        "x",
        seen.ratios(("ours", "prefill"), ("float32", "prefill")),
        at_least(1.5),
    )
    yield Figure(
        "The default model: decode over float32", "x", seen.ratios(("ours", "decode"), ("float32", "decode"))
    )


def _ask(
    daemon: Daemon, side: str, opening: list[int], count: int, long: list[int], seen: Samples, model: str = ""
) -> None:
    more: dict[str, Any] = {"model": model} if model else {}
    seen[side, "prefill"].append(len(long) / daemon.complete(long, 1, **more).began_s)
    seen[side, "decode"].append(daemon.complete(opening, count, **more).rate)


def _ask_llama(llama: Child, opening: list[int], count: int, long: list[int], seen: Samples) -> None:
    seen["llama.cpp", "prefill"].append(len(long) / llama.ask(tokens=long, max_tokens=1)["wall_s"])
    said = llama.ask(tokens=opening, max_tokens=count)
    seen["llama.cpp", "decode"].append((said["predicted_n"] - 1) / said["decode_s"])


def _speeds(name: str, tokens: int, seen: Samples, decode_bar: float) -> Iterator[Figure]:
    name = name[0].upper() + name[1:]
    for what, title, bar in (
        ("decode", "decode", at_least(decode_bar)),
        ("prefill", f"prefill of {tokens:,} tokens", None),
    ):
        ours, theirs = seen["ours", what], seen["llama.cpp", what]
        yield Figure(f"{name}: {title} over llama.cpp, one thread each", "x", ratios(ours, theirs), bar)
        yield Figure(f"{name}: {title}", "tok/s", ours)
        yield Figure(f"{name}: {title}, llama.cpp", "tok/s", theirs)


def _second_load(runs: int) -> Iterator[Figure]:
    seen = Samples()
    with Daemon() as daemon:
        daemon.warm()
        for _ in range(runs):
            daemon.control("POST", "/fleet/v1/models/unload", {"model": DEFAULT_MODEL})
            seen.add(began_s=daemon.chat(_SHORT, 4).began_s)
    title = "The first token of a short chat, with a load of files that are known"
    yield Figure(title, "s", seen["began_s"], at_most(1.5))


# ---- Larger models ---------------------------------------------------------------------------------------


def _larger(runs: int) -> Iterator[Figure]:
    file, models = _CACHE / f"{_LARGER}.gguf", _CACHE / "quantised"
    folder, opening, seen = models / _LARGER, prompts.encoded(MODEL, prompts.OPENINGS[1]), Samples()
    _make(file, folder)
    with Daemon(models=models, **_ONE) as ours, Child("llama_cpp", str(file), "1") as llama:
        ours.warm(_LARGER)
        llama.ask(tokens=opening, max_tokens=2)
        for run in range(runs):
            long = prompts.tokens(MODEL, 8200 + run, _LARGER_TOKENS)
            for side in alternated(run, ("ours", "llama.cpp")):
                if side == "ours":
                    _ask(ours, side, opening, _LARGER_DECODE, long, seen, _LARGER)
                else:
                    _ask_llama(llama, opening, _LARGER_DECODE, long, seen)
        resident = worker_of(ours).memory_info().rss
    yield from _speeds(_LARGER, _LARGER_TOKENS, seen, decode_bar=0.8)
    size = weights_bytes(folder)
    yield Figure(
        f"{_LARGER}: resident memory of the worker over the file",
        "x",
        [resident / size],
        at_most(1.6),
        note=f"{resident / 1e6:,.0f} MB after answers, {size / 1e6:,.0f} MB of weights in its folder",
    )


def _largest() -> Iterator[Figure]:
    models = card_models.made(_LARGEST)
    with Daemon(models=models, **_ONE) as daemon:
        begun_s = daemon.complete([1, 2, 3, 4], 4, model=_LARGEST).began_s
        heard = daemon.complete(prompts.encoded(MODEL, prompts.OPENINGS[1]), 16, model=_LARGEST)
        peak = peak_bytes(worker_of(daemon).pid)
    size = weights_bytes(models / _LARGEST)
    note = f"{size / 1e9:.1f} GB of weights in its folder; loaded and answered after {begun_s:.0f} s; "
    note += f"{heard.rate:.1f} tok/s on one thread"
    title = f"{_LARGEST}: the most memory that its worker had, of 8 GiB"
    yield Figure(title, "%", [peak / (8 * GIB)], at_most(1.0), note=note)


def _make(file: Path, folder: Path) -> None:
    """The GGUF file, and the model folder that fleetd makes of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        fresh = file.with_suffix(".new")
        random_gguf.write(fresh, file.stem)
        fresh.replace(file)
    if not (folder / "config.json").exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        import_gguf(file, part)
        part.rename(folder)


def worker_of(daemon: Daemon) -> psutil.Process:
    """The one worker that has a model. Raises ValueError if there is not exactly one."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    (worker,) = (child for child in children if "fleetd.engine.worker" in child.cmdline())
    return worker


def peak_bytes(pid: int) -> int:
    """The most that a process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


_HOW = (
    "Daemons with one thread for their workers, without drafts and kept prompts, through HTTP; llama.cpp is "
    "the wheel `xllamacpp`, in a process of its own with one thread, no HTTP, on the file that the model "
    f"was imported from. The default model: {DECODE_TOKENS} tokens after a short prompt, and a prompt of its "
    f"own for each run. {_LARGER} has Qwen3-1.7B's shape and random weights in Q4_0, {_LARGEST} Qwen3-4B's "
    "shape and vocabulary, and random 4-bit weights. Resident memory is the worker's, with the keys and "
    "values of what was asked."
)
