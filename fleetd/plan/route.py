"""Where a request runs: every machine is priced in seconds, or rejected with a reason.

    price = waking + waiting for a turn + loading the model + what is kept of the prompt + prefill + decode
            + network

Pure. A digest stands for a model's files: machines compete only with the same files. The machine of the
session wins, or else this one, unless another is clearly faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.plan import chip_speeds
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.refusals import THIS_NODE, Refusal

# Another machine has to be this much faster: prices are estimates, an answer that stays here cannot be lost
# on the way, and a session that moves leaves what is known of it behind.
ADVANTAGE = 0.9
# Each answer that already runs slows another one by this share: weights are read once for all of them, but
# their arithmetic is their own. Prompts are prefilled one after the other (``unread_tokens``).
SHARING = 0.3
# A machine that still has to fetch the model: minutes, whatever the link.
PULL_S = 120.0
# Prices stay finite whatever speed a peer claims.
SLOWEST_TOK_S = 1e-3
# Bound of the seconds that a peer says a load takes.
LOAD_MOST_S = 3600.0
# Times from a chip's published figures are multiplied by this: a load takes too long to find out that the
# figures were too good.
CAUTION = 1.5
# Times are multiplied by this where a figure is in doubt, so that a fourth less is asked of another machine
# instead of a tenth: what made a measurement slow here makes the others seem fast.
DOUBT = 1.2


class Candidate(msgspec.Struct, frozen=True):
    """A machine, and the model as it has it."""

    # THIS_NODE for this machine.
    node_id: str
    name: str
    # Why it cannot be asked, whatever it could do.
    refusal: Refusal | None = None
    # It failed a short while ago, so it is asked only if no other machine can run the model.
    left_out: bool = False
    chip: str = ""
    accelerator: str = ""
    cores: int = 0
    # Bytes of all its memory, of what is free for models, and of what idle models would give back.
    memory_bytes: int = 0
    available_bytes: int = 0
    evictable_bytes: int = 0
    # Seconds there and back.
    rtt_s: float = 0.0
    # Its requests that run, that wait, and that run at once at most.
    running: int = 0
    waiting: int = 0
    max_streams: int = 1
    # Of the prompts of its running requests, the tokens that are not prefilled yet.
    unread_tokens: int = 0
    # "absent": it does not have the model.
    state: Literal["absent", "installed", "loading", "loaded"] = "absent"
    # It would fetch a model that is absent.
    can_pull: bool = False
    # Of the model's files; "" until they are hashed.
    digest: str = ""
    roles: tuple[str, ...] = ()
    shape: ModelShape = ModelShape()
    speed: MeasuredSpeed = MeasuredSpeed()
    # The factor by which earlier prompts took longer than the machine's own figures say.
    correction: float = 1.0
    # Bytes of memory that the model needs to run.
    needed_bytes: int = 0
    # Seconds that a load of the model takes there; 0 if unknown.
    load_s: float = 0.0
    # Seconds that the prefill takes with the helpers that it would get; None until they are priced.
    helped_s: float | None = None
    # Tokens of this prompt that are probably in its prefix cache, after ``bring_s``.
    cached_tokens: int = 0
    # Those of them that it still reads for another request.
    awaited_tokens: int = 0
    # Seconds until what comes from a disk or another machine is in its prefix cache.
    bring_s: float = 0.0
    # The last request of this session ran there, or the prompt that this one goes on from.
    session: bool = False
    # Seconds that waking it takes; 0 if it does not sleep.
    wake_s: float = 0.0
    # Bytes of this prompt's keys and values.
    kv_bytes: int = 0
    # Bytes for them beside the model; None if the engine is loaded, which refuses at once.
    kv_room_bytes: int | None = None

    @property
    def here(self) -> bool:
        return self.node_id == THIS_NODE

    @property
    def absent(self) -> bool:
        return self.state == "absent"

    @property
    def cramped(self) -> bool:
        """It would load the model, and then refuse the prompt."""
        return self.kv_room_bytes is not None and self.kv_bytes > self.kv_room_bytes

    @property
    def at_once(self) -> int:
        """Its requests that run beside another one; the others are waited for."""
        return min(self.running, max(1, self.max_streams) - 1)

    @property
    def hardware(self) -> chip_speeds.Hardware:
        return chip_speeds.hardware_of(self.chip, self.accelerator, self.cores, self.shape.cpu_arithmetic)


class RouteQuestion(msgspec.Struct, frozen=True):
    """What is to be placed. ``digest``: only these files will do, "" is any.

    ``counted``: a prompt that is longer than the model's context is refused. Otherwise its tokens are an
    estimate, and the engine counts them. ``admitted``: the request is one of those that wait on this machine.
    """

    model: str
    prompt_tokens: int
    max_tokens: int
    digest: str = ""
    exclude: frozenset[str] = frozenset()
    counted: bool = False
    admitted: bool = False


class RoutePrice(msgspec.Struct, frozen=True):
    """Seconds until the answer is complete. ``bring_s``: until what is kept of the prompt is in memory.
    ``modelled``: from the chip's figures, not from measurements.
    """

    queue_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    network_s: float
    modelled: bool = False
    wake_s: float = 0.0
    bring_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.before_prefill_s + self.prefill_s + self.decode_s

    @property
    def before_prefill_s(self) -> float:
        return self.wake_s + self.queue_s + self.load_s + self.bring_s + self.network_s


class PricedMachine(msgspec.Struct, frozen=True):
    """``digest`` of the files it would run; "" where it would have to fetch them or has not hashed them."""

    node_id: str
    name: str
    digest: str
    price: RoutePrice


class Rejection(msgspec.Struct, frozen=True):
    node_id: str
    name: str
    refusal: Refusal


class Ranked(msgspec.Struct, frozen=True):
    """``placements``: best first. Neither tuple depends on the order of the candidates."""

    placements: tuple[PricedMachine, ...]
    rejected: tuple[Rejection, ...]


def route(ask: RouteQuestion, candidates: Iterable[Candidate]) -> Ranked:
    """Price the machines that can run the request, and give for each of the others a reason."""
    # Equal prices keep this order: this machine, then by node id.
    machines = like_their_twins(sorted(candidates, key=lambda c: c.node_id))
    # The files on this machine decide which files are meant, even where it cannot run them.
    here = next((c for c in machines if c.here and not c.absent), None)
    if not ask.digest and here is not None:
        ask = replace(ask, digest=here.digest)
    refusals = {c.node_id: _refusal(ask, c) for c in machines}
    prices = {c.node_id: price(ask, c) for c in machines if refusals[c.node_id] is None}
    able = [c for c in machines if c.node_id in prices]
    doubt = here is not None and here.speed.doubtful
    stays = next((c for c in able if c.session), here)
    able.sort(key=lambda c: _rank(c, prices[c.node_id], stays=c is stays, doubt=doubt))
    lead = here if here in able else next(iter(able), None)
    same = [c for c in able if lead is not None and (c is lead or _alike(lead, c))]
    return Ranked(
        tuple(
            PricedMachine(c.node_id, c.name, "" if c.absent else c.digest, prices[c.node_id]) for c in same
        ),
        tuple(
            Rejection(c.node_id, c.name, refusals[c.node_id] or _other_files(ask, c, lead))
            for c in machines
            if c not in same
        ),
    )


def price(ask: RouteQuestion, c: Candidate) -> RoutePrice:
    """What the answer takes on that machine, from now to its last token."""
    network_s = 0.0 if c.here else c.rtt_s
    if c.absent:
        return RoutePrice(0.0, PULL_S, 0.0, 0.0, network_s, modelled=True)
    slower, speed = 1 + SHARING * c.at_once, prefill_speed(c)
    cached = min(c.cached_tokens, ask.prompt_tokens)
    new = range(cached, ask.prompt_tokens)
    alone_s = speed.total(1.0, new, MEASURED_TOKENS)
    prefill_s = alone_s * slower if c.helped_s is None else c.helped_s
    # The prompt with the least left is prefilled first, so no other one delays this one by more than its own,
    # but for the one that it begins with. A token of theirs takes as long as one of this prompt: they are
    # probably about as long.
    awaited = min(c.unread_tokens, c.awaited_tokens, cached)
    others = min(c.unread_tokens - awaited, c.at_once * len(new))
    before_s = speed.total(1.0, range(cached - awaited, cached), MEASURED_TOKENS)
    before_s += others * alone_s / max(1, len(new))
    decode_s = ask.max_tokens / decode_tok_s(c) * slower
    streams = max(1, c.max_streams)
    # Each request that is ahead in the queue is assumed to take as long as this one.
    waiting = c.waiting - 1 if c.here and ask.admitted else c.waiting
    ahead = max(0, waiting) + max(0, c.running - streams + 1)
    # A load that is under way is assumed to be half done.
    load = {"loaded": 0.0, "loading": 0.5}.get(c.state, 1.0)
    return RoutePrice(
        queue_s=ahead * (prefill_s + decode_s) / streams + before_s,
        load_s=load * min(LOAD_MOST_S, c.load_s or chip_speeds.load_s(c.shape.weights_bytes)),
        prefill_s=prefill_s,
        decode_s=decode_s,
        network_s=network_s,
        modelled=not (c.speed.prefill_tok_s and c.speed.decode_tok_s),
        wake_s=c.wake_s,
        bring_s=c.bring_s,
    )


def prefill_speed(c: Candidate) -> PrefillSpeed:
    """The machine's speed alone and idle: as measured and corrected, or with caution from its chip."""
    if not c.speed.prefill_tok_s:
        tok_s = c.hardware.prefill_tok_s(c.shape.weights_bytes) / CAUTION
        return PrefillSpeed.of(replace(c.speed, prefill_tok_s=tok_s)).times(c.correction)
    return PrefillSpeed.of(c.speed).times(c.correction)


