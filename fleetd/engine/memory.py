"""Memory admission: refuse with figures before allocating, instead of aborting while computing.

Pure arithmetic; the worker supplies the figures of its device.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.errors import OutOfMemory
from fleetd.limits import GIB, MIB

# What a forward pass needs besides weights and KV: activations of one chunk, logits, allocator slack.
WORKING_BYTES = 512 * MIB


def human(n_bytes: float) -> str:
    """1.5 GiB, 300 MiB."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def admit_weights(name: str, weights_bytes: int, available_bytes: int) -> None:
    """Raises OutOfMemory where a model's weights and working room do not fit what is free now."""
    need = weights_bytes + WORKING_BYTES
    if need > available_bytes:
        raise OutOfMemory(
            f"{name} needs {human(need)} to load and {human(available_bytes)} are free.",
            hint="Close programs, unload other models (fleetctl models unload) or choose a smaller one.",
        )


@dataclass(slots=True)
class KvBudget:
    """Bytes promised to running requests. A batch is padded to its longest member, so the price of a
    set of requests is its size times its longest length."""

    budget_bytes: int
    bytes_per_token: int
    _tokens: dict[str, int]

    @classmethod
    def of(cls, budget_bytes: int, bytes_per_token: int) -> KvBudget:
        return cls(budget_bytes, bytes_per_token, {})

    def price(self, tokens: int) -> int:
        """Bytes in use if a request of ``tokens`` joined the running ones."""
        longest = max([tokens, *self._tokens.values()])
        return (len(self._tokens) + 1) * longest * self.bytes_per_token

    def fits(self, tokens: int) -> bool:
        return self.price(tokens) <= self.budget_bytes

    def check_alone(self, tokens: int) -> None:
        """Raises OutOfMemory where a request would not fit even with nothing else running."""
        need = tokens * self.bytes_per_token
        if need > self.budget_bytes:
            raise OutOfMemory(
                f"A prompt and answer of {tokens} tokens need {human(need)} of KV cache; "
                f"this model has {human(self.budget_bytes)} for it "
                f"({self.budget_bytes // max(1, self.bytes_per_token)} tokens).",
                hint="Shorten the prompt, lower max_tokens, or raise engine.max_memory_bytes.",
            )

    def take(self, request: str, tokens: int) -> None:
        self._tokens[request] = tokens

    def give_back(self, request: str) -> None:
        self._tokens.pop(request, None)

    @property
    def used_bytes(self) -> int:
        if not self._tokens:
            return 0
        return len(self._tokens) * max(self._tokens.values()) * self.bytes_per_token
