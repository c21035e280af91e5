"""``python -m eval.arithmetic [--tasks N] [--kv-bits 8|4 | --wire-bits 8]``: what int8 changes in what a CPU
says, against float32; or what quantised keys and values change, or such as were sent in 8 bits.

Perplexity on texts that stay as they are, and the share of answers that the model finds in a whole prompt.
Each way has a process of its own. Decisions 60, 71 and 76 quote what it prints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.harness.child import ROOT
from bench.harness.daemon import MODEL, fetch_model
from eval.engine import Engine
from eval.haystacks import paragraphs
from eval.statistics import Share
from eval.tasks import task
from fleetd.hardware.probe import cores

# Name → the settings of a worker that computes so.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"cpu_arithmetic": "float32"},
    "int8": {"cpu_arithmetic": "int8"},
    "KV in 8 bits": {"cpu_arithmetic": "float32", "kv_bits": 8},
    "KV in 4 bits": {"cpu_arithmetic": "float32", "kv_bits": 4},
}
KINDS = (("single", 1000), ("needles4", 1000), ("json", 1000), ("table", 1000))
FIRST_SEED = 20_000
# Tokens that the model sees at once, and of made-up prose.
WINDOW, PROSE = 1024, 4000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.arithmetic", description=__doc__)
    parser.add_argument("--tasks", type=int, default=30, help="of each kind")
    parser.add_argument("--kv-bits", choices=("8", "4"), help="quantised keys and values, and not int8")
    parser.add_argument(
        "--wire-bits", choices=("8",), help="keys and values that helpers sent in so many bits"
    )
    parser.add_argument("--perplexity", choices=WAYS, help="print one way's, as JSON")
    args = parser.parse_args()
    fetch_model()
    if args.perplexity:
        print(json.dumps(perplexities(args.perplexity)))
        return 0
    if args.wire_bits:
        for name, sent in sent_in(int(args.wire_bits)).items():
            print(f"{name}, {args.wire_bits} bits on the wire: {sent}")
        return 0
    ways = ("float32", f"KV in {args.kv_bits} bits" if args.kv_bits else "int8")
    for name, found in perplexities_of(ways).items():
        before, after = (found[each] for each in ways)
        print(f"perplexity, {name}: {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.2f} %)")
    for kind, tokens in KINDS:
        print(asyncio.run(_answers(ways, kind, tokens, args.tasks)), flush=True)
    return 0


def texts() -> dict[str, str]:
    """Name → text."""
    made = paragraphs(random.Random("arithmetic"), PROSE, lambda text: len(text) // 4, tuning=False)
    return {"a licence": (ROOT / "LICENSE").read_text(encoding="utf-8"), "made-up prose": "\n\n".join(made)}


def perplexities(way: str) -> dict[str, float]:
    """Of each text, in windows that each begin anew; loads the model into this process."""
    from fleetd.engine.settings import WorkerSettings
    from fleetd.proof.local_worker import LocalWorker

    settings = WAYS[way] | {"device": "cpu", "speculation": "off"}
    worker = LocalWorker(WorkerSettings(name=MODEL.name, path=str(MODEL), **settings))
    model, tokenizer = worker.loaded.model, worker.loaded.tokenizer
    return {name: math.exp(_loss(model, tokenizer.encode(text))) for name, text in texts().items()}


def _loss(model: Any, tokens: list[int]) -> float:
    """Mean negative log-likelihood of each token but the first of each window, in nats."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    total, count = 0.0, 0
    for at in range(0, len(tokens) - 1, WINDOW):
        window = mx.array([tokens[at : at + WINDOW]])
        if window.shape[1] < 2:
            break
        # With a cache: without one nothing is quantised.
        logits = model(window, cache=make_prompt_cache(model))
        lost = nn.losses.cross_entropy(logits[0, :-1], window[0, 1:], reduction="sum")
        total, count = total + float(lost.item()), count + window.shape[1] - 1
    return total / count