def decode_tok_s(c: Candidate) -> float:
    """Tokens per second of one answer alone."""
    estimated = c.hardware.decode_tok_s(c.shape.weights_bytes) / CAUTION
    return max(SLOWEST_TOK_S, c.speed.decode_tok_s or estimated)


def like_their_twins(machines: list[Candidate]) -> list[Candidate]:
    """A machine where the model was never run is as fast as one of the same kind where it was."""
    measured: dict[tuple[str, str, int, str], Candidate] = {}
    for c in machines:
        if not c.absent and c.speed.prefill_tok_s and c.speed.decode_tok_s:
            measured.setdefault(_kind(c), c)

    def estimated(c: Candidate) -> Candidate:
        twin = measured.get(_kind(c))
        if c.absent or twin is None or not c.chip:
            return c
        return replace(c, speed=c.speed.completed(twin.speed))

    return [estimated(c) for c in machines]


def _kind(c: Candidate) -> tuple[str, str, int, str]:
    """Machines of one kind are equally fast."""
    return c.chip, c.accelerator, c.cores, c.shape.cpu_arithmetic


def _rank(c: Candidate, cost: RoutePrice, *, stays: bool, doubt: bool) -> tuple[bool, bool, bool, float]:
    """``stays``: others have to be clearly faster. ``doubt``: this machine's own figures may be wrong."""
    doubtful = doubt or c.speed.doubtful
    advantage = ADVANTAGE if stays else DOUBT if doubtful and not c.here else 1.0
    # A machine that would have to fetch the model comes last: its size is a guess. How much room a prompt
    # needs is an estimate, so whoever seems to have too little is asked where nobody else is left.
    return c.absent, c.left_out, c.cramped, cost.total_s * advantage


