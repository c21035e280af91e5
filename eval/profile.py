"""``python -m eval.profile [MODEL...]``: find the scoring profiles of models, and ship them with fleetd.

Writes fleetd/engine/scoring/shipped_profiles.json: the named folders are searched (the embedded model if none
is named), other entries stay unless the algorithm has changed. ``--check`` writes nothing, and fails if a
shipped profile is not what the search finds now. ``--price`` only compares what scoring costs with what the
planner expects of it from calibration and the profile, in processor time, so that other work matters little.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.harness import prompts
from bench.harness.daemon import MODEL, fetch_model
from fleetd import limits
from fleetd.engine.cpu import products
from fleetd.engine.protocol import Score
from fleetd.engine.scoring import known_profiles
from fleetd.engine.scoring.known_profiles import ALGORITHM, ShippedProfile, ShippedProfiles, StoredProfile
from fleetd.models import digest as digests
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.scoring import Scorer, exit_share

if TYPE_CHECKING:  # needs MLX, which is set up first
    from fleetd.engine.load.loading import Loaded

FILE = Path(known_profiles.__file__).with_name(known_profiles.SHIPPED)
_CHUNK_TOKENS = 256
_PRICED = (500, 2000, 4000)
_QUESTION = "What did the clockmaker carry across the bridge? Answer in one word."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.profile", description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="folders of installed models")
    parser.add_argument("--check", action="store_true", help="compare with what is shipped")
    parser.add_argument("--price", action="store_true", help="compare the price of scores with their cost")
    args = parser.parse_args()
    if not args.models:
        fetch_model()
    shipped = msgspec.json.decode(FILE.read_bytes(), type=ShippedProfiles)
    known = {each.digest: each for each in shipped.profiles} if shipped.algorithm == ALGORITHM else {}
    if args.price:
        for folder in args.models or [MODEL]:
            _price(folder.resolve())
        return 0
    wrong = 0
    for folder in args.models or [MODEL]:
        found = _find(folder.resolve())
        wrong += known.get(found.digest) != found
        known[found.digest] = found
    if args.check:
        return 1 if wrong else 0
    profiles = sorted(known.values(), key=lambda each: (each.model, each.digest))
    FILE.write_bytes(msgspec.json.encode(ShippedProfiles(ALGORITHM, profiles)) + b"\n")
    print(f"wrote {FILE.name}")
    return 0


def _find(folder: Path) -> ShippedProfile:
    """Search, and say what that took."""
    search = loaded(folder).search
    from fleetd.engine.scoring.head_profile import Profiling

    profiling = Profiling(search.tap, search.tokenizer, search.context_tokens)
    began_s, began_cpu_s, tokens = time.monotonic(), time.process_time(), 0
    while not profiling.finished:
        tokens += profiling.step(_CHUNK_TOKENS)
    found = profiling.profile()
    print(
        f"{folder.name}: {len(found.heads)} heads in the first {found.exit_layer} layers; {tokens} tokens, "
        f"{time.monotonic() - began_s:.1f} s, {time.process_time() - began_cpu_s:.1f} s of processor time"
    )
    return ShippedProfile(folder.name, search.digest, StoredProfile.of(found))


def _price(folder: Path) -> None:
    """Score texts of some lengths, and say which share of their price they cost."""
    model = loaded(folder)
    from fleetd.engine.measure.calibrate import Calibration
    from fleetd.engine.measure.memory import KvBudget
    from fleetd.engine.scoring.score_guests import ScoreGuests
    from fleetd.engine.scoring.scoring_layout import lay_out

    facts, search = model.facts, model.search
    budget_s, clock = 4 * limits.CALIBRATE_S, time.process_time
    context_tokens = facts.shape.context_tokens
    measured = Calibration(model.model, facts.vocab_size, context_tokens, budget_s, clock=clock).measured()
    speed = PrefillSpeed.of(measured.speed)
    profile = search.profile()
    scorer = Scorer("", "", speed, exit_share(profile.exit_layer, profile.layers))
    for tokens in _PRICED:
        text = prompts.text(folder, tokens, tokens)
        asked = Score("price", f"{text}\n{_QUESTION}", [(len(text) + 1, len(text) + 1 + len(_QUESTION))])
        guests = ScoreGuests(search=search, budget=KvBudget.of(1 << 40, 1), emit=lambda _: None)
        guests.begin(laid := lay_out(asked, search.tokenizer, context_tokens))
        began_s = time.process_time()
        while guests.ready:
            guests.turn(_CHUNK_TOKENS)
        cost_s, price_s = time.process_time() - began_s, scorer.seconds(laid.tokens, around=0)
        print(
            f"{folder.name}: scores of {laid.tokens} tokens cost {cost_s:.2f} s of processor time, "
            f"{cost_s / price_s:.2f} of the {price_s:.2f} s that were expected"
        )


@cache
def loaded(folder: Path) -> Loaded:
    """An installed model, loaded into this process as a worker loads it, once."""
    products.preload_blas()
    from fleetd.engine import worker
    from fleetd.engine.cpu import mlx_functions
    from fleetd.engine.load import loading, model_reading
    from fleetd.engine.settings import WorkerSettings

    worker.quiet_libraries()
    device = model_reading.pick_device("auto")
    if device == "cpu":
        mlx_functions.install()
    if not digests.remembered(folder, None):
        raise SystemExit(f"{folder} has no manifest: install it with `fleetctl models pull`.")
    settings = WorkerSettings(name=folder.name, path=str(folder), speculation="off")
    return loading.load(settings, device, lambda _: None)


if __name__ == "__main__":
    sys.exit(main())