@dataclass
class SentRows:
    """What a model says behind a prompt whose keys and values were rounded on the way, and were not.

    ``plain``, ``narrow``: sums of the negative log-likelihoods of ``tokens``, in nats. ``first``: the first
    token of a greedy answer is the same; ``all``: the likeliest token is, at each place of the text.
    """

    tokens: int = 0
    plain: float = 0.0
    narrow: float = 0.0
    first: Share = field(default_factory=lambda: Share(0, 0))
    all: Share = field(default_factory=lambda: Share(0, 0))

    def __str__(self) -> str:
        before, after = (math.exp(each / self.tokens) for each in (self.plain, self.narrow))
        change = f"{before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.2f} %)"
        return f"perplexity {change}; the same first token {self.first}; the same likeliest tokens {self.all}"


def sent_in(bits: int) -> dict[str, SentRows]:
    """Of each text, in windows: the first half is the prompt, whose rows are rounded as on a link."""
    from fleetd.engine.settings import WorkerSettings
    from fleetd.proof.local_worker import LocalWorker

    settings = WAYS["float32"] | {"device": "cpu", "speculation": "off"}
    worker = LocalWorker(WorkerSettings(name=MODEL.name, path=str(MODEL), **settings))
    model, tokenizer = worker.loaded.model, worker.loaded.tokenizer
    found = {}
    for name, text in texts().items():
        found[name] = SentRows()
        tokens = tokenizer.encode(text)
        for at in range(0, len(tokens) - WINDOW, WINDOW // 2):
            _behind(model, tokens[at : at + WINDOW], bits, found[name])
    return found


def _behind(model: Any, tokens: list[int], bits: int, found: SentRows) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    half = len(tokens) // 2
    prompt, rest = mx.array([tokens[:half]]), mx.array([tokens[half:]])
    said = []
    for rounds in (False, True):
        cache = make_prompt_cache(model)
        # All but the last token, as helpers compute them.
        model(prompt[:, :-1], cache=cache)
        if rounds:
            for each in cache:
                each.keys, each.values = (_sent(rows, bits) for rows in (each.keys, each.values))
        logits = mx.concatenate([model(prompt[:, -1:], cache=cache), model(rest, cache=cache)], axis=1)[
            0, :-1
        ]
        mx.eval(logits)
        said.append((logits, float(nn.losses.cross_entropy(logits, rest[0], reduction="sum").item())))
    (plain, before), (narrow, after) = said
    same: Any = (mx.argmax(plain, -1) == mx.argmax(narrow, -1)).tolist()
    found.tokens, found.plain, found.narrow = found.tokens + half, found.plain + before, found.narrow + after
    found.first += Share(int(same[0]), 1)
    found.all += Share(sum(same), len(same))


def _sent(rows: Any, bits: int) -> Any:
    """Rows as they come out of a link that carries them in ``bits`` bits."""
    from fleetd.engine.sequence_state.row_packing import RowPacking

    width = rows.shape[-1]
    packing = RowPacking.of(bits, width, width, rows.dtype)
    return rows if packing is None else packing.unpack(packing.pack(rows), width)


def perplexities_of(ways: Sequence[str]) -> dict[str, dict[str, float]]:
    """Name of a text → way → perplexity."""
    found: dict[str, dict[str, float]] = {name: {} for name in texts()}
    for way in ways:
        command = [sys.executable, "-m", "eval.arithmetic", "--perplexity", way]
        said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        for name, value in json.loads(said.splitlines()[-1]).items():
            found[name][way] = value
    return found


async def _answers(ways: Sequence[str], kind: str, tokens: int, count: int) -> str:
    """Shares of the right answers in both ways, and how many texts are the same to the letter."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(threads=cores(), **WAYS[each])) for each in ways]
        right = [Share(0, 0) for _ in ways]
        same = Share(0, 0)
        for number in range(count):
            one = task(kind, FIRST_SEED + number, tokens, (number + 0.5) / count, engines[0].count)
            said = [
                (await engine.answer(one.text or one.messages, one.max_tokens)).text for engine in engines
            ]
            for side, text in enumerate(said):
                right[side] += Share(sum(one.says(text, answer) for answer in one.answers), len(one.answers))
            same += Share(int(said[0] == said[1]), 1)
    both = "; ".join(f"{way} {share}" for way, share in zip(ways, right, strict=True))
    return f"{kind}, {tokens} tokens: {both}; the same text: {same}"


if __name__ == "__main__":
    sys.exit(main())
