"""Memory admission: refuse with figures before allocating, instead of aborting while computing.

Pure arithmetic; the worker supplies the figures of its device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleetd.control.daemon_status import MemoryBudget
from fleetd.control.model_facts import StateSizes
from fleetd.engine.failures import require
from fleetd.errors import OutOfMemory
from fleetd.models.memory_need import WORKING_BYTES

# KV is promised to a sequence in steps of this many tokens, as it grows: most answers are far shorter than
# the context would allow, and promising all of that up front would let one chat fill the memory.
GROWTH_TOKENS = 512


def human(n_bytes: float) -> str:
    """1.5 GB, 300 MB."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def admit_weights(name: str, weights_bytes: int, room: MemoryBudget) -> None:
    """Raises OutOfMemory if a model's weights and working room do not fit what may be taken now."""
    need = weights_bytes + WORKING_BYTES
    if need > room.usable_bytes:
        free = f"{human(room.usable_bytes)} are free"
        if room.pressure == "critical":
            free = "the system is critically short of memory"
        raise OutOfMemory(
            f"{name} needs {human(need)} to load, and {free}.",
            hint="Close programs, unload other models (fleetctl models unload) or choose a smaller one.",
        )


@dataclass(frozen=True, slots=True)
class RowBound:
    """How many rows sequences may have together. Each counts as ``spare`` more than it has tokens."""

    most: int
    spare: int

    def fits(self, tokens: int, sequences: int = 1) -> bool:
        """True if so many ``sequences``, of ``tokens`` in all, do."""
        return tokens + sequences * self.spare <= self.most

    @property
    def alone(self) -> int:
        """The most tokens of one sequence."""
        return self.most - self.spare


NO_BOUND = RowBound(1 << 62, 0)


