"""``python -m eval.tune``: facts that selection keeps, by the weights of its parts, on seeds for tuning only.

Scores each task once and selects from them with every set of weights: minutes, most of them scoring.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence

from bench.harness.daemon import fetch_model
from eval import forms
from eval.engine import Engine
from eval.runs import lost
from eval.statistics import Share
from eval.tasks import Task, task
from fleetd.compression.document import Document
from fleetd.compression.select import Weights, select
from fleetd.compression.token_scores import TokenScores

KINDS = ("single", "distractors", "needles4", "needles8", "hop", "code", "json", "table", "dialogue")
RATIOS = (0.1, 0.2, 0.3)
ATTENTION = (0.0, 0.3, 0.5, 0.6, 0.7, 0.85, 1.0)
HALF = (1.0, 4.0, 16.0)

Scored = tuple[Task, Document, TokenScores]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.tune", description=__doc__)
    parser.add_argument("--seeds", type=int, default=6, help="of each kind of task")
    parser.add_argument("--tokens", type=int, default=1200)
    args = parser.parse_args()
    fetch_model()
    scored = asyncio.run(_scored(args.seeds, args.tokens))
    print(f"{'attention':>9} {'half':>5}  " + "  ".join(f"{kind:>11}" for kind in KINDS) + "  all")
    for attention, half in itertools.product(ATTENTION, HALF):
        weights = Weights(attention, round(1 - attention, 2), half)
        shares = {kind: _share(scored, kind, weights) for kind in KINDS}
        said = "  ".join(f"{100 * shares[kind].value:>9.1f} %" for kind in KINDS)
        print(f"{attention:>9} {half:>5}  {said}  {sum(shares.values(), Share(0, 0))}")
    return 0


def _share(scored: Sequence[Scored], kind: str, weights: Weights) -> Share:
    found = Share(0, 0)
    for ratio, (one, document, scores) in itertools.product(RATIOS, scored):
        if one.kind == kind:
            gone = lost(document, select(document, scores, forms.policy(ratio), weights=weights), one.facts)
            found += Share(len(one.facts) - len(gone), len(one.facts))
    return found


async def _scored(seeds: int, tokens: int) -> list[Scored]:
    found: list[Scored] = []
    async with Engine() as engine:
        for kind, seed in itertools.product(KINDS, range(seeds)):
            one = task(kind, seed, tokens, (seed + 0.5) / seeds, engine.count, tuning=True)
            document = one.document
            found.append((one, document, (await engine.scores(document))[0]))
    return found


if __name__ == "__main__":
    sys.exit(main())
