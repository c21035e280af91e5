"""What a fleet is for: answers that another machine computes, and models that come from it."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.models.safetensors_write import PlannedTensor, write_safetensors

_SERVING, _ASKING = "serving", "asking"
_PROMPT_TOKENS, _PAIRS = 64, 20
_ANSWER_TOKENS = 24
_BIG = "big-model"
_PIECE_BYTES, _PIECES = 64 << 20, 32
_BYTES = _PIECES * _PIECE_BYTES
_MOST_COPIES = 3
_KNOWN_WITHIN_S = 120.0
_SAMPLE_S = 0.01


def measure(runs: int) -> Measured:
    seen = Samples()
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        empty, full = Path(folder) / "empty", Path(folder) / "full"
        with Fleet([_SERVING, _ASKING], models={_ASKING: empty}) as fleet:
            fleet.start_all()
            fleet[_SERVING].warm()
            _until_has(fleet, DEFAULT_MODEL, "loaded")
            for run in range(runs):
                _route(fleet, run, seen)
        _make_big_model(full / _BIG)
        with Fleet([_SERVING, _ASKING], models={_SERVING: full, _ASKING: empty}) as fleet:
            fleet.start_all()
            _until_has(fleet, _BIG, "installed")
            for _ in range(min(runs, _MOST_COPIES)):
                _copy(fleet, seen)
    return Measured(_figures(seen), _HOW)


def _until_has(fleet: Fleet, model: str, state: str) -> None:
    """Until the asking machine knows that the other one has the model in this state, and which files."""

    def known() -> bool:
        models = fleet.peer(_ASKING, _SERVING)["models"]
        return any(m["name"] == model and m["digest"] and m["state"] == state for m in models)

    wait_for(known, _KNOWN_WITHIN_S, 0.1, lambda: f"{model} never was {state}:\n{fleet[_SERVING].log()}")


# ---- Answers ---------------------------------------------------------------------------------------------


def _route(fleet: Fleet, run: int, seen: Samples) -> None:
    """One prompt, asked in turns here and through the other machine."""
    prompt = prompts.tokens(MODEL, 9000 + run, _PROMPT_TOKENS)
    # From the second time on nearly all of the prompt is in the prefix cache, whichever way it comes.
    first = _ask(fleet, _SERVING, prompt, _ANSWER_TOKENS)
    found: dict[str, list[Heard]] = {_SERVING: [], _ASKING: []}
    for turn in range(_PAIRS):
        for name in alternated(turn, (_SERVING, _ASKING)):
            found[name].append(_ask(fleet, name, prompt, 1))
    there, routed = found[_SERVING], found[_ASKING]
    added_s = [b.beside_s - a.beside_s for a, b in zip(there, routed, strict=True)]
    second = _ask(fleet, _ASKING, prompt, _ANSWER_TOKENS)
    seen.add(
        there_ms=1000 * statistics.median(heard.began_s for heard in there),
        routed_ms=1000 * statistics.median(heard.began_s for heard in routed),
        added_ms=1000 * statistics.median(added_s),
        same=float((first.text, first.count) == (second.text, second.count)),
    )


def _ask(fleet: Fleet, name: str, prompt: list[int], max_tokens: int) -> Heard:
    with fleet[name].stream("completions", prompt=prompt, max_tokens=max_tokens) as stream:
        expected = "local" if name == _SERVING else "remote"
        if not stream.plan.startswith(expected):
            raise RuntimeError(f"the answer at {name} was to be {expected}, not {stream.plan!r}")
        return stream.hear()


# ---- Models ----------------------------------------------------------------------------------------------


def _make_big_model(folder: Path) -> None:
    """A folder that passes for a model until it is loaded."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    values = np.random.default_rng(1).integers(0, 1 << 32, _PIECE_BYTES // 4, dtype=np.uint32)
    pieces = [
        PlannedTensor.whole(f"piece-{n:02}", "U32", values.shape, lambda: values) for n in range(_PIECES)
    ]
    write_safetensors(folder / "model.safetensors", pieces)


def _copy(fleet: Fleet, seen: Samples) -> None:
    """Pull the big model from the other machine, and remove it again."""
    with _growth(fleet[_SERVING]) as there, _growth(fleet[_ASKING]) as here:
        begun = time.perf_counter()
        told = fleet[_ASKING].control("POST", "/fleet/v1/models/pull", {"model": _BIG}).decode()
        took_s = time.perf_counter() - begun
    if '"done":true' not in told or "copy.begins" not in fleet[_ASKING].log():
        raise RuntimeError(f"the model was not copied: {told[-500:]}\n{fleet[_ASKING].log()}")
    seen.add(mb_s=_BYTES / 1e6 / took_s, sending_mb=there[0] / 1e6, receiving_mb=here[0] / 1e6)
    fleet[_ASKING].control("POST", "/fleet/v1/models/remove", {"model": _BIG})


@contextmanager
def _growth(daemon: Daemon) -> Iterator[list[int]]:
    """The most bytes by which the daemon's resident memory grew meanwhile; its children are not in it."""
    process, over = psutil.Process(daemon.process.pid), threading.Event()
    before, gained = process.memory_info().rss, [0]

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            gained[0] = max(gained[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield gained
    finally:
        over.set()
        watcher.join()


def _figures(seen: Samples) -> list[Figure]:
    same = "Routed answers equal to the computing machine's own"
    figures = [
        Figure("TTFT that routing adds on loopback", "ms", seen["added_ms"], at_most(5)),
        Figure("TTFT, asked at the machine that computes", "ms", seen["there_ms"]),
        Figure("TTFT, asked at the other one", "ms", seen["routed_ms"]),
        Figure(same, "%", seen["same"], at_least(1), of="worst"),
        Figure("Model copied from a peer, verified and installed", "MB/s", seen["mb_s"]),
    ]
    for side in ("sending", "receiving"):
        title = f"Memory the {side} daemon gains while {_BYTES >> 30} GiB pass"
        figures.append(Figure(title, "MB", seen[f"{side}_mb"], at_most(16), of="worst"))
    return figures


_HOW = (
    "Routed: two daemons on loopback, the default model loaded at one of them and absent at the other. A "
    f"prompt of {_PROMPT_TOKENS} tokens is asked {_PAIRS} times at each in turns, after a first time that "
    "puts it into the prefix cache. What routing adds is the median of the differences in TTFT, one value "
    "per prompt, less the engine's own time for each prompt: both ways have the same engine do the same, "
    "but its time varies by more than the bar from one request to the next. Equal: text and length of "
    f"{_ANSWER_TOKENS} greedy tokens.\n\n"
    f"Copied: a model of {_BYTES >> 30} GiB, from the request to the answer that it is installed: sealed, "
    "received, hashed, written to the same disk, moved into place. Memory is the resident set of the daemon "
    "processes, sampled every 10 ms; the processes that carry the bytes are not in it."
)
