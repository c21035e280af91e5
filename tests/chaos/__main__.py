"""``python -m tests.chaos``: random faults against three real daemons, every answer compared. See --help."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), *(str(_HERE.parent / name) for name in ("support", "live", "p2p"))]

import faults  # noqa: E402
import forked_programs  # noqa: E402
from chaos_run import ChaosRun, fleet  # noqa: E402
from netns import why_not  # noqa: E402
from tries import Tally  # noqa: E402

from fleetd.models.model_store import ModelStore  # noqa: E402
from fleetd.models.pull import process  # noqa: E402

MODELS = _HERE.parents[1] / ".cache" / "models"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="how many, over both networks (500)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same tries (1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long (60)")
    parser.add_argument("--network", choices=("both", "proxies", "switch"), default="both")
    parser.add_argument("--kinds", default="", help="only kinds that begin so; several with commas")
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    given = parser.parse_args()
    if not forked_programs.AVAILABLE:
        parser.error("only Linux can fork daemons, and has what their faults are made of")
    networks = ["proxies", "switch"] if given.network == "both" else [given.network]
    if "switch" in networks and (reason := why_not()):
        print(f"NO PARTITIONS, LOSS OR REORDERING ARE TRIED: {reason}", flush=True)
        networks.remove("switch")
    if given.kinds:
        wanted = tuple(given.kinds.split(","))
        for name in [name for name in faults.KINDS if not name.startswith(wanted)]:
            del faults.KINDS[name]
    store = ModelStore(MODELS, hub_cache=MODELS / "no-hub")
    process.pull("smollm2-135m", store, lambda progress: None)
    tally, begun = Tally(), time.monotonic()
    for number, network in enumerate(networks, 1):
        with fleet(MODELS, network) as made:
            run = ChaosRun(made, tally, lambda line: print(line, flush=True))
            for name, reason in faults.UNABLE.items():
                if "other kind" not in reason:
                    print(f"NOT TRIED: {name}: {reason}", flush=True)
            until_s = begun + given.minutes * 60 * number / len(networks)
            run.through(given.seed + number, given.faults // len(networks), until_s)
    print(tally.table())
    print("plans of the answers:", dict(tally.plans))
    print(tally.parts_table())
    about = {"seed": given.seed, "networks": networks, "minutes": round((time.monotonic() - begun) / 60, 1)}
    if given.json is not None:
        given.json.write_text(tally.as_json(**about))
    for failure in tally.failures:
        print(failure)
    return tally.exit_code


if __name__ == "__main__":
    sys.exit(main())
