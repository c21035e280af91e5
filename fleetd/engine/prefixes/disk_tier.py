"""The disk beside the prefix cache: what a model keeps of prompts as blocks and snapshots, and back.

Rows are written from and read into the caches' own memory, by threads of ``fleetd.cache``; the compute thread
only says which. A model of which some layers cannot be cut at a token has snapshots at the ends of some
blocks: where the prefix cache keeps checkpoints, and where a prompt ends with a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.cache import block_names
from fleetd.cache.block_names import LateBasis
from fleetd.cache.block_store import BlockStore
from fleetd.cache.pricing import PrefillCost, worth_per_gib
from fleetd.cache.restoring import BlockNames, BlockReader, Restore
from fleetd.cache.settings import DiskCacheSettings
from fleetd.cache.write_behind import BlocksToWrite, StateToWrite, WriteBehind, WriterFigures
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.prefixes.disk_restore import Restoring
from fleetd.engine.prefixes.prefix_cache import DENSE, NO_ORIGINS, Origins, PrefixCache
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.blocks import BlockLayout, block_rows, can_be_blocks, can_be_checked
from fleetd.engine.sequence_state.row_memory import RowBuffer

_BLOCK = limits.CACHE_BLOCK_TOKENS


def namespace(arithmetic: str, *, local_only: bool) -> str:
    """``arithmetic``: the prefix cache's namespace. Prompts that may not leave this machine are kept apart:
    no other machine is ever told of them."""
    return f"{arithmetic}, local only" if local_only else arithmetic


@dataclass
class DiskTier:
    """One model's blocks and snapshots; see the module."""

    settings: DiskCacheSettings
    model: Any
    model_name: str
    basis: LateBasis  # decides the bytes besides the tokens; nothing has a name until it is known
    cost: PrefillCost  # of this model's prefill on this machine, in seconds
    most_queued_bytes: int  # that may wait to be written
    wake: Callable[[], None] = field(default=lambda: None, init=False)

    def __post_init__(self) -> None:
        self.writer = WriteBehind(self._open, self.most_queued_bytes)
        self.reader = BlockReader(self._open, lambda: self.wake())
        self.empty: list[Any] = make_prompt_cache(self.model)
        self._layout: BlockLayout | None = None

    def _open(self) -> BlockStore:
        return BlockStore(self.settings)

    @property
    def figures(self) -> WriterFigures:
        return self.writer.figures

    def free_memory(self) -> None:
        """Let go of what waits to be written."""
        self.writer.drop()

    def close(self) -> None:
        """Write what is queued, within ``limits.CACHE_FLUSH_S``."""
        self.reader.close()
        self.writer.close(limits.CACHE_FLUSH_S)

    def layout(self) -> BlockLayout:
        """Computed from one token if no prompt was computed yet."""
        if self._layout is None:
            cache = make_prompt_cache(self.model)
            with unread_logits():
                self.model(mx.array([[0]]), cache=cache)
            self._layout = BlockLayout.of(cache)
        return self._layout

    # ---- to the disk -------------------------------------------------------------------------------------

    def store(
        self,
        tokens: list[int],
        cache: list[Any],
        arithmetic: str,
        states: Mapping[int, list[Any]] | None = None,
        *,
        local_only: bool,
        origins: Origins = NO_ORIGINS,
    ) -> None:
        """Queue the whole blocks of ``tokens``, which ``cache`` holds, evaluated and not written to again.
        ``states``: what ``checkpoints.saved`` gave at earlier tokens. ``origins``: as in a Hit."""
        names = self._names(tokens, arithmetic, local_only=local_only)
        self.store_blocks(names, len(tokens), cache, states or {}, origins)

    def store_blocks(
        self,
        names: list[bytes],
        tokens: int,
        cache: list[Any],
        states: Mapping[int, list[Any]],
        origins: Origins = NO_ORIGINS,
    ) -> None:
        """The same of a prompt of so many tokens, whose whole blocks have these names."""
        if len(origins) > limits.CACHE_ORIGINS or not names or not can_be_blocks(cache):
            return
        try:
            layout = self._layout = self._layout or BlockLayout.of(cache)
        except TypeError:
            return  # a state with arrays that this prompt did not fill
        snapshots = self._snapshots(layout, tokens, cache, states)
        if layout.states:
            # Rows past the last snapshot are of no use.
            names = names[: max(snapshots, default=-1) + 1]
        if not names:
            return
        in_rows = layout.in_rows(cache)
        buffers = [RowBuffer.computed(part) for part in in_rows]
        n_bytes = len(names) * layout.header(0).nbytes + sum(s.header.nbytes for s in snapshots.values())
        self.writer.put(
            BlocksToWrite(
                self.model_name,
                names,
                self.worth(len(names) * _BLOCK, n_bytes),
                sum(int(part.nbytes) for part in in_rows),
                layout.header,
                lambda number: block_rows(buffers, number),
                snapshots,
                tuple(sorted(origins)),
            )
        )

    def _snapshots(
        self, layout: BlockLayout, tokens: int, cache: list[Any], states: Mapping[int, list[Any]]
    ) -> dict[int, StateToWrite]:
        """The snapshots, by the number of the block at whose end each stands."""
        if not layout.states:
            return {}
        found = dict(states)
        if not tokens % _BLOCK and tokens not in found:
            found[tokens] = checkpoints.saved(cache)
        return {
            at // _BLOCK - 1: StateToWrite(*layout.snapshot(state, at))
            for at, state in found.items()
            if not at % _BLOCK
        }

    def _names(self, tokens: list[int], arithmetic: str, *, local_only: bool) -> list[bytes]:
        found = self._named(namespace(arithmetic, local_only=local_only), tokens)
        return [block_names.kept_as(name, local_only=local_only) for name in found]

    def _named(self, within: str, tokens: list[int]) -> list[bytes]:
        basis = self.basis.value
        return block_names.names(basis, within, tokens) if basis else []

    def names_for_others(self, tokens: list[int], arithmetic: str = DENSE) -> list[bytes]:
        """What other machines call the whole blocks of ``tokens``, if they compute the same bytes; none where
        what they sent could not be checked."""
        return self._named(arithmetic, tokens) if can_be_checked(self.empty) else []

    def worth(self, tokens: int, n_bytes: int) -> float:
        """What the blocks of a prompt's first ``tokens`` are worth, in the unit of ``Index.price``."""
        return worth_per_gib(self.cost.seconds(0, tokens), n_bytes)

    # ---- from the disk -----------------------------------------------------------------------------------

    def begin(
        self, tokens: list[int], prefix: PrefixCache, arithmetics: Sequence[str], *, local_only: bool
    ) -> Restoring | None:
        """Look for the beginning of a prompt whose last token is left to compute; None if the prefix cache
        has all that the disk could have."""
        have = prefix.longest(tokens, *arithmetics)
        head = tokens[:-1]
        if have >= block_names.whole_blocks(len(head)) * _BLOCK:
            return None
        named = [(each, self._names(head, each, local_only=local_only)) for each in arithmetics]
        return self._restoring(tokens, prefix, have, named)

    def _restoring(
        self, tokens: list[int], prefix: PrefixCache, have: int, named: Sequence[tuple[str, list[bytes]]]
    ) -> Restoring:
        """``named``: namespaces, and what the prompt's blocks are called in each."""
        return Restoring(self, tokens, prefix, have, self.look(named))

    def look(self, named: Sequence[tuple[str, list[bytes]]]) -> Restore:
        """Look for the beginning of which the disk has most."""
        return self.reader.look(self.model_name, [self._candidate(*each) for each in named])

    def _candidate(self, arithmetic: str, names: list[bytes]) -> BlockNames:
        if not checkpoints.needed(self.empty):
            return BlockNames(arithmetic, names)
        states = [block_names.state_name(name) for name in names]
        return BlockNames(arithmetic, names if checkpoints.any_rows(self.empty) else [], states)