@dataclass(slots=True)
class KvBudget:
    """Bytes promised to running requests. A batch is padded to its longest member, so the price of a
    set of requests is the size of its longest one for each; what is lent to other machines' prompts, which
    are never in a batch, is counted as it is, and so is what requests have beside keys and values: images.

    ``taken_elsewhere_bytes``: of the budget, what other workers hold by now. Requests that run may still grow
    to the end of the budget, and one that finds nothing running may have all of it, for it would wait for
    ever; others wait until what is left fits them.

    ``rows``: bounds what requests have on other machines of a group, whatever they take here.

    ``on_change`` hears of what is promised in all, in bytes, before any of it is used.
    """

    budget_bytes: int
    sizes: StateSizes
    on_change: Callable[[int], None] = lambda used_bytes: None
    taken_elsewhere_bytes: int = 0
    rows: RowBound = NO_BOUND
    _tokens: dict[str, int] = field(default_factory=dict)
    _lent: dict[str, int] = field(default_factory=dict)
    # Of requests that have tokens, bytes besides.
    _beside: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        budget_bytes: int,
        bytes_per_token: int,
        fixed_bytes: int = 0,
        window_bytes: int = 0,
        window: int = 0,
    ) -> KvBudget:
        """The sizes as in StateSizes."""
        return cls(budget_bytes, StateSizes(bytes_per_token, fixed_bytes, window_bytes, window))

    def price(self, request: str, tokens: int, beside_bytes: int = 0) -> int:
        """Bytes in use if ``request``, running or not, held ``tokens``, and ``beside_bytes`` besides."""
        others = [held for name, held in self._tokens.items() if name != request]
        each = self.sizes.of(max([tokens, *others]))
        beside = sum({**self._beside, request: beside_bytes}.values())
        return (len(others) + 1) * each + sum(self._lent.values()) + beside

    def lend(self, name: str, n_bytes: int) -> None:
        """Promise bytes to a part of another machine's prompt. Raises OutOfMemory; it would not wait."""
        left = self.budget_bytes - self.taken_elsewhere_bytes - self.used_bytes
        if n_bytes > left:
            raise OutOfMemory(
                f"This part of a prompt needs {human(n_bytes)} of KV cache; "
                f"{human(max(0, left))} of {human(self.budget_bytes)} are free.",
                hint="The machine that answers does it alone, or with others.",
            )
        self._lent[name] = n_bytes
        self.on_change(self.used_bytes)

    def lent_bytes(self, name: str) -> int:
        """Bytes that ``lend`` has promised to ``name``."""
        return self._lent.get(name, 0)

    def take_memory(self, request: str, tokens: int, beside_bytes: int = 0) -> bool:
        """Promise ``tokens`` to a request, new or growing, and ``beside_bytes`` for what else it has. False,
        and nothing changes, if they do not fit."""
        waits = request not in self._tokens and (self._tokens or self._lent)
        most = self.budget_bytes - (self.taken_elsewhere_bytes if waits else 0)
        if self.price(request, tokens, beside_bytes) > most or not self._rows_fit(request, tokens):
            return False
        self._tokens[request], self._beside[request] = tokens, beside_bytes
        self.on_change(self.used_bytes)
        return True

    def _rows_fit(self, request: str, tokens: int) -> bool:
        held = {**self._tokens, request: tokens}
        return self.rows.fits(len(held) * max(held.values()), len(held))

    @property
    def capacity_tokens(self) -> int:
        """Tokens one request can have when nothing else runs."""
        return self.capacity_beside(0)

    def capacity_beside(self, n_bytes: int) -> int:
        """The same of a request that has so many bytes besides."""
        return min(self.sizes.fitting(max(0, self.budget_bytes - n_bytes)), self.rows.alone)

    def check_alone(self, tokens: int, beside_bytes: int = 0) -> None:
        """Raises OutOfMemory if a request would not fit even with nothing else running.

        Args:
            beside_bytes: what its images take.
        """
        need = self.sizes.of(tokens)
        if need + beside_bytes > self.budget_bytes:
            images = f", and its images {human(beside_bytes)}" if beside_bytes else ""
            raise OutOfMemory(
                f"A prompt and answer of {tokens} tokens need {human(need)} of KV cache{images}; "
                f"this model has {human(self.budget_bytes)} for it "
                f"({self.capacity_tokens} tokens).",
                hint=f"{'Leave out images' if images else 'Shorten the prompt'}, lower max_tokens, or raise "
                "engine.max_memory_bytes.",
            )
        if not self.rows.fits(tokens):
            raise OutOfMemory(
                f"A prompt and answer of {tokens} tokens are too long: the machines that have this model "
                f"together have room for {self.capacity_tokens}.",
                hint="Shorten the prompt, lower max_tokens, or name machines with more memory (--on).",
            )

    def exhausted(self, tokens: int) -> OutOfMemory:
        """Why a running answer that holds ``tokens`` cannot go on."""
        return OutOfMemory(
            f"The KV cache is full: {len(self._tokens)} running answers, this one of {tokens} tokens, "
            f"share "
            f"{human(self.budget_bytes)}.",
            hint="Send it again when fewer are running, or lower engine.max_streams.",
            retry_after_s=5,
        )

    def give_back(self, request: str) -> None:
        self._tokens.pop(request, None)
        self._beside.pop(request, None)
        self._lent.pop(request, None)
        self.on_change(self.used_bytes)

    def validate(self, running: list[str], guests: list[str]) -> None:
        """Check that memory is promised to the requests that run, and lent to guests' tasks only."""
        require(set(self._tokens) == set(running), f"{set(self._tokens)} hold memory, {running} run")
        require(set(self._beside) == set(self._tokens), "memory is held beside a request that has none")
        require(set(self._lent) <= set(guests), f"{set(self._lent)} are lent memory, {guests} are here")
        require(self.used_bytes <= self.budget_bytes, f"{self.used_bytes} bytes are promised")
        count, longest = len(self._tokens), max(self._tokens.values(), default=0)
        require(self.rows.fits(count * longest, count), f"{count} of {longest} tokens, of {self.rows}")

    @property
    def used_bytes(self) -> int:
        each = self.sizes.of(max(self._tokens.values(), default=0))
        return len(self._tokens) * each + sum(self._lent.values()) + sum(self._beside.values())
