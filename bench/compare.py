"""``python -m bench.compare COMMIT [--runs N]``: this tree and that of an earlier commit, in turns.

Tables of two days differ by what the machine had to give, too, and a shared processor gives twice as much in
one hour as in another. Here daemons of both trees do the same work one right after the other, so the ratio is
the code's. The earlier tree runs with the libraries that are installed now. Nothing is kept.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.figures import Figure, alternated, written
from bench.harness import prompts
from bench.harness.child import ROOT
from bench.harness.daemon import MODEL, Daemon, fetch_model
from bench.harness.samples import Samples

RUNS = 12
PROMPT_TOKENS, ANSWER_TOKENS = 2000, 96


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="of the earlier tree, as git names it")
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    fetch_model()
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        extract(ROOT, args.commit, Path(folder))
        print(f"this tree over {args.commit}, {args.runs} runs; under 1 is better", flush=True)
        for figure in compare(ROOT, Path(folder), args.runs):
            low, high = (written(value, figure.unit) for value in (min(figure.values), max(figure.values)))
            print(f"  {figure.title:<40} {written(figure.value, figure.unit):>8}  ({low} to {high})")


def compare(here: Path, there: Path, runs: int) -> list[Figure]:
    """Times in the tree ``here`` over those in ``there``, run by run."""
    seen = Samples()
    for tree in (here, there):
        Daemon(tree=tree).close()  # Python compiles what is new to it
    for run in range(runs):
        for tree in alternated(run, (here, there)):
            with Daemon(tree=tree) as daemon:
                seen["ready", tree].append(daemon.ready_s)
    same: list[float] = []
    with Daemon(tree=here) as ours, Daemon(tree=there) as theirs:
        daemons = {here: ours, there: theirs}
        for daemon in daemons.values():
            daemon.warm()
        for run in range(runs):
            texts = set()
            for tree in alternated(run, (here, there)):
                daemon = daemons[tree]
                prefill = daemon.complete(prompts.tokens(MODEL, run, PROMPT_TOKENS), 1)
                seen["ttft", tree].append(prefill.began_s)
                # Of its own, so that no run drafts from an earlier one's answer.
                opening = prompts.encoded(
                    MODEL, f"{run + 1}. {prompts.OPENINGS[run % len(prompts.OPENINGS)]}"
                )
                decode = daemon.complete(opening, ANSWER_TOKENS)
                seen["token", tree].append(1 / decode.rate)
                texts.add(prefill.text + decode.text)
            same.append(float(len(texts) == 1))
    return [
        Figure("Daemon ready, new home", "x", seen.ratios(("ready", here), ("ready", there))),
        Figure(f"TTFT of {PROMPT_TOKENS:,} tokens", "x", seen.ratios(("ttft", here), ("ttft", there))),
        Figure("Time of a token, short prompt", "x", seen.ratios(("token", here), ("token", there))),
        Figure("Runs in which both gave the same text", "%", same),
    ]


def extract(root: Path, commit: str, folder: Path) -> None:
    """Put the tree of a commit of the repository ``root`` into a folder; exits if git does not know it."""
    found = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=False)  # noqa: S607
    if found.returncode != 0:
        sys.exit(f"bench.compare: {found.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as tree:
        tree.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
