"""How one prompt's prefill is divided between machines: all of them agree before anything is computed.

Pure. Machines form a chain, helpers first and the machine that answers, the root, last. Every position in the
prompt and every chunk boundary follows from the agreement alone, so each machine can check the others.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import InvalidValue

SplitKind = Literal["layers", "tokens"]
# Layers or tokens [first, last).
Part = tuple[int, int]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Of a token's id, an int32.
TOKEN_BYTES = 4
_HASH_BYTES = 8


class WarmRows(msgspec.Struct, frozen=True):
    """Keys and values that a helper still has of an earlier prompt of the same machine: of the first
    ``tokens``, in layers [``first``, ``last``). ``prefix``: ``prefix_hashes`` of these tokens.

    ``exact``: they are what that machine would have computed; False if anything before them was rounded
    otherwise.
    """

    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    first: Annotated[int, Meta(ge=0, le=limits.LAYERS)]
    last: Annotated[int, Meta(ge=1, le=limits.LAYERS)]
    prefix: Annotated[bytes, Meta(min_length=_HASH_BYTES, max_length=_HASH_BYTES)]
    exact: bool = True

    def of(self, layer: int) -> int:
        """Leading tokens whose rows of this layer are there."""
        return self.tokens if self.first <= layer < self.last else 0

    def layers_among(self, layers: range) -> int:
        """How many of these layers it has rows of."""
        return len(range(max(layers.start, self.first), min(layers.stop, self.last)))


class Split(msgspec.Struct, frozen=True):
    """The agreement: which part of the prompt each machine computes, and in which chunks."""

    # What the cuts divide (``_RULES``).
    kind: SplitKind
    # Where each part begins, and where the last one ends. The last part is that of the machine that answers;
    # if it is empty, the whole prefill is done elsewhere.
    cuts: Annotated[tuple[_Count, ...], Meta(min_length=3, max_length=limits.SHARE_MACHINES + 1)]
    # The number of layers of the model.
    layers: Annotated[int, Meta(ge=1, le=limits.LAYERS)]
    # New tokens are [cached, tokens). ``tokens`` is the prompt without its last one, which decoding computes.
    cached: _Count
    tokens: _Count
    # Tokens of one chunk.
    chunk: Annotated[int, Meta(ge=1, le=2**20)]
    # Numbers of tokens, ascending, after which the machine that answers would keep what cannot be cut at a
    # token. A chunk ends at each, so that chunks are those of a prefill without helpers.
    places: Annotated[tuple[_Count, ...], Meta(max_length=limits.CHECKPOINTS_PER_PROMPT)] = ()
    # At this many of the last places a helper sends home what it keeps there.
    sent: Annotated[int, Meta(ge=0, le=limits.CHECKPOINTS_PER_PROMPT)] = 0

    @property
    def machines(self) -> int:
        return len(self.cuts) - 1

    @property
    def helpers(self) -> int:
        return self.machines - 1

    def part_of(self, machine: int) -> range:
        """A machine's part of what the cuts divide."""
        return range(self.cuts[machine], self.cuts[machine + 1])

    def layers_of(self, machine: int) -> range:
        """Layers that a machine computes."""
        return _RULES[self.kind].layers_of(self, machine)

    def tokens_of(self, machine: int) -> range:
        """Tokens that a machine computes."""
        return _RULES[self.kind].tokens_of(self, machine)

    def chunks_of(self, machine: int) -> list[range]:
        """Tokens that a machine computes, in its chunks."""
        return self.chunks(self.tokens_of(machine))

    def chunks(self, tokens: range) -> list[range]:
        """The chunks of ``tokens``, which begin where a chunk begins."""
        grid = range(self.cached, tokens.stop, self.chunk)
        between = {at for at in (*grid, *self.places) if tokens.start < at < tokens.stop}
        ends = [tokens.start, *sorted(between), tokens.stop]
        return [range(a, b) for a, b in itertools.pairwise(ends) if a < b]

    def snapshot_of(self, rank: int) -> int | None:
        """The token at which helper ``rank``'s last chunk begins. None if it has one chunk only.

        The helper sends running states as they are there, too: home cannot get them from later ones. At the
        beginning of the first chunk home knows them.
        """
        own = self.chunks_of(rank)
        return own[-1].start if len(own) > 1 else None

    @property
    def sent_places(self) -> tuple[int, ...]:
        """The places that ``sent`` counts."""
        return self.places[len(self.places) - self.sent :]

    def states_of(self, rank: int) -> list[int]:
        """The tokens within helper ``rank``'s part after which it sends states, ascending.

        At places it sends all that has no row per token, before its last chunk running states alone.
        """
        own, snapshot = self.tokens_of(rank), self.snapshot_of(rank)
        inner = {at for at in self.sent_places if own.start < at < own.stop}
        return sorted(inner if snapshot is None else {*inner, snapshot})

    def has_next(self, rank: int) -> bool:
        """True if helper ``rank`` sends anything to the next machine, which may be home."""
        return rank + 1 < self.helpers or _RULES[self.kind].last_sends(self)


