"""``python -m bench [--quick] [NAME...]``: measure, print, keep, and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench import results, staleness, table
from bench.families import FAMILIES, ON_REQUEST, needs_default_model
from bench.figures import Figure, Measured, NotMeasured, Result, Taking
from bench.harness import host
from bench.harness.child import ROOT
from bench.harness.daemon import fetch_model

FOLDER = ROOT / "docs"
KEPT, PAGE = "benchmarks.json", "benchmarks.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of: {', '.join(FAMILIES)}")
    parser.add_argument("--quick", action="store_true", help="fewer runs; never replaces a measurement")
    parser.add_argument("--runs", type=int, default=0, help="runs of each family instead of its own number")
    parser.add_argument("--render", action="store_true", help="only write the page from what is kept")
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER", help="keep the figures there")
    parser.add_argument(
        "--take",
        type=Path,
        metavar="FILE",
        help="only keep the figures of another such file",
    )
    parser.add_argument(
        "--stale", action="store_true", help="only tell which families are older than the code"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FAMILIES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    kept: Path = args.into / KEPT
    if args.stale:
        told = staleness.lines(args.names or list(FAMILIES), _ages(kept))
        print("\n".join(told) or "none is older than the code")
        return 0
    if args.take:
        _take(results.load(args.take), kept)
    names = args.names or [name for name in FAMILIES if name not in ON_REQUEST]
    # Unwind on SIGTERM: daemons and children are ended and their folders removed on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    measures = not (args.render or args.take)
    if measures and any(map(needs_default_model, names)):
        fetch_model()
    failed = [name for name in names if not _run(name, args.quick, args.runs, kept)] if measures else []
    titles = {name: family.title for name, family in FAMILIES.items()}
    page: Path = args.into / PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(table.page(titles, results.load(kept), _ages(kept)), encoding="utf-8")
    print(f"written: {page}")
    if failed:
        print(f"not measured, because of the errors above: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _ages(kept: Path) -> dict[str, int | None]:
    code = {name: family.code for name, family in FAMILIES.items()}
    return staleness.ages(ROOT, code, results.load(kept))


def _take(others: dict[str, Result], kept: Path) -> None:
    """Keep what was measured elsewhere, as if it had been measured here."""
    every = results.load(kept)
    results.save(kept, every | {name: results.kept(every.get(name), new) for name, new in others.items()})


def _run(name: str, quick: bool, wanted_runs: int, kept: Path) -> bool:
    """Measure one family and keep it. False if it or a part of it could not be measured; the others still
    can."""
    family = FAMILIES[name]
    measure = (quick and family.look) or family.measure
    runs = wanted_runs or (family.quick_runs if quick else family.runs)
    print(f"{family.title} ({runs} runs) ...", flush=True)
    load, loop_s, begun = host.load(), host.loop_s(), time.perf_counter()
    flags = (" --quick" if quick else "") + (f" --runs {wanted_runs}" if wanted_runs else "")
    command, machine = f"python -m bench{flags} {name}", host.describe()

    def keep(measured: Measured, cut: str = "") -> None:
        result = Result(
            family=name,
            measured=measured,
            command=command,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=machine,
            load=load,
            runs=runs,
            # Fewer runs than the family asks for are a look, whichever option said so.
            quick=runs < family.runs or measure is family.look,
            loop_s=[loop_s, host.loop_s()],
            cut=cut,
        )
        _take({name: result}, kept)

    try:
        measured = _taken(measure(runs), keep)
    except NotMeasured as error:
        print(f"  not measured: {error}", file=sys.stderr, flush=True)
        return False
    except Exception:  # one family's boundary: the next one may work
        traceback.print_exc()
        return False
    print(f"  took {time.perf_counter() - begun:.0f} s", flush=True)
    keep(measured)
    return True


def _taken(found: Measured | Taking, keep: Callable[[Measured, str], None]) -> Measured:
    """All figures, printed. Those of a measurement that ends early are kept before its error goes on. Raises
    NotMeasured if there is none."""
    if isinstance(found, Measured):
        print(table.lines(found.figures), flush=True)
        return found
    had: list[Figure] = []
    try:
        for figure in found.figures:
            had.append(figure)
            print(table.lines([figure]) + (f"\n    {figure.note}" if figure.note else ""), flush=True)
            # Each time: the machine may be gone before the next one.
            keep(Measured(had, found.how), "the machine was gone")
    except BaseException as error:
        if had:
            why = str(error) if isinstance(error, NotMeasured) else type(error).__name__
            keep(Measured(had, found.how), why)
        raise
    if not had:
        raise NotMeasured("it gave no figure")
    return Measured(had, found.how)


if __name__ == "__main__":
    sys.exit(main())
