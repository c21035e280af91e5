"""``python -m eval [--quick] [--shared] [NAME...]``: measure quality, keep it, and write docs/quality.md.

Named steps are measured again, the others stay as they were. ``--shared`` names one: every task once more
with other arithmetic in its prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from bench import staleness
from bench.harness import host
from bench.harness.child import ROOT
from bench.harness.daemon import MODEL, fetch_model
from eval import arithmetic, forms, kept_facts, long_texts, requests, rounded, tried_voices
from eval.engine import Engine
from eval.kept_facts import KeptFacts
from eval.profile import FILE as PROFILES
from eval.report import MeasuredAt, Results, page, pictures, profile_said
from eval.runs import Outcome, RequestRunner, gate, selection_recall
from eval.statistics import Share
from eval.tasks import Task, task
from fleetd.compression.words import estimate_tokens
from fleetd.engine.protocol import Keep
from fleetd.engine.scoring.known_profiles import ShippedProfiles
from fleetd.errors import FleetError
from fleetd.hardware.probe import cores

PAGE = ROOT / "docs" / "quality.md"
PICTURES = ROOT / "docs" / "quality"
KEPT = ROOT / "docs" / "quality.json"

# What the figures depend on.
CODE = (
    "fleetd/compression",
    "fleetd/engine/scoring",
    "fleetd/engine/sparse_prefill",
    "eval",
)

# Nothing was fitted to these seeds; those below 10,000 are for tuning.
FIRST_SEED = 10_000

# Kind, length, ratios, seeds of a full run and of a quick one. Ratio 0 is what the scores call for.
PLAN: tuple[tuple[str, int, tuple[float, ...], int, int], ...] = (
    ("single", 1000, (0.25, 0.1, 0.0), 100, 6),
    ("needles4", 1000, (0.3,), 30, 2),
    ("single", 2000, (0.25, 0.1), 60, 3),
    ("needles8", 1000, (0.3,), 20, 1),
    ("distractors", 1000, (0.25, 0.1), 40, 2),
    ("json", 1000, (0.25,), 30, 2),
    ("table", 1000, (0.25,), 30, 2),
    ("code", 1000, (0.25,), 30, 2),
    ("hop", 1000, (0.3,), 30, 2),
    ("dialogue", 1000, (0.25,), 30, 2),
    ("single", 4000, (0.25, 0.1), 40, 0),
)
GATE_KINDS = ("aggregate", "verbatim", "single", "hop", "code", "json", "table")
GATE_SEEDS, QUICK_GATE_SEEDS = 120, 30
QUICK_REQUESTS = 8
# Of selection alone.
SCORER_TASKS, QUICK_SCORER_TASKS, SCORER_TOKENS, SCORER_RATIO = 30, 4, 1500, 0.1
SEGMENTS = (1, 2, 4)
LAYERS = (2, 4, 6, 8, 10, 12, 14, 16, 20)


# Lengths of long texts, and texts of each group of kinds in a run without names: the longest ones take hours.
LONG_TEXTS = {4000: 1, 16_000: 1, 32_000: 0, 64_000: 0, 128_000: 0}
# The same of texts that nobody asks about.
UNASKED_TEXTS = {1500: 2, 4000: 1}
# Kinds of tasks that are answered with other arithmetic as well: of the others the small model answers none
# right. Tasks of each, and their length.
SHARED_KINDS = ("single", "distractors", "needles4", "needles8", "hop", "dialogue")
SHARED_TASKS, QUICK_SHARED_TASKS, SHARED_TOKENS = 8, 1, 600
# In a run without names.
USUAL_SHARED_TASKS = 2


STEPS = (
    "gate",
    *(f"facts-{tokens}" for tokens in LONG_TEXTS),
    *(f"unasked-{tokens}" for tokens in UNASKED_TEXTS),
    "shared",
    "kv-bits",
    "verdict",
    "peaks",
    *(f"{kind}-{tokens}" for kind, tokens, *_ in PLAN),
    "segments",
    "layers",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of: {', '.join(STEPS)}")
    parser.add_argument("--quick", action="store_true", help="a few seeds each; minutes, and no judgement")
    parser.add_argument(
        "--shared", action="store_true", help="the step of that name, and no other unnamed one"
    )
    parser.add_argument("--share", type=float, default=1.0, help="run this share of the seeds")
    parser.add_argument("--render", action="store_true", help="only write the page from what is kept")
    parser.add_argument("--out", type=Path, default=PAGE.parent, help="where, instead of docs/")
    args = parser.parse_args()
    if args.shared and "shared" not in args.names:
        args.names.append("shared")
    if unknown := [name for name in args.names if name not in STEPS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    file = args.out / KEPT.name
    found = msgspec.json.decode(file.read_bytes(), type=Results) if file.exists() else None
    if args.render:
        if found is None:
            parser.error(f"there is no {file} yet")
        _write(found, args.out)
    else:
        if args.names != ["gate"]:
            fetch_model()
        goes_on = found is not None and args.names and found.quick == args.quick
        results = _results(args, found if goes_on else None)
        asyncio.run(_measure(results, args.names or STEPS, args.share, args.out))
    print(f"wrote {args.out / PAGE.name}")
    return 0


def _results(args: argparse.Namespace, earlier: Results | None) -> Results:
    """What this run adds to: the earlier results, or new ones."""
    options = [*args.names, *(["--quick"] if args.quick else [])]
    options += [] if args.share == 1 else [f"--share {args.share:g}"]
    command = " ".join(["python -m eval", *options])
    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    results = earlier or Results([], now, [], MODEL.name, args.quick)
    before = MeasuredAt(results.date, staleness.measured_at(results.machine))
    results.measured = {known: results.measured.get(known, before) for known in results.commands}
    results.commands = [*(known for known in results.commands if known != command), command]
    results.date, results.machine = now, host.describe()
    results.measured.pop(command, None)
    results.measured[command] = MeasuredAt(now, staleness.measured_at(results.machine))
    return results


async def _measure(results: Results, names: Sequence[str], part: float, folder: Path) -> None:
    """Everything found so far is written after each step: a run that is stopped is not lost."""
    begun = time.monotonic()
    before_s = results.seconds

    def step() -> None:
        results.seconds = before_s + time.monotonic() - begun
        _write(results, folder)

    if "gate" in names:
        results.requests = requests.measured(requests.requests("held_out"))
        results.tuned = requests.measured(requests.requests("tune"))[:1]
        count = QUICK_GATE_SEEDS if results.quick else GATE_SEEDS
        declined = gate(estimate_tokens, GATE_KINDS, range(FIRST_SEED, FIRST_SEED + count))
        results.declined = {kind: (share.hits, share.of) for kind, share in declined.items()}
        print("\n".join(requests.table(results.requests)))
        step()
    await _long_texts(results, names, part, step)
    await _unasked(results, names, step)
    await _shared(results, names, part, step)
    if "kv-bits" in names and not results.quick:
        ways = ("float32", "KV in 8 bits", "KV in 4 bits")
        results.perplexity = await asyncio.to_thread(arithmetic.perplexities_of, ways)
        print(results.perplexity)
        step()
    if all(
        name in ("gate", "shared", "kv-bits") or name.startswith(("facts-", "unasked-")) for name in names
    ):
        return
    async with AsyncExitStack() as stack:
        # Decoding gains little from a second thread, and answers are many: a worker for each core.
        engines = [await stack.enter_async_context(Engine(threads=1)) for _ in range(cores())]
        engine = engines[0]
        results.scored, results.sparse = await _abilities(engine)
        for other in engines[1:]:
            other.profile = engine.profile
        if engine.profile is not None:
            results.profile = profile_said(len(engine.profile.heads), engine.profile.exit_layer)
        asked = requests.requests("held_out")
        # They stand in the order of their documents: some of each.
        some = asked[:: len(asked) // (QUICK_REQUESTS if results.quick else max(1, round(part * len(asked))))]
        if "verdict" in names:
            results.tried["the small model's own verdict"] = await tried_voices.verdict(engine, some)
            step()
        if "peaks" in names and results.scored:
            results.tried["peaks of the scores"] = await tried_voices.peaks(engine, some)
            step()
        runner = RequestRunner(engines, print, sparse=results.sparse, scored=results.scored)
        for kind, tokens, ratios, full, few in PLAN:
            count = few if results.quick else max(1, round(part * full))
            if f"{kind}-{tokens}" in names and count:
                old = [o for o in results.outcomes if (o.kind, o.tokens) != (kind, tokens)]

                def each(new: list[Outcome], old: list[Outcome] = old) -> None:
                    results.outcomes = [*old, *new]
                    step()

                await runner.cell(kind, tokens, ratios, range(FIRST_SEED, FIRST_SEED + count), each)
        count = QUICK_SCORER_TASKS if results.quick else max(1, round(part * SCORER_TASKS))
        if results.scored and "segments" in names:
            results.segments = await _segments(engine, count)
            step()
        if results.scored and "layers" in names and not results.quick:
            results.layers = await _layers(engine, count)
            step()


async def _long_texts(results: Results, names: Sequence[str], part: float, step: Callable[[], None]) -> None:
    """Facts kept of texts of the named lengths; a length that is named is measured at least once."""
    for tokens, usual in LONG_TEXTS.items():
        texts = usual if len(names) == len(STEPS) else max(1, usual)
        if results.quick or f"facts-{tokens}" not in names:
            continue
        for kinds in long_texts.groups(tokens) if texts else ():
            seeds = range(FIRST_SEED, FIRST_SEED + texts)
            new = await asyncio.to_thread(kept_facts.of_group, MODEL, kinds, tokens, seeds, part)
            others = [cell for cell in results.facts if (cell.tokens, cell.kind) not in _cells(new)]
            results.facts = [*others, *new]
            for kind in kinds:
                shares = (f"{cell.ratio} {cell.share('scores')}" for cell in new if cell.kind == kind)
                print(f"{kind} {tokens} tokens: {'  '.join(shares)}")
            step()


def _cells(found: Sequence[KeptFacts]) -> set[tuple[int, str]]:
    return {(cell.tokens, cell.kind) for cell in found}


async def _unasked(results: Results, names: Sequence[str], step: Callable[[], None]) -> None:
    """Facts kept of texts that nobody asks about."""
    for tokens, texts in UNASKED_TEXTS.items():
        if results.quick or f"unasked-{tokens}" not in names:
            continue
        for kind in kept_facts.UNASKED_KINDS:
            seeds = range(FIRST_SEED, FIRST_SEED + texts)
            new = await asyncio.to_thread(kept_facts.of_unasked, MODEL, kind, tokens, seeds)
            others = [cell for cell in results.unasked if (cell.kind, cell.tokens) != (kind, tokens)]
            results.unasked = [*others, *new]
            print(
                f"{kind} {tokens} tokens, nobody asks: "
                + "  ".join(f"{cell.ratio} {cell.share('surprise')}" for cell in new)
            )
            step()


async def _shared(results: Results, names: Sequence[str], part: float, step: Callable[[], None]) -> None:
    """Tasks once more with other arithmetic in them."""
    if "shared" not in names:
        return
    usual = USUAL_SHARED_TASKS if len(names) == len(STEPS) else SHARED_TASKS
    count = QUICK_SHARED_TASKS if results.quick else max(1, round(part * usual))
    for kind in SHARED_KINDS:
        seeds = range(FIRST_SEED, FIRST_SEED + count)
        new = await asyncio.to_thread(rounded.of_kind, MODEL, kind, SHARED_TOKENS, seeds)
        results.rounded = [old for old in results.rounded if old.kind != kind] + [new]
        print(f"{kind}: " + "  ".join(f"{form} {new.kept(form)}" for form in rounded.FORMS))
        step()


async def _abilities(engine: Engine) -> tuple[bool, bool]:
    """True or False for each: the worker scores; it takes sparse prompts."""
    one = task("single", 1, 800, 0.5, engine.count)
    document = one.document
    scored = sparse = True
    try:
        await engine.scores(document)
    except FleetError as error:
        print(f"no scores: {error}")
        scored = False
    try:
        keep = Keep({0: list(forms.selected(document, None, 0.25).kept[0])})
        await engine.answer(one.text, 4, keep)
    except (FleetError, RuntimeError) as error:
        print(f"no sparse prompts: {error}")
        sparse = False
    return scored, sparse


def _scorer_tasks(engine: Engine, count: int) -> list[Task]:
    return [
        task("single", FIRST_SEED + 5000 + i, SCORER_TOKENS, (i + 0.5) / count, engine.count)
        for i in range(count)
    ]


async def _segments(engine: Engine, count: int) -> list[tuple[int, int, int]]:
    found = []
    for parts in SEGMENTS:
        share = await selection_recall(engine, _scorer_tasks(engine, count), SCORER_RATIO, segments=parts)
        print(f"{parts} segments: facts kept {share}")
        found.append((parts, share.hits, share.of))
    return found


async def _layers(engine: Engine, count: int) -> list[tuple[int, int, int, float]]:
    """Heads are chosen anew for each exit: a head that is not reached cannot be asked."""
    found = []
    chosen = engine.profile
    for layer in LAYERS:
        engine.profile = None
        begun = time.monotonic()
        try:
            share: Share = await selection_recall(
                engine, _scorer_tasks(engine, count), SCORER_RATIO, exit_layer=layer
            )
        except FleetError as error:
            print(f"exit at layer {layer}: {error}")
            continue
        seconds = (time.monotonic() - begun) / count
        print(f"exit at layer {layer}: facts kept {share}, {seconds:.2f} s per prompt")
        found.append((layer, share.hits, share.of, seconds))
    engine.profile = chosen
    return found


def _write(results: Results, folder: Path) -> None:
    (folder / KEPT.name).write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=0))
    drawn = pictures(results)
    (folder / PICTURES.name).mkdir(parents=True, exist_ok=True)
    for old in (folder / PICTURES.name).glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, svg in drawn.items():
        (folder / PICTURES.name / name).write_text(svg, encoding="utf-8")
    commits = {staleness.measured_at(results.machine), *(each.commit for each in results.measured.values())}
    later = {commit: staleness.since(ROOT, commit, CODE) for commit in commits}
    (folder / PAGE.name).write_text(page(results, later, _scorer_now(results.model)), encoding="utf-8")


def _scorer_now(model: str) -> str:
    """How a model scores by the profile that is shipped; "" if it has none."""
    shipped = msgspec.json.decode(PROFILES.read_bytes(), type=ShippedProfiles)
    found = next((each.found for each in shipped.profiles if each.model == model), None)
    return "" if found is None else profile_said(len(found.heads), found.exit_layer)


if __name__ == "__main__":
    sys.exit(main())
