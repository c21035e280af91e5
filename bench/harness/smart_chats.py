"""Chats for smart prefill: a target that costs what real ones cost beside the default model, which scores."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import NotMeasured
from bench.harness import prompts, random_llama
from bench.harness.daemon import MODEL, Daemon
from fleetd.models.catalog import DEFAULT_MODEL

RATIO = 0.2
TARGET = "target"
# Eight times the time of SmolLM2-135M at 8,000 tokens, where attention is half of that one's: twenty times
# the multiplications of its layers. As wide as models of that size.
SHAPE: Mapping[str, int] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
}
QUESTION = "What did the clockmaker carry across the bridge? Answer in one word."


@dataclass(frozen=True, slots=True)
class Answered:
    """When the first token came, in seconds, what the answer's last chunks said, and the request's id."""

    first_s: float
    said: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Shortened:
    """What smart prefill did: the seconds of scoring, and tokens before and after it."""

    form: str
    score_s: float
    whole: int
    kept: int


def shortened(said: dict[str, Any]) -> Shortened:
    """Raises NotMeasured if the prompt was read whole, for whatever reason."""
    report = said.get("smart_prefill") or {}
    score_s = float((said.get("timings") or {}).get("score_ms") or 0.0) / 1000
    if report.get("mode", "full") == "full":
        raise NotMeasured(f"smart prefill left nothing out: {report.get('skipped') or 'no reason is told'}")
    whole, kept = int(report["original_tokens"]), int(report["compressed_tokens"])
    if not 0 < kept < whole or score_s <= 0:
        raise NotMeasured(f"{kept} of {whole} tokens were kept after {score_s} s of scoring")
    return Shortened(str(report["mode"]), score_s, whole, kept)


@contextmanager
def models(**sizes: int) -> Iterator[Path]:
    """A models folder with the scorer, and the target beside it. ``sizes``: other ones than ``SHAPE``."""
    folder = Path(tempfile.mkdtemp(prefix="fleetd-bench-"))
    try:
        (folder / DEFAULT_MODEL).symlink_to(MODEL, target_is_directory=True)
        random_llama.build(folder / TARGET, {**SHAPE, **sizes})
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def chat(seed: int, count: int) -> list[dict[str, str]]:
    """Messages: a text of about ``count`` tokens, and a question about it."""
    return [
        {"role": "user", "content": prompts.text(MODEL, seed, count)},
        {"role": "user", "content": QUESTION},
    ]


def ask(
    daemon: Daemon,
    model: str,
    messages: list[dict[str, str]],
    *,
    smart: Mapping[str, Any] | None = None,
    **body: Any,
) -> Answered:
    """Ask for two tokens. ``smart``: fields of ``smart_prefill``, None to read the prompt whole.

    Raises RuntimeError for an error.
    """
    if smart is not None:
        body["smart_prefill"] = dict(smart)
    first_s, said = 0.0, dict[str, Any]()
    with daemon.stream("chat/completions", model=model, messages=messages, max_tokens=2, **body) as stream:
        for frame in stream.frames():
            if frame.data is None:
                continue
            if "error" in frame.data:
                raise RuntimeError(f"the daemon said: {frame.line}")
            choices: list[Any] = frame.data.get("choices") or [{}]
            # The first frame has the role: it is sent with the first token.
            first_s = first_s or (frame.at_s if choices[0].get("delta") else 0.0)
            said |= {name: frame.data[name] for name in ("smart_prefill", "timings") if frame.data.get(name)}
        return Answered(first_s, said, stream.id)
