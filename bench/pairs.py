"""What a second machine would give, by the planner's own prices: `python -m bench.pairs`.

Nothing is measured here. The speeds of the chips are their makers' figures (``fleetd/plan/chip_speeds.py``),
and the links carry what is usual for their kind. The tables stand in docs/macs.md, docs/links.md,
docs/large-models.md and docs/smart-prefill.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import ModelShape, StateSizes, WireBits
from fleetd.limits import KIB
from fleetd.models import catalog
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.plan.chip_speeds import APPLE, GB10, Hardware
from fleetd.plan.costs import LinkSpeed, modelled
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, Shortage, cut, step_s
from fleetd.plan.prefill.choice import HelperSpec, PrefillOption, PrefillSize, choose, options
from fleetd.plan.rank_price import NCCL_S, RDMA_S, SumTime, divided, ring_sum_s
from fleetd.plan.scoring import Scorer, SmartPlan, SmartPrefillQuestion
from fleetd.plan.scoring import plan as plan_scoring

#: Tokens of one chunk on a GPU.
CHUNK = 2048
#: The share of a machine's memory that its GPU may hold, roughly as Metal recommends it.
GPU_SHARE = 2 / 3


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as it is sold. ``memory_gb``: its whole memory."""

    name: str
    memory_gb: int
    hardware: Hardware


MACBOOK = Machine("MacBook Air M4", 16, APPLE[4, ""])
STUDIO = Machine("Mac Studio M4 Max", 64, APPLE[4, "Max"])
SPARK = Machine("DGX Spark", 128, GB10)


def _shape(weights_gb: float, layers: int, width: int, kv_kib: int) -> ModelShape:
    """``kv_kib``: KiB of keys and values of one token, over all layers."""
    return ModelShape(
        weights_bytes=int(weights_gb * 1e9),
        layers=layers,
        sizes=StateSizes(kv_kib * KIB),
        hidden_bytes=2 * width,
        hidden_width=width,
        # Of 64 numbers of 16 bits: as many bytes, a scale and a bias.
        wire_token_bytes=kv_kib * KIB * 68 // 128,
    )


#: Models of the catalog whose layers all keep keys and values, in 4 bits: by the configs of their publishers.
MODELS = {
    "qwen3-4b": _shape(2.3, 36, 2560, 144),
    "qwen3-8b": _shape(4.6, 36, 4096, 144),
    "qwen3-14b": _shape(8.3, 40, 5120, 160),
    "llama-3.3-70b": _shape(39.7, 80, 8192, 320),
}
#: Bytes per second that usually get through, and seconds of a round trip.
LINKS = {
    "Thunderbolt 4 or 5, bridge": LinkSpeed(2e9, 0.3e-3),
    "10 Gbit/s Ethernet": LinkSpeed(1.1e9, 0.3e-3),
    "2.5 Gbit/s Ethernet": LinkSpeed(280e6, 0.4e-3),
    "1 Gbit/s Ethernet": LinkSpeed(112e6, 0.5e-3),
    "Wi-Fi, same room": LinkSpeed(60e6, 4e-3),
    "Wi-Fi, next room, or a VPN": LinkSpeed(20e6, 10e-3),
}
ETHERNET = "1 Gbit/s Ethernet"
_RDMA, _NCCL = "Thunderbolt 5 with RDMA", "200 Gbit/s with NCCL"
#: What hidden states of a model over several machines may travel over. RDMA is there for comparison: by what
#: others measured (docs/large-models.md).
HOPS = {"Thunderbolt 5 with RDMA (not for whole layers)": LinkSpeed(6e9, 0.02e-3), **LINKS}


def alone_s(machine: Machine, model: str, tokens: int) -> float:
    """Seconds in which the machine reads a prompt without help."""
    shape = MODELS[model]
    return modelled(machine.hardware, shape).total(1.0, range(tokens), CHUNK)


def together(
    home: Machine, helper: Machine, link: str, model: str, tokens: int, wire_bits: WireBits = 0
) -> PrefillOption:
    """The plan that ``home`` would take for a prompt, with ``helper`` at the other end of the link.

    ``wire_bits``: in how many bits that may send keys and values; 0 is as they are computed.
    """
    shape = replace(MODELS[model], wire_bits=wire_bits)
    here, there = (modelled(machine.hardware, shape) for machine in (home, helper))
    prompt = PrefillSize(shape, tokens, 0, CHUNK)
    # Not loaded, at no cost: so that the weights count among what it has room for.
    room = int(helper.memory_gb * 1e9 * GPU_SHARE)
    spec = HelperSpec("helper", helper.name, there, LINKS[link], loaded=False, narrows=True, room_bytes=room)
    return choose(options(prompt, HelperSpec("", home.name, here), [spec])).best


