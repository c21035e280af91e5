"""What a drafter keeps of a long text, and what that costs it in right guesses."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from bench.figures import Figure, Measured, at_most
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.cores import worker_on
from bench.harness.daemon import MODEL
from bench.harness.drafting import first_layers, followed
from bench.harness.samples import Samples

QUICK_RUNS = 1
# Tokens of the text that is kept whole for comparison, of the long one, and of the answer.
SHORT, LONG, ANSWER = 6000, 100_000, 96
# Of the model's 30 layers.
LAYERS = 27
MB = 1e6


def measure(runs: int) -> Measured:
    seen, texts = Samples(), list[tuple[str, list[int], list[int]]]()
    with Child("drafter_window", str(MODEL)) as child:
        for run in range(runs):
            opening = prompts.encoded(MODEL, "\n\n" + prompts.OPENINGS[run % len(prompts.OPENINGS)])
            prompt = [*prompts.tokens(MODEL, run, SHORT), *opening]
            answer = child.ask(mode="answer", prompt=prompt, tokens=ANSWER)["answer"]
            for name, window in (("whole", False), ("window", True)):
                said = child.ask(mode="draft", prompt=prompt, answer=answer, layers=LAYERS, window=window)
                for key, value in said.items():
                    seen[name, key].append(value)
            long = [*prompts.tokens(MODEL, run, LONG), *opening]
            said = child.ask(mode="draft", prompt=long, answer=[], layers=LAYERS, window=True)
            for key, value in said.items():
                seen["long", key].append(value)
            texts += [("window", prompt, answer), ("long", long, [])]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_elsewhere(seen, texts, first_layers(Path(folder) / "drafter", LAYERS)))
    token_mb = seen["whole", "bytes"][0] / (SHORT + ANSWER) / MB
    return Measured(
        [
            Figure(
                f"Keys and values of a drafter, {LONG} tokens of text",
                "MB",
                [each / MB for each in seen["long", "bytes"]],
                at_most(150),
                note=f"all of them would be {token_mb * LONG:.0f} MB; the model's context is 8,192 tokens",
            ),
            Figure(f"From {LONG} tokens of text to the first guess", "s", seen["long", "first_s"]),
            Figure(
                f"Keys and values of a drafter on another machine, promised to {LONG} tokens of text",
                "MB",
                [each / MB for each in seen["elsewhere", "long", "bytes"]],
                at_most(150),
                note="a worker of its own, over a stream as between machines",
            ),
            Figure(
                f"From {LONG} tokens of text to the first guess, on another machine",
                "s",
                seen["elsewhere", "long", "first_s"],
            ),
            Figure(
                f"Right first guesses, {SHORT} tokens of text, beginning and end, on another machine",
                "%",
                seen["elsewhere", "window", "right"],
            ),
            Figure(
                f"Keys and values of a drafter, {SHORT} tokens of text",
                "MB",
                [each / MB for each in seen["window", "bytes"]],
                note=f"whole: {seen['whole', 'bytes'][0] / MB:.0f} MB",
            ),
            Figure(f"Right first guesses, {SHORT} tokens of text, whole", "%", seen["whole", "right"]),
            Figure(
                f"Right first guesses, {SHORT} tokens of text, beginning and end",
                "%",
                seen["window", "right"],
            ),
            Figure(f"From {SHORT} tokens to the first guess, whole", "s", seen["whole", "first_s"]),
            Figure(
                f"From {SHORT} tokens to the first guess, beginning and end", "s", seen["window", "first_s"]
            ),
        ],
        _HOW,
    )


async def _elsewhere(seen: Samples, texts: list[tuple[str, list[int], list[int]]], model: Path) -> None:
    """The same texts, for which a worker drafts that has the drafter's model alone."""
    async with worker_on(None, model) as drafter:
        for name, text, answer in texts:
            told = await followed(drafter, text, answer)
            seen["elsewhere", name, "bytes"].append(told.promised_bytes)
            seen["elsewhere", name, "first_s"].append(told.first_s)
            seen["elsewhere", name, "right"].append(told.right)


_HOW = (
    f"The default model answers {ANSWER} tokens, greedy, to {SHORT} tokens of sentences without sense and "
    f"the beginning of a text. The drafter is its first {LAYERS} of 30 layers with its norm and head. For "
    "each token of the answer it guesses the next one, once with all of the text, and once with its first "
    "64 tokens and 1,024 to 2,048 of its last ones, as shipped. On another machine: a worker that has the "
    "drafter's model alone follows the same texts over a sealed stream on loopback, a token at a time."
)
