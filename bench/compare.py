"""``python -m bench.compare COMMIT [NAME...] [--runs N]``: this tree and that of an earlier commit, in turns.

Tables of two days differ by what the machine had to give, too, and a shared processor gives twice as much in
one hour as in another. Here both trees do the same work one right after the other, so the ratio is the
code's: daemons of both, or the families of those names, each tree by its own bench. The earlier tree runs
with the libraries that are installed now. Nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, Unit, alternated, written
from bench.harness import prompts
from bench.harness.child import ROOT
from bench.harness.daemon import MODEL, Daemon, fetch_model
from bench.harness.samples import Samples

RUNS, ROUNDS = 12, 3
PROMPT_TOKENS, ANSWER_TOKENS = 2000, 96


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="of the earlier tree, as git names it")
    parser.add_argument("names", nargs="*", metavar="NAME", help="families of the bench, once for each run")
    parser.add_argument("--runs", type=int, default=0, help=f"{RUNS} of daemons, {ROUNDS} of families")
    args = parser.parse_args()
    fetch_model()
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        earlier = check_out(ROOT, args.commit, Path(folder, "earlier"))
        if args.names:
            here = check_out(ROOT, "HEAD", Path(folder, "here"))
            compare_families(here, earlier, args.names, args.runs or ROUNDS)
            return
        runs = args.runs or RUNS
        print(f"this tree over {args.commit}, {runs} runs; under 1 is better", flush=True)
        for figure in compare(ROOT, earlier, runs):
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


def compare_families(here: Path, there: Path, names: Sequence[str], rounds: int) -> None:
    """Measure families in both trees, one run of each after the other, and print each figure of both.

    ``here`` is the tree of the commit that is checked out: what is not committed is not in it.
    """
    seen = Samples()
    units: dict[str, Unit] = {}
    for run in range(rounds):
        for name in names:
            for tree in alternated(run, (here, there)):
                for figure in measured(tree, name):
                    units[figure["title"]] = figure["unit"]
                    seen[figure["title"], tree].append(statistics.median(figure["values"]))
        print(f"\nround {run + 1} of {rounds}: here, there, here over there", flush=True)
        for title, unit in units.items():
            print(f"  {_line(title, seen[title, here], seen[title, there], unit)}", flush=True)


def _line(title: str, here: Sequence[float], there: Sequence[float], unit: Unit) -> str:
    """The medians of both trees, and that of the ratios of their runs."""
    ours, theirs = (written(statistics.median(side), unit) if side else "-" for side in (here, there))
    ratios = [a / b for a, b in zip(here, there, strict=False) if b]
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
    return f"{title:<90} {ours:>9} {theirs:>9} {ratio:>6}"


def measured(tree: Path, name: str) -> list[dict[str, Any]]:
    """The figures of one run of a family, by the tree's own bench; none where it cannot measure that."""
    kept = tree / "docs" / "benchmarks.json"
    # A single run would not replace what the tree has of an earlier day.
    kept.write_text("{}", encoding="utf-8")
    command = [sys.executable, "-m", "bench", "--runs", "1", name]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=False, stdout=subprocess.DEVNULL)
    results = json.loads(kept.read_text(encoding="utf-8"))
    return results[name]["measured"]["figures"] if name in results else []


def check_out(root: Path, commit: str, folder: Path) -> Path:
    """Clone the repository ``root`` into a folder, at a commit, with its cache; exits if git does not know
    the commit."""
    for command in (["clone", "-q", str(root), str(folder)], ["-C", str(folder), "checkout", "-q", commit]):
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)  # noqa: S607
        if done.returncode != 0:
            sys.exit(f"bench.compare: {done.stderr.strip()}")
    if (cache := root / ".cache").exists():
        (folder / ".cache").symlink_to(cache)
    return folder


if __name__ == "__main__":
    main()
