"""What fetching a long prompt would save with a 27B hybrid over three links, as the planner prices it.

Nothing is computed here but prices; no model runs, and the machines are not around.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from bench.figures import Figure, Measured
from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.limits import GIB
from fleetd.plan.beginnings import Beginning, KeptBeginning, from_disk, from_peer
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.route import Candidate, RouteQuestion
from fleetd.plan.ways import Home, Way, plan

TOKENS, ANSWER_TOKENS = 30_000, 256
# Qwen 3.5 27B and its successors, by their config: 16 of 64 layers attend, with 4 heads of 256 numbers for
# keys and as many for values, in 16 bits. The others keep 48 heads of 128 times 128 numbers in 32 bits, and a
# convolution, once for the whole prompt.
LAYERS = 64
ROW_BYTES = 16 * 4 * 256 * 2 * 2
STATE_BYTES = 154_000_000
N_BYTES = TOKENS * ROW_BYTES
_SHAPE = ModelShape(
    weights_bytes=15 * GIB, layers=LAYERS, sizes=StateSizes(ROW_BYTES, STATE_BYTES), hidden_bytes=2 * 5120
)
# Tokens per second of a prefill of about that length, as published: oMLX with 30k in 34.5 s, and an M3 Max
# (omlx#2781: 47,942 tokens in 316 s).
MACHINES = {"870 tok/s": 870.0, "152 tok/s": 152.0}
# What TCP carries of 1, 10 and 40 Gbit/s; assumed of the other machine's disk, opened and read.
LINKS = {
    "1 Gbit/s": LinkSpeed(117e6, 0.5e-3),
    "10 Gbit/s": LinkSpeed(1.17e9, 0.3e-3),
    "40 Gbit/s": LinkSpeed(4.4e9, 0.2e-3),
}
DISK_BYTES_PER_S = 3e9
KEPT = KeptBeginning(0, TOKENS - 1, N_BYTES, DISK_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Priced:
    """The planner's way, and how long computing everything here would take to the first token."""

    way: Way
    computed_s: float

    @property
    def first_s(self) -> float:
        return self.way.first_token_s or 0.0


def home(tok_s: float, *beginnings: Beginning) -> Home:
    """This machine, which has the model loaded and nothing of the prompt in memory."""
    speed = PrefillSpeed.measured(tok_s)
    candidate = Candidate(
        "",
        "this",
        memory_bytes=64 * GIB,
        available_bytes=32 * GIB,
        state="loaded",
        digest="d",
        shape=_SHAPE,
        speed=MeasuredSpeed(tok_s, 20.0),
    )
    size = PrefillSize(_SHAPE, TOKENS - 1, 0, 2048)
    return Home(candidate, size, HelperSpec("", "this", speed, first_token_s=1 / 20), (), None, beginnings)


def priced(tok_s: float, *beginnings: Beginning | None) -> Priced:
    ask = RouteQuestion("27B", TOKENS, ANSWER_TOKENS)
    alone = home(tok_s)
    with_ = replace(alone, beginnings=tuple(each for each in beginnings if each is not None))
    (computed, chosen) = (plan(ask, [each]).chosen for each in (alone, with_))
    if computed is None or chosen is None:
        raise AssertionError("this machine can always answer")
    return Priced(chosen, computed.first_token_s or 0.0)


def rows() -> dict[str, Priced]:
    found = {}
    for name, tok_s in MACHINES.items():
        found[f"{name}, from its own disk"] = priced(tok_s, from_disk(KEPT, 0, STATE_BYTES))
        for link_name, link in LINKS.items():
            speed, fetch = PrefillSpeed.measured(tok_s), FetchSpeed.by_figures(link, DISK_BYTES_PER_S)
            fetched = from_peer(KEPT, 0, None, fetch, "another machine", speed, STATE_BYTES)
            found[f"{name}, from another machine over {link_name}"] = priced(tok_s, fetched)
    return found


def measure(runs: int) -> Measured:
    del runs  # arithmetic gives the same every time
    return Measured(
        [
            Figure(
                f"{name}: TTFT of {TOKENS:,} tokens against computing them, modelled",
                "x",
                [each.computed_s / each.first_s],
                note=f"{each.first_s:.1f} s instead of {each.computed_s:.1f} s",
            )
            for name, each in rows().items()
        ],
        "No measurements: the planner's prices for a hybrid of 27B parameters, of which "
        f"{TOKENS:,} tokens are kept ({(N_BYTES + STATE_BYTES) / 1e9:.2f} GB: rows of 16 layers, states of "
        "48; another machine sends the states twice, and 512 tokens are computed to check them), for two "
        "speeds of prefill that were published, links as TCP fills them, and a disk that "
        f"gives {DISK_BYTES_PER_S / 1e9:.0f} GB/s. The sources stand in bench/scenarios/fetch_modelled.py.",
    )