def seconds(value: float) -> str:
    """Two digits are more than a model of speeds is good for; more would promise too much."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def macs() -> str:
    """The table of docs/macs.md: a small Mac, a large one, and both."""
    rows = [
        "| model | prompt | MacBook alone | Studio alone | both, over 1 Gbit/s | both, over Thunderbolt |",
        "|---|---|---|---|---|---|",
    ]
    for model in ("qwen3-4b", "qwen3-8b", "qwen3-14b", "llama-3.3-70b"):
        for tokens in (4_000, 16_000):
            small = seconds(alone_s(MACBOOK, model, tokens)) if _fits(MACBOOK, model) else "does not fit"
            studio_s = alone_s(STUDIO, model, tokens)
            both = [
                _gain(together(STUDIO, MACBOOK, link, model, tokens), studio_s)
                for link in (ETHERNET, "Thunderbolt 4 or 5, bridge")
            ]
            rows.append(f"| `{model}` | {tokens:,} | {small} | {seconds(studio_s)} | {' | '.join(both)} |")
    return "\n".join(rows)


def links() -> str:
    """The tables of docs/links.md: the gain of one prompt by the link that two machines have, and with keys
    and values that are sent in 8 bits."""
    said = "The same with `fleet.wire_bits = 8`. A star: keys and values are sent in 8 bits."
    return f"{_links(0)}\n\n{said}\n\n{_links(8)}"


def _links(wire_bits: WireBits) -> str:
    rows = [
        "| link | carries | a Spark helps, 4,000 tokens | 16,000 tokens | second Studio helps, 4,000 tokens "
        "| 16,000 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, link in LINKS.items():
        cells = []
        for helper in (SPARK, STUDIO):
            for tokens in (4_000, 16_000):
                if helper is SPARK and name.startswith("Thunderbolt"):
                    cells.append("has no such port")
                    continue
                local_s = alone_s(STUDIO, "qwen3-8b", tokens)
                plan = together(STUDIO, helper, name, "qwen3-8b", tokens, wire_bits)
                cells.append(_gain(plan, local_s) + (" *" if plan.wire_bits else ""))
        rows.append(f"| {name} | {link.bytes_per_s / 1e6:,.0f} MB/s | {' | '.join(cells)} |")
    return "\n".join(rows)


#: Models that fit no machine of a kind: bytes of the files, of what a token reads of them, layers, width.
_LARGE = {
    "llama-3.3-70b": (39.7e9, 39.7e9, 80, 8192, 4096),
    "qwen3-235b-a22b": (132e9, 12.4e9, 94, 4096, 2048),
}
#: Several of one kind, and the model that they hold together.
_SEVERAL = (
    ("llama-3.3-70b", 2, Machine("32 GB, M4", 32, APPLE[4, ""])),
    ("llama-3.3-70b", 2, Machine("48 GB, M4 Pro", 48, APPLE[4, "Pro"])),
    ("qwen3-235b-a22b", 3, Machine("96 GB, M3 Ultra", 96, APPLE[3, "Ultra"])),
    ("qwen3-235b-a22b", 2, Machine("DGX Spark", 128, GB10)),
)


def together_tok_s(model: str, count: int, machine: Machine, link: LinkSpeed) -> float:
    """Tokens per second of one answer of a model that ``count`` equal machines hold; 0 if they do not."""
    found = _cut(model, count, machine)
    if found is None:
        return 0.0
    return 1 / step_s(found, 2 * (len(found.parts) - 1) * hop_s(link, _LARGE[model][3]))


def divided_tok_s(model: str, count: int, machine: Machine, sum_s: float) -> float:
    """The same if they divide every layer and a sum over all of them takes so long."""
    found = _cut(model, count, machine)
    return 1 / divided(found, _LARGE[model][2], SumTime(sum_s)).step_s if found is not None else 0.0


def _cut(model: str, count: int, machine: Machine) -> GroupCut | None:
    """Whole layers over ``count`` equal machines; None if they do not hold them."""
    weights, read, layers, _, row = _LARGE[model]
    room = int(machine.memory_gb * 1e9 * GPU_SHARE) - WORKING_BYTES
    bytes_per_s = machine.hardware.decode_tok_s(1) * weights / read
    each = [
        GroupMachine(str(number), machine.name, room, bytes_per_s, int(weights / layers))
        for number in range(count)
    ]
    size = GroupModelSize(layers, 0, row)
    found = cut(size, each[0], each[1:], least_tokens=limits.GROUP_LEAST_TOKENS, most_tokens=8192)
    return None if isinstance(found, Shortage) else found


def hop_s(link: LinkSpeed, width: int) -> float:
    """Seconds in which the hidden state of one token reaches the next machine."""
    return link.rtt_s / 2 + 2 * width / link.bytes_per_s


def groups() -> str:
    """The table of docs/large-models.md: how fast several machines write with a model that none holds."""
    heads = (
        f"{count} × {machine.name}: `{model}`"  # noqa: RUF001
        for model, count, machine in _SEVERAL
    )
    rows = [
        f"| link | a hop of 16 KB | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(_SEVERAL)}",
    ]
    for name, link in HOPS.items():
        found = (together_tok_s(*each, link) for each in _SEVERAL)
        cells = (f"{speed:.1f} tok/s" if speed else "does not fit" for speed in found)
        rows.append(f"| {name} | {1000 * hop_s(link, 8192):.2f} ms | {' | '.join(cells)} |")
    said = "The same with a part of every layer on each machine. A sum is one of 16 KB over two machines."
    return "\n".join([*rows, "", said, "", *_divided_rows()])


def _divided_rows() -> list[str]:
    """Those of the second table, over the machines of which a power of two divides the heads."""
    pairs = [each for each in _SEVERAL if each[1] == 2]
    heads = (
        f"{count} × {machine.name}: `{model}`"  # noqa: RUF001
        for model, count, machine in pairs
    )
    rows = [f"| link | a sum | {' | '.join(heads)} |", f"|---|---|{'---|' * len(pairs)}"]
    for name, two_s in {_RDMA: RDMA_S, _NCCL: NCCL_S, **dict.fromkeys(LINKS, 0.0)}.items():
        cells = []
        for model, count, machine in pairs:
            if (machine.name == SPARK.name and "Thunderbolt" in name) or (
                machine.name != SPARK.name and name == _NCCL
            ):
                cells.append("-")
                continue
            sum_s = two_s or ring_sum_s(count, [LINKS[name]], 2 * _LARGE[model][3])
            cells.append(f"{divided_tok_s(model, count, machine, sum_s):.1f} tok/s")
        two_s = two_s or ring_sum_s(2, [LINKS[name]], 2 * 8192)
        rows.append(f"| {name} | {1000 * two_s:.2f} ms | {' | '.join(cells)} |")
    return rows


#: The model that scores (qwen3-0.6b), and how much of a prompt is kept.
_SCORER, _RATIO = _shape(0.34, 28, 1024, 112), 0.2
#: Which model answers where, and the machine that scores; None is the same one.
_SMART = (
    ("qwen3-8b", MACBOOK, None),
    ("qwen3-14b", STUDIO, None),
    ("llama-3.3-70b", STUDIO, None),
    ("llama-3.3-70b", STUDIO, MACBOOK),
    ("llama-3.3-70b", SPARK, MACBOOK),
)
_SMART_TOKENS = (8_000, 16_000, 32_000, 64_000, 128_000)


def smart_plan(model: str, home: Machine, scorer: Machine | None, tokens: int) -> SmartPlan:
    """What the planner makes of a prompt that a small model scores, on ``home`` or on another machine."""
    target = modelled(home.hardware, MODELS[model])
    asked = SmartPrefillQuestion(tokens, _RATIO, target, CHUNK, target.total(1.0, range(tokens), CHUNK))
    speed = modelled((scorer or home).hardware, _SCORER)
    link = LINKS[ETHERNET] if scorer else None
    return plan_scoring(asked, [Scorer("scorer", (scorer or home).name, speed, link=link)])


def smart() -> str:
    """The table of docs/smart-prefill.md: what scoring and a fifth of the prompt take, beside all of it."""
    rows = [
        f"| the answer by | scores by | {' | '.join(f'{tokens:,}' for tokens in _SMART_TOKENS)} |",
        f"|---|---|{'---|' * len(_SMART_TOKENS)}",
    ]
    for model, home, scorer in _SMART:
        cells = []
        for tokens in _SMART_TOKENS:
            found = smart_plan(model, home, scorer, tokens)
            gain = f"{found.dense_s / found.predicted_s:.1f}×"  # noqa: RUF001
            cells.append(f"{seconds(found.dense_s)} → {seconds(found.predicted_s)}, {gain}")
        by = scorer.name if scorer else "itself"
        rows.append(f"| {home.name}, `{model}` | {by} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _fits(machine: Machine, model: str) -> bool:
    entry = catalog.find(model)
    return entry is not None and entry.memory_gib <= machine.memory_gb * GPU_SHARE


def _gain(plan: PrefillOption, local_s: float) -> str:
    if plan.kind == "local":
        return "no help: not clearly faster"
    return f"{seconds(plan.predicted_s)}, {local_s / plan.predicted_s:.2f}×"  # noqa: RUF001


if __name__ == "__main__":
    print(f"{macs()}\n\n{links()}\n\n{groups()}\n\n{smart()}")
