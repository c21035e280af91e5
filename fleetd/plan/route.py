"""Where a request runs: every machine is priced in seconds, or rejected with a reason.

    price = waiting for a turn + loading the model + prefill + decode + network

Pure. What a model is, is its digest: machines compete only with the same files. A machine that may not see
prompts is never a candidate. This machine wins unless another one is clearly faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fleetd import limits
from fleetd.plan import chip_speeds

Code = Literal[
    "tried",
    "private",
    "unusable",
    "draining",
    "absent",
    "wrong_role",
    "other_files",
    "files_unknown",
    "too_small",
    "no_memory",
    "full",
]

SELF, USABLE = "self", "usable"

# Another machine has to be this much faster: prices are estimates, and an answer that stays here cannot be
# lost on the way.
ADVANTAGE = 0.9
# Each answer that already runs slows another one by this share: weights are read once for all of them, but
# their prompts and their arithmetic are their own.
SHARING = 0.3
# A machine that still has to fetch the model: minutes, whatever the link.
PULL_S = 120.0
# Whatever a peer claims of itself, prices stay finite.
SLOWEST_TOK_S = 1e-3
# What a chip's figures promise counts for less than what was measured: nobody should wait for a load to find
# out that they promised too much.
CAUTION = 1.5


@dataclass(frozen=True, slots=True)
class Holding:
    """The model as one machine holds it; speeds are 0 until measured, the digest "" until hashed."""

    digest: str = ""
    state: Literal["installed", "loading", "loaded"] = "installed"
    weights_bytes: int = 0
    memory_bytes: int = 0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine. ``node_id`` "" is this one, and its ``reach`` is SELF; a peer's is USABLE, or why it is not.

    ``evictable_bytes``: memory that idle models would give back. ``can_pull``: it would fetch what it lacks.
    """

    node_id: str
    name: str
    reach: str
    sees_prompts: bool
    chip: str = ""
    accelerator: str = ""
    cores: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    evictable_bytes: int = 0
    rtt_s: float = 0.0
    running: int = 0
    waiting: int = 0
    max_streams: int = 1
    draining: bool = False
    model: Holding | None = None
    can_pull: bool = False
    #: Of this request's prompt, probably still in its prefix cache.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteQuestion:
    """What is to be placed. Token counts are estimates; ``digest``: only these files will do, "" is any."""

    model: str
    prompt_tokens: int
    max_tokens: int
    digest: str = ""
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RoutePrice:
    """Seconds until the answer is complete. ``modelled``: from the chip's figures, not from measurements."""

    queue_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    network_s: float
    modelled: bool = False

    @property
    def total_s(self) -> float:
        return self.queue_s + self.load_s + self.prefill_s + self.decode_s + self.network_s


@dataclass(frozen=True, slots=True)
class PricedMachine:
    """``digest`` of the files it would run; "" where it would have to fetch them or has not hashed them."""

    node_id: str
    name: str
    digest: str
    price: RoutePrice


@dataclass(frozen=True, slots=True)
class Rejection:
    node_id: str
    name: str
    code: Code
    sentence: str


@dataclass(frozen=True, slots=True)
class Ranked:
    """Best first; both by the rules of this module alone, whatever the order of the candidates."""

    placements: tuple[PricedMachine, ...]
    rejected: tuple[Rejection, ...]


def route(ask: RouteQuestion, candidates: Iterable[Candidate]) -> Ranked:
    """Price what can run it, and say of the others why not."""
    # Equal prices keep this order: this machine, then by node id.
    machines = _like_their_twins(sorted(candidates, key=lambda c: c.node_id))
    # What this machine holds decides which files are meant, even where it cannot run them.
    here = next((c for c in machines if c.reach == SELF and c.model is not None), None)
    if not ask.digest and here is not None and here.model is not None:
        ask = replace(ask, digest=here.model.digest)
    refusals = {c.node_id: _refusal(ask, c) for c in machines}
    prices = {c.node_id: price(ask, c) for c in machines if refusals[c.node_id] is None}
    able = [c for c in machines if c.node_id in prices]
    able.sort(key=lambda c: _rank(c, prices[c.node_id]))
    lead = here if here in able else next(iter(able), None)
    same = [c for c in able if lead is not None and (c is lead or _alike(lead, c))]
    return Ranked(
        tuple(
            PricedMachine(c.node_id, c.name, c.model.digest if c.model else "", prices[c.node_id])
            for c in same
        ),
        tuple(refusals[c.node_id] or _other_files(ask, c) for c in machines if c not in same),
    )