# ---- Which machines are able -----------------------------------------------------------------------------


def _refusal(ask: RouteQuestion, c: Candidate) -> Refusal | None:
    """The first reason, from lasting ones to passing ones."""
    if c.node_id in ask.exclude:
        return Refusal("tried", f"{c.name} was tried already.")
    if c.refusal is not None:
        return c.refusal
    if c.absent:
        return None if c.can_pull and not ask.digest else _other_files(ask, c)
    if c.roles and "chat" not in c.roles:
        return Refusal("wrong_role", f"{ask.model} on {c.name} is for {', '.join(c.roles)}, not for chat.")
    if ask.digest not in ("", c.digest):
        return _other_files(ask, c)
    if ask.counted and 0 < c.shape.context_tokens < ask.prompt_tokens:
        most, has = c.shape.context_tokens, ask.prompt_tokens
        on = "" if c.node_id == THIS_NODE else f" on {c.name}"
        return Refusal("context", f"{ask.model}{on} takes {most:,} tokens; this prompt has {has:,}.")
    if c.state == "installed" and c.needed_bytes > c.available_bytes + c.evictable_bytes:
        need = f"{ask.model} needs {gigabytes(c.needed_bytes)}"
        if c.needed_bytes > c.memory_bytes:
            return Refusal("too_small", f"{c.name} has {gigabytes(c.memory_bytes)} of memory; {need}.")
        free = gigabytes(c.available_bytes + c.evictable_bytes)
        return Refusal("no_memory", f"{c.name} has {free} of memory for models; {need}.")
    if c.waiting >= limits.QUEUED_REQUESTS:
        return Refusal("full", f"{c.name} has {c.waiting} requests waiting already.")
    return None


def _alike(lead: Candidate, c: Candidate) -> bool:
    """Whether two machines would run the same files. Files without a digest are like no others."""
    if c.absent:
        # It would fetch the files that the name stands for: an attempt of last resort.
        return not lead.here or lead.absent
    return not lead.absent and c.digest != "" and c.digest == lead.digest


def _other_files(ask: RouteQuestion, c: Candidate, lead: Candidate | None = None) -> Refusal:
    """``lead``: the machine whose files are meant."""
    if c.absent:
        return Refusal("absent", f"{c.name} does not have {ask.model}.")
    for each in (c, lead):
        if each is not None and not each.absent and not each.digest:
            sentence = f"{each.name} does not know yet which files its {ask.model} is made of"
            sentence += "." if each is c else f", so {c.name}'s may be others."
            return Refusal("files_unknown", sentence)
    return Refusal("other_files", f"{c.name} has other files under the name {ask.model}.")


def gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
