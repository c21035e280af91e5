"""A prompt that another machine has read: fetching its keys and values against computing them.

Over loopback all of them are waited for. Over a link that carries them no sooner than they are computed, the
last ones come first while the first ones are computed.
"""

from __future__ import annotations

import json
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.network import Cable, Link
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL

_KEEPING, _ASKING = "keeping", "asking"
# Nothing else listens in a namespace of its own.
_PORT = 7741
TOKENS = 4000
_KNOWN_WITHIN_S = 120.0
# The first fetches, by which the link and the other machine's disk are measured.
_FIRST = 2
_SLOW = Link("100 Mbit/s", bits_per_s=100e6)


def measure(runs: int) -> Measured:
    with Fleet([_KEEPING, _ASKING]) as fleet:
        seen = _compare(runs, fleet, {}, {})
    return Measured(_figures(seen), _HOW)


def measure_slow(runs: int) -> Measured:
    with Cable(_SLOW) as cable, Fleet([_KEEPING, _ASKING], mdns=False) as fleet:
        there, here = cable.ends
        known = {"FLEETD_FLEET_LISTEN": f"{there.address}:{_PORT}"}
        asking = {
            "FLEETD_FLEET_LISTEN": f"{here.address}:0",
            "FLEETD_FLEET_PEERS": f"{there.address}:{_PORT}",
        }
        seen = _compare(runs, fleet, {"enter": there.enter} | known, {"enter": here.enter} | asking)
    return Measured(_slow_figures(seen), _SLOW_HOW)


def _compare(runs: int, fleet: Fleet, at_keeping: Any, at_asking: Any) -> Samples:
    """``at_keeping``, ``at_asking``: how the two are started, besides what is usual."""
    seen = Samples()
    # Alone, or the other one might answer some.
    keeping = fleet.start(_KEEPING, **at_keeping)
    keeping.warm()
    expected = [_ask(keeping, _prompt(number)) for number in range(_FIRST + runs)]
    wait_for(lambda: _kept(keeping) >= len(expected) * (TOKENS - 256), _KNOWN_WITHIN_S, 0.1, keeping.log)
    keeping.control("POST", "/fleet/v1/models/unload", {"model": DEFAULT_MODEL})
    asking = fleet.start(_ASKING, **at_asking)
    fleet.until_usable(_KEEPING, _ASKING)
    asking.warm()
    wait_for(lambda: _known(fleet), _KNOWN_WITHIN_S, 0.1, asking.log)
    for number in range(_FIRST):
        _ask(asking, _prompt(number))
    for run in range(runs):
        for side in alternated(run, ("fetched", "computed")):
            if side == "computed":
                computed = _ask(asking, _prompt(1000 + run), local_only=True)
            else:
                fetched, errors = _fetched(asking, _prompt(_FIRST + run))
        seen.add(
            computed_s=computed.began_s,
            fetched_s=fetched.began_s,
            tokens=float(fetched.timings.get("fetched_n", 0)) / TOKENS,
            fetch_ms=float(fetched.timings.get("fetch_ms", 0.0)),
            error=errors,
            same=float(fetched.text == expected[_FIRST + run].text),
        )
    return seen


def _prompt(number: int) -> list[int]:
    return prompts.tokens(MODEL, 60_000 + number, TOKENS)


def _ask(daemon: Daemon, prompt: list[int], **body: Any) -> Heard:
    return daemon.complete(prompt, 8, **body)


def _fetched(asking: Daemon, prompt: list[int]) -> tuple[Heard, float]:
    """The answer, and how far what the fetch took was from its prediction."""
    before = _machine(asking)
    heard = _ask(asking, prompt)
    after = _machine(asking)
    took_s, predicted_s = (after[name] - before[name] for name in ("took_s", "predicted_s"))
    return heard, abs(took_s / predicted_s - 1) if predicted_s else 1.0


def _report(daemon: Daemon) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(daemon.control("GET", "/fleet/v1/cache"))
    return told


def _machine(daemon: Daemon) -> dict[str, float]:
    """What came from the other machine so far."""
    nothing = {"took_s": 0.0, "predicted_s": 0.0}
    return next((each for each in _report(daemon)["machines"] if each["machine"] == _KEEPING), nothing)


def _kept(daemon: Daemon) -> int:
    return sum(model["block_tokens"] for model in _report(daemon)["models"])


def _known(fleet: Fleet) -> bool:
    """True once the asking machine knows that the other one has the model unloaded."""
    found = [m for m in fleet.peer(_ASKING, _KEEPING)["models"] if m["name"] == DEFAULT_MODEL]
    return bool(found) and found[0]["state"] == "installed" and bool(found[0]["digest"])


def _figures(seen: Samples) -> list[Figure]:
    return [
        Figure(
            f"{TOKENS:,} tokens fetched over loopback: TTFT of computing them, over that of fetching",
            "x",
            seen.ratios("computed_s", "fetched_s"),
            at_least(3),
        ),
        Figure(
            "Time of a fetch against its prediction, ninth of ten",
            "%",
            [percentile(seen["error"], 0.9)],
            at_most(0.25),
        ),
        Figure("Tokens that were fetched", "%", seen["tokens"], at_least(0.95), of="worst"),
        Figure("Fetched answers equal to the other machine's", "%", seen["same"], at_least(1.0), of="worst"),
        Figure("TTFT, computed", "s", seen["computed_s"]),
        Figure("TTFT, fetched", "s", seen["fetched_s"]),
        Figure("Fetching", "ms", seen["fetch_ms"]),
    ]


def _slow_figures(seen: Samples) -> list[Figure]:
    return [
        Figure(
            f"{TOKENS:,} tokens over {_SLOW.title}: TTFT of computing all, over that of doing both",
            "x",
            seen.ratios("computed_s", "fetched_s"),
            at_least(1.0),
        ),
        Figure(
            "Time of such a fetch against its prediction, ninth of ten", "%", [percentile(seen["error"], 0.9)]
        ),
        Figure("Tokens that came", "%", seen["tokens"]),
        Figure("Such answers equal to the other machine's", "%", seen["same"], at_least(1.0), of="worst"),
        Figure("TTFT, computed", "s", seen["computed_s"]),
        Figure("TTFT, computed from the beginning while the end comes", "s", seen["fetched_s"]),
    ]


_SLOW_HOW = (
    f"As `fetch`, with a cable of {_SLOW.title} between the two machines, each in a network namespace (the "
    "kernel's token buckets). The prompt is computed from its beginning while its blocks come from the end."
)
_HOW = (
    f"Two daemons on loopback and the default model; prompts of {TOKENS:,} token ids, greedy. One machine "
    "reads them all, then unloads the model: it only keeps its disk. The other one is asked the same "
    "prompts, and, by turns, new ones with `local_only`, which it computes. Files come from the system's "
    "cache of pages. The prediction is that by which the fetch was decided, once the blocks were counted; "
    f"{_FIRST} fetches come before, by which link and disk are measured."
)
