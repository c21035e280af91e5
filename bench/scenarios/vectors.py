"""Vectors of texts: one machine on one core, two against one, and a chat beside them."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts
from bench.harness.cores import starting_on, why_no_cores
from bench.harness.daemon import MODEL, MODELS, Daemon
from bench.harness.fleet import Fleet
from bench.harness.onnx_bert import OnnxBert
from bench.harness.samples import Samples, wait_for
from fleetd.models.model_store import ModelStore
from fleetd.models.pull import process

_MINILM = "all-minilm-l6-v2"
_HERE, _THERE = "here", "there"
# The model's longest text has 256 tokens.
_LENGTHS = {16: 256, 128: 64, 254: 32}
_CORPUS = 1000
_ONNX_BATCH = 32
# Texts that are asked for one by one, and how many of them at once.
_SINGLES, _AT_ONCE = 256, 32
_WORDS = [
    "the",
    "quay",
    "where",
    "ships",
    "lie",
    "at",
    "night",
    "has",
    "a",
    "long",
    "wall",
    "of",
    "stone",
    "and",
    "a",
    "light",
    "that",
    "turns",
]
_WITHIN_S, _POLL_S = 120.0, 0.1
_ANSWER_S = 600.0
_IDLE_S = 10.0


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two workers cannot have a core each."""
    if why := why_no_cores():
        raise RuntimeError(why)
    process.pull(_MINILM, ModelStore(MODELS), lambda progress: None)
    seen = Samples()
    cores = sorted(os.sched_getaffinity(0))
    with Fleet([_HERE, _THERE]) as fleet:
        fleet.start_all()
        for name, core in zip((_HERE, _THERE), cores, strict=False):
            with starting_on({core}, pid=fleet[name].process.pid):
                _embed(fleet[name], ["one"], local_only=True)
        wait_for(lambda: _known(fleet), _WITHIN_S, _POLL_S, fleet[_HERE].log)
        _embed(fleet[_HERE], _texts(_CORPUS // 4, 64, 0))
        onnx = _onnxruntime()
        for run in range(runs):
            for length, count in _LENGTHS.items():
                took_s = _embed(fleet[_HERE], _texts(count, length, run), local_only=True)
                seen[length].append(count / took_s)
                seen[length, "onnx"] += _onnx_rate(onnx, _texts(count, length, run))
            corpus = _texts(_CORPUS, 64, 100 + run)
            for side in alternated(run, ("one", "two")):
                seen[side].append(_embed(fleet[_HERE], corpus, local_only=side == "one"))
            for side in alternated(run, ("together", "singly")):
                embed = _singly if side == "singly" else partial(_embed, local_only=True)
                seen[side].append(
                    embed(fleet[_HERE], _texts(_SINGLES, 64, 200 + 2 * run + (side == "singly")))
                )
            seen["idle"].append(_idle_share(fleet[_THERE]))
        _chats(fleet[_HERE], runs, seen)
    return Measured(_figures(seen), _HOW)


def _texts(count: int, tokens: int, seed: int) -> list[str]:
    """Different texts of about so many tokens; every word is one."""
    words = len(_WORDS)
    return [
        " ".join(_WORDS[(seed + number * 7 + at * (number % 5 + 1)) % words] for at in range(tokens - 2))
        for number in range(count)
    ]


def _embed(daemon: Daemon, texts: list[str], **fields: Any) -> float:
    """Seconds until all vectors are there."""
    body = {"model": _MINILM, "input": texts, "encoding_format": "base64", "truncate": True, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=_ANSWER_S)
    headers = {"Authorization": f"Bearer {daemon.token}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        begun = time.perf_counter()
        connection.request("POST", "/v1/embeddings", json.dumps(body), headers)
        with connection.getresponse() as response:
            told = response.read()
            if response.status != 200:
                raise RuntimeError(f"/v1/embeddings: {response.status} {told[:500]!r}")
        return time.perf_counter() - begun


def _known(fleet: Fleet) -> bool:
    """True once the machine that is asked knows that the other one has loaded the model."""
    models = fleet.peer(_HERE, _THERE)["models"]
    return any(
        model["name"] == _MINILM and model["state"] == "loaded" and model["digest"] for model in models
    )


def _idle_share(daemon: Daemon) -> float:
    """The share of a core that a daemon's workers use, which have the model and nothing to do."""
    workers = psutil.Process(daemon.process.pid).children(recursive=True)
    begun, busy_s = time.perf_counter(), _busy_s(workers)
    time.sleep(_IDLE_S)
    return (_busy_s(workers) - busy_s) / (time.perf_counter() - begun)


def _busy_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _chats(daemon: Daemon, runs: int, seen: Samples) -> None:
    """The time to the first token of a chat, alone and while the daemon makes vectors."""
    daemon.warm()
    for run in range(runs):
        for side in alternated(run, ("alone", "beside")):
            prompt = prompts.tokens(MODEL, 7_000 + 2 * run + (side == "alone"), 512)
            with _busy(daemon) if side == "beside" else contextlib.nullcontext():
                seen[side].append(daemon.complete(prompt, 4, local_only=True).began_s)


@contextlib.contextmanager
def _busy(daemon: Daemon) -> Iterator[None]:
    """Meanwhile the daemon makes vectors, without a pause."""
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.is_set():
            number += 1
            _embed(daemon, _texts(64, 64, 900 + number))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(1.0)
        yield
    finally:
        over.set()
        thread.join()


def _onnxruntime() -> OnnxBert | None:
    """The same model in onnxruntime; None if that has no release for this system."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    found = OnnxBert(MODELS / _MINILM)
    # What the first call takes longer is not measured.
    found.vectors(_texts(_ONNX_BATCH, 16, 0))
    return found


def _onnx_rate(model: OnnxBert | None, texts: list[str]) -> list[float]:
    """Texts per second of onnxruntime on one core, none if it is not here."""
    if model is None:
        return []
    begun = time.perf_counter()
    for first in range(0, len(texts), _ONNX_BATCH):
        model.vectors(texts[first : first + _ONNX_BATCH])
    return [len(texts) / (time.perf_counter() - begun)]


def _singly(daemon: Daemon, texts: list[str]) -> float:
    """Seconds until all vectors are there, if each text is a request of its own."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        begun = time.perf_counter()
        list(threads.map(lambda text: _embed(daemon, [text], local_only=True), texts))
        return time.perf_counter() - begun


def _figures(seen: Samples) -> list[Figure]:
    figures = [
        Figure(f"Texts of {length} tokens, a second, on one core", "count", seen[length])
        for length in _LENGTHS
    ]
    for length in _LENGTHS:
        if seen[length, "onnx"]:
            title = f"Texts of {length} tokens, over onnxruntime's"
            figures.append(Figure(title, "x", seen.ratios(length, (length, "onnx"))))
    return [
        *figures,
        Figure(
            f"{_CORPUS} texts by two machines, times as fast as by one",
            "x",
            seen.ratios("one", "two"),
            at_least(1.8),
            note="one core each",
        ),
        Figure(f"{_CORPUS} texts by one machine", "s", seen["one"]),
        Figure(
            f"{_SINGLES} texts in a request each, times as long as in one",
            "x",
            seen.ratios("singly", "together"),
            note=f"{_AT_ONCE} at once; the client's share of the machine is in it",
        ),
        Figure(
            "A loaded model and no texts, share of a core",
            "%",
            seen["idle"],
            at_most(0.005),
            note=f"the worker alone, over {_IDLE_S:.0f} s",
        ),
        Figure(
            "First token of a chat beside vectors, over alone",
            "x",
            seen.ratios("beside", "alone"),
            at_most(1.1),
            note="on the same machine",
        ),
    ]


_HOW = (
    f"Two daemons, paired, {_MINILM} in float32, a worker on a core each; texts of one-token words, through "
    "HTTP, vectors as base64. The chat has 512 tokens of prompt, on all cores, while requests for vectors of "
    "64 texts follow each other without a pause, from the process that asks for the chat. onnxruntime has "
    "the same weights in the graph that its own optimizer makes of BERT; it runs in the process that "
    f"measures, on one thread, in batches of {_ONNX_BATCH}, without HTTP. sentence-transformers was not "
    "measured: it needs PyTorch, a gigabyte and more."
)