def price(ask: RouteQuestion, c: Candidate) -> RoutePrice:
    """What the answer takes there, from now to its last token."""
    network_s = 0.0 if c.reach == SELF else c.rtt_s
    if c.model is None:
        return RoutePrice(0.0, PULL_S, 0.0, 0.0, network_s, modelled=True)
    chip = chip_speeds.hardware_of(c.chip, c.accelerator, c.cores)
    prefill_tok_s = max(SLOWEST_TOK_S, c.model.prefill_tok_s or chip.prefill_tok_s(c.model.weights_bytes))
    decode_tok_s = max(SLOWEST_TOK_S, c.model.decode_tok_s or chip.decode_tok_s(c.model.weights_bytes))
    streams = max(1, c.max_streams)
    slower = 1 + SHARING * min(c.running, streams - 1)
    if not c.model.prefill_tok_s:
        prefill_tok_s /= CAUTION
    if not c.model.decode_tok_s:
        decode_tok_s /= CAUTION
    prefill_s = max(0, ask.prompt_tokens - c.cached_tokens) / prefill_tok_s * slower
    decode_s = ask.max_tokens / decode_tok_s * slower
    # Those who go first, taken to want what this one wants.
    ahead = c.waiting + max(0, c.running - streams + 1)
    # Of one that loads already, half is taken to be done.
    load = {"loaded": 0.0, "loading": 0.5, "installed": 1.0}[c.model.state]
    return RoutePrice(
        queue_s=ahead * (prefill_s + decode_s) / streams,
        load_s=load * chip_speeds.load_s(c.model.weights_bytes),
        prefill_s=prefill_s,
        decode_s=decode_s,
        network_s=network_s,
        modelled=not (c.model.prefill_tok_s and c.model.decode_tok_s),
    )


def _like_their_twins(machines: list[Candidate]) -> list[Candidate]:
    """A machine where the model was never run is as fast as one of the same kind where it was."""
    measured: dict[tuple[str, str, int], Holding] = {}
    for c in machines:
        if c.model is not None and c.model.prefill_tok_s and c.model.decode_tok_s:
            measured.setdefault((c.chip, c.accelerator, c.cores), c.model)

    def told(c: Candidate) -> Candidate:
        twin = measured.get((c.chip, c.accelerator, c.cores))
        if c.model is None or twin is None or not c.chip:
            return c
        model = replace(
            c.model,
            prefill_tok_s=c.model.prefill_tok_s or twin.prefill_tok_s,
            decode_tok_s=c.model.decode_tok_s or twin.decode_tok_s,
        )
        return replace(c, model=model)

    return [told(c) for c in machines]


def _rank(c: Candidate, cost: RoutePrice) -> tuple[bool, float]:
    return (
        c.model is None,  # a machine that would have to fetch it comes last, whatever its guessed size
        cost.total_s * (ADVANTAGE if c.reach == SELF else 1.0),
    )


# ---- Who may, and who can --------------------------------------------------------------------------------


def _refusal(ask: RouteQuestion, c: Candidate) -> Rejection | None:
    """The first reason, from what nothing can change to what passes."""

    def refuse(code: Code, sentence: str) -> Rejection:
        return Rejection(c.node_id, c.name, code, sentence)

    if c.node_id in ask.exclude:
        return refuse("tried", f"{c.name} was tried already.")
    if c.reach != SELF:
        if not c.sees_prompts:
            return refuse("private", f"{c.name} may not see prompts.")
        if c.reach != USABLE:
            return refuse("unusable", f"{c.name} cannot be used: {c.reach.rstrip('.')}.")
    if c.draining:
        return refuse("draining", f"{c.name} is stopping.")
    if c.model is None:
        fetched = c.can_pull and not ask.digest
        return None if fetched else refuse("absent", f"{c.name} does not have {ask.model}.")
    if c.model.roles and "chat" not in c.model.roles:
        roles = ", ".join(c.model.roles)
        return refuse("wrong_role", f"{ask.model} on {c.name} is for {roles}, not for chat.")
    if ask.digest != "" and c.model.digest != ask.digest:
        return _other_files(ask, c)
    if c.model.state == "installed" and c.model.memory_bytes > c.available_bytes + c.evictable_bytes:
        need = f"{ask.model} needs {_gib(c.model.memory_bytes)}"
        if c.model.memory_bytes > c.memory_bytes:
            return refuse("too_small", f"{c.name} has {_gib(c.memory_bytes)} of memory; {need}.")
        free = _gib(c.available_bytes + c.evictable_bytes)
        return refuse("no_memory", f"{c.name} has {free} of memory free; {need}.")
    if c.waiting >= limits.QUEUED_REQUESTS:
        return refuse("full", f"{c.name} has {c.waiting} requests waiting already.")
    return None


def _alike(lead: Candidate, c: Candidate) -> bool:
    """Whether two machines would run the same files. Files that were not hashed are like no others."""
    if c.model is None:
        # It would fetch what the name stands for: an attempt of last resort.
        return lead.reach != SELF or lead.model is None
    return lead.model is not None and c.model.digest != "" and c.model.digest == lead.model.digest


def _other_files(ask: RouteQuestion, c: Candidate) -> Rejection:
    if c.model is None:
        return Rejection(c.node_id, c.name, "absent", f"{c.name} does not have {ask.model}.")
    if not c.model.digest:
        sentence = f"{c.name} does not know yet which files its {ask.model} is made of."
        return Rejection(c.node_id, c.name, "files_unknown", sentence)
    sentence = f"{c.name} has other files under the name {ask.model}."
    return Rejection(c.node_id, c.name, "other_files", sentence)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / limits.GIB:.1f} GiB"
