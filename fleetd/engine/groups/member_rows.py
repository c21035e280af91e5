"""What a member keeps of a group's sequences: for each number, the caches of its layers."""

from __future__ import annotations

from typing import Any

from fleetd import limits
from fleetd.engine.groups.member_disk import MemberDisk, PartDisk
from fleetd.engine.groups.messages import (
    ALL,
    Change,
    Copy,
    Extend,
    Extract,
    Filter,
    Forget,
    GoOn,
    KeepState,
    LeaveOut,
    MakeUp,
    Mark,
    Merge,
    PutBack,
    Return,
    Trim,
)
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import batches, checkpoints, rollback
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.made_up import can_repeat, repeat_rows
from fleetd.engine.sparse_prefill.rope import install
from fleetd.engine.sparse_prefill.sparse_caches import SparseKV, as_sparse, dense_beginning, rows
from fleetd.errors import ProtocolError


class MemberRows:
    """Changed as the answering worker tells. ``disk``: where prompts are kept; None if they are not.
    ``most_bytes``: for all that is kept in memory."""

    def __init__(self, stage: Stage, disk: PartDisk | None = None, most_bytes: int = 1 << 62) -> None:
        self._stage, self._most_bytes = stage, most_bytes
        self.disk = MemberDisk(disk, self._keep, most_bytes)
        # Of layers that keep something.
        self._held: dict[int, list[Any]] = {}
        # Of those that are batches, how many rows they have.
        self._batches: dict[int, int] = {}
        # Marks and saved states, layer by layer.
        self._notes: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._notes)

    @property
    def nbytes(self) -> int:
        """Memory of all of it; what two numbers share counts twice."""
        return sum(int(cache.nbytes) for caches in self._held.values() for cache in caches)

    def caches(self, number: int) -> list[Any]:
        """The caches of a number, one for each layer that keeps something; new ones if it has none yet."""
        if number not in self._held:
            self._keep(number, [cache for cache in self._stage.make_caches() if cache is not None])
        return self._held[number]

    def change(self, change: Change) -> None:
        """Raises ProtocolError for a change of what is not there."""
        match change:
            case Copy(old, new, tokens):
                self._keep(new, self._copy(self._known(old), tokens))
                if old in self._batches:
                    self._batches[new] = self._batches[old]
            case Trim(held, tokens):
                caches = self._known(held)
                rollback.take_back(caches, max(0, (rollback.held(caches) or 0) - tokens))
            case Merge(sequences, new):
                self._keep(new, batches.merged(_alike([self.caches(each) for each in sequences])))
                self._batches[new] = len(sequences)
            case Extend(batch, other):
                if (together := self._rows_in(batch) + self._rows_in(other)) > limits.GROUP_STREAMS:
                    raise ProtocolError(f"A batch of {together} rows was asked for.")
                self._batches[batch] = together
                for mine, theirs in zip(self._known(batch), self._known(other), strict=True):
                    mine.extend(theirs)
            case Filter(batch, rows):
                self._check_row(batch, max(rows))
                self._batches[batch] = len(rows)
                for cache in self._known(batch):
                    cache.filter(rows)
            case Extract(batch, row, new):
                self._check_row(batch, row)
                self._keep(new, batches.extracted(self._known(batch), row))
            case Mark(held, mark):
                self._note(mark, rollback.mark(self.caches(held)))
            case Return(held, mark, tokens):
                rollback.return_to(self._known(held), self._noted(mark), tokens)
            case KeepState(held, state):
                self._note(state, checkpoints.saved(self._known(held)))
            case PutBack(held, state, new, stored, tokens):
                made = checkpoints.restored(self._known(held), stored, tokens, self._noted(state))
                self._keep(new, made)
            case MakeUp(held, tokens):
                self._repeat(self._known(held), tokens)
            case Forget(held):
                # One that no tokens came for was never here.
                self._held.pop(held, None)
                self._batches.pop(held, None)
                self._notes.pop(held, None)
            case LeaveOut(held):
                install(self._stage.weights)
                self._held[held] = as_sparse(self.caches(held))
            case GoOn(held, position):
                self._held[held] = [cache.finished(position) for cache in self._known(held)]
            case _:
                self.disk.change(change, self._known, self._noted)

    def _copy(self, caches: list[Any], tokens: int) -> list[Any]:
        if tokens == ALL:
            return [copy_on_write(cache) for cache in caches]
        dense = [dense_beginning(cache, tokens) for cache in caches]
        if all(cache is not None for cache in dense):
            return dense
        stored = rollback.held(caches)
        found = None
        if stored is None or tokens <= stored:
            found = rollback.prefix_copy(caches, tokens, tokens if stored is None else stored)
        if found is None:
            raise ProtocolError(f"The first {tokens} tokens of {stored} cannot be had here.")
        return found

    def _repeat(self, caches: list[Any], tokens: int) -> None:
        held = rollback.held(caches)
        if not can_repeat(caches) or (held is not None and not 0 < held <= tokens):
            raise ProtocolError(f"What is kept here cannot be made up to {tokens} tokens.")
        if not repeat_rows(caches, tokens, self._most_bytes):
            raise ProtocolError(f"{tokens} tokens take more memory than was promised.")

    def _rows_in(self, number: int) -> int:
        """How many rows the batch under a number has. Raises ProtocolError if it is none."""
        if number not in self._batches:
            raise ProtocolError(f"No batch is kept here under {number}.")
        return self._batches[number]

    def _check_row(self, number: int, row: int) -> None:
        """Raises ProtocolError if the batch has no such row. What reads rows does not check their numbers."""
        if row >= (rows := self._rows_in(number)):
            raise ProtocolError(f"Row {row} was asked for of a batch of {rows}.")

    def _noted(self, number: int) -> list[Any]:
        if number not in self._notes:
            raise ProtocolError(f"No state is kept here under {number}.")
        return self._notes[number]

    def _note(self, number: int, states: list[Any]) -> None:
        if number in self._notes or len(self._notes) >= limits.GROUP_HELD:
            raise ProtocolError(f"No more states can be kept here under {number}.")
        self._notes[number] = states

    def _known(self, number: int) -> list[Any]:
        if number not in self._held:
            raise ProtocolError(f"Nothing is kept here under {number}.")
        return self._held[number]

    def _keep(self, number: int, caches: list[Any]) -> None:
        if number in self._held or len(self._held) >= limits.GROUP_HELD:
            raise ProtocolError(f"Nothing more can be kept here under {number}.")
        self._held[number] = caches


def _alike(sequences: list[list[Any]]) -> list[list[Any]]:
    """The caches as a batch takes them, also if tokens of some of the prompts were left out."""
    left_out = any(isinstance(cache, SparseKV) for caches in sequences for cache in caches)
    return [rows(caches) for caches in sequences] if left_out else sequences