class _LayersRules:
    """Machine i runs layers [cuts[i], cuts[i+1]) on every new token, chunk after chunk."""

    cut_between_chunks = False

    def divided(self, split: Split) -> Part:
        return 0, split.layers

    def layers_of(self, split: Split, machine: int) -> range:
        return split.part_of(machine)

    def tokens_of(self, split: Split, machine: int) -> range:
        return range(split.cached, split.tokens)

    def last_sends(self, split: Split) -> bool:
        return len(split.part_of(split.helpers)) > 0


class _TokensRules:
    """Machine i runs all layers on tokens [cuts[i], cuts[i+1]), layer after layer."""

    cut_between_chunks = True

    def divided(self, split: Split) -> Part:
        return split.cached, split.tokens

    def layers_of(self, split: Split, machine: int) -> range:
        return range(split.layers)

    def tokens_of(self, split: Split, machine: int) -> range:
        return split.part_of(machine)

    def last_sends(self, split: Split) -> bool:
        return False


# What the cuts of each kind of split mean.
_RULES: dict[SplitKind, _LayersRules | _TokensRules] = {"layers": _LayersRules(), "tokens": _TokensRules()}


KINDS: tuple[SplitKind, ...] = tuple(_RULES)


def halved(kind: SplitKind, layers: int, tokens: range, chunk: int) -> Split:
    """A split of the new ``tokens`` between one helper and the machine that answers, half of it each."""
    rules = _RULES[kind]
    undivided = Split(kind, (0, 0, 0), layers, tokens.start, tokens.stop, chunk)
    first, last = rules.divided(undivided)
    step = chunk if rules.cut_between_chunks else 1
    middle = first + (last - first) // 2 // step * step
    return msgspec.structs.replace(undivided, cuts=(first, middle, last))


def cut_bounds(layers: int, held: Sequence[Part | None], *, whole: bool = False) -> list[Part] | None:
    """The layers between which each helper's last cut may lie: every helper must have the layers it computes.

    Args:
        held: the layers that each helper of a chain has; None if it has all.
        whole: home computes nothing.

    None if machines with these layers, in this order, cannot form a chain.
    """
    firsts, lasts = zip(*(part or (0, layers) for part in held), strict=True)
    begins, end = (*firsts[1:], layers if whole else 0), layers + 1 if whole else layers
    lows = itertools.accumulate(begins, lambda low, first: max(low + 1, first), initial=0)
    highs = itertools.accumulate(reversed(lasts), lambda high, last: min(high - 1, last), initial=end)
    bounds = list(zip([*lows][1:], [*highs][:0:-1], strict=True))
    return bounds if firsts[0] == 0 and all(low <= high for low, high in bounds) else None


def checked(split: Split) -> Split:
    """The same split. Raises InvalidValue unless it divides all of the work among the machines, in order."""
    rules = _RULES[split.kind]
    first, last = rules.divided(split)
    ordered = all(a <= b for a, b in itertools.pairwise(split.cuts))
    helped = all(a < b for a, b in itertools.pairwise(split.cuts[:-1]))
    if not (ordered and helped and split.cuts[0] == first and split.cuts[-1] == last):
        raise InvalidValue(f"{split.kind} cut at {split.cuts} do not divide {first} to {last}.")
    if split.cached >= split.tokens:
        raise InvalidValue("Nothing of this prompt is left to prefill.")
    between = all(a < b for a, b in itertools.pairwise((split.cached, *split.places, split.tokens)))
    if split.places and (not between or split.sent > len(split.places)):
        raise InvalidValue(f"States at {split.places}, {split.sent} of them sent, are not of this prompt.")
    inner = split.cuts[:-1] if rules.cut_between_chunks else ()
    if any((cut - split.cached) % split.chunk and cut != split.tokens for cut in inner):
        raise InvalidValue(f"Tokens cut at {split.cuts} are not cut between chunks of {split.chunk}.")
    return split


def prefix_hashes(tokens: bytes, ends: Sequence[int]) -> dict[int, bytes]:
    """A hash, ``_HASH_BYTES`` long, of the tokens before each of the ascending ``ends``.

    Args:
        tokens: ``TOKEN_BYTES`` each, little endian. Rolling: the whole prompt is hashed once.
    """
    found, state, at = {}, hashlib.sha256(), 0
    for end in ends:
        state.update(tokens[at * TOKEN_BYTES : end * TOKEN_BYTES])
        found[end], at = state.copy().digest()[:_HASH_BYTES], end
    return found
