"""``python -m eval.profile [MODEL...]``: find the scoring profiles of models, and ship them with fleetd.

Writes fleetd/engine/scoring/shipped_profiles.json: the named folders are searched (the embedded model if none
is named), other entries stay unless the algorithm has changed. ``--check`` writes nothing, and fails if a
shipped profile is not what the search finds now.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from bench.harness.daemon import MODEL, fetch_model
from fleetd.engine import cpu
from fleetd.engine.scoring import known_profiles
from fleetd.engine.scoring.known_profiles import ALGORITHM, ShippedProfile, ShippedProfiles, StoredProfile
from fleetd.models import digest as digests

FILE = Path(known_profiles.__file__).with_name(known_profiles.SHIPPED)
_CHUNK_TOKENS = 256


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.profile", description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="folders of installed models")
    parser.add_argument("--check", action="store_true", help="compare with what is shipped")
    args = parser.parse_args()
    if not args.models:
        fetch_model()
    shipped = msgspec.json.decode(FILE.read_bytes(), type=ShippedProfiles)
    known = {each.digest: each for each in shipped.profiles} if shipped.algorithm == ALGORITHM else {}
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
    cpu.preload_blas()
    from fleetd.engine import loading
    from fleetd.engine.scoring.head_profile import Profiling
    from fleetd.engine.settings import WorkerSettings

    loading.quiet_libraries()
    device = loading.pick_device("auto")
    if device == "cpu":
        cpu.install()
    digest = digests.remembered(folder, None)
    if not digest:
        raise SystemExit(f"{folder} has no manifest: install it with `fleetctl models pull`.")
    settings = WorkerSettings(name=folder.name, path=str(folder), speculation="off")
    search = loading.load(settings, device, lambda _: None).search
    profiling = Profiling(search.tap, search.tokenizer, search.context_tokens)
    began_s, began_cpu_s, tokens = time.monotonic(), time.process_time(), 0
    while not profiling.finished:
        tokens += profiling.step(_CHUNK_TOKENS)
    found = profiling.profile()
    print(
        f"{folder.name}: {len(found.heads)} heads in the first {found.exit_layer} layers; {tokens} tokens, "
        f"{time.monotonic() - began_s:.1f} s, {time.process_time() - began_cpu_s:.1f} s of processor time"
    )
    return ShippedProfile(folder.name, digest, StoredProfile.of(found))


if __name__ == "__main__":
    sys.exit(main())
