"""Parts of other machines' prompts that this worker computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.protocol import Accepted, Assisted, AssistPrefill
from fleetd.engine.shared_prefill.frame_schedule import helper_streams
from fleetd.engine.shared_prefill.helper_prefill import HelperPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.shared_prefill.warm_store import WarmCaches, WarmStore
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, ModelUnsupported, Overloaded
from fleetd.plan.prefill.split import checked

_Task = GuestTask[AssistPrefill, HelperPrefill]


@dataclass(kw_only=True)
class HelperGuests(Guests[AssistPrefill, HelperPrefill]):
    """``sharable``: the layers of the model that this worker has; None if the model cannot be cut.

    ``spare_bytes``: memory that nothing else wants now, for rows of earlier prompts.
    """

    failure = "This part of a prompt could not be computed"

    sharable: Sharable | None
    context_tokens: int
    spare_bytes: Callable[[], int] = lambda: 0
    warm: WarmStore = field(default_factory=WarmStore, init=False)
    # What was found for parts that have not ended.
    _warm_of: dict[str, WarmCaches] = field(default_factory=dict, init=False)

    def admit(self, command: AssistPrefill) -> tuple[_Task, Accepted]:
        split, rank = checked(command.split), command.rank
        sharable = self._sharable.with_kv_bits(command.kv_bits)
        stage = sharable.stage
        total = stage.prefilled
        if split.layers != total or not 0 <= rank < split.helpers:
            raise InvalidValue(f"Part {rank} of {split.layers} layers is none of {total} layers here.")
        layers = split.layers_of(rank)
        if not stage.first <= layers.start < layers.stop <= stage.last:
            raise InvalidValue(
                f"Layers {layers.start} to {layers.stop} were asked for; "
                f"here are {stage.first} to {stage.last}."
            )
        if split.tokens > self.context_tokens:
            raise InvalidValue(f"{split.tokens} tokens do not fit a context of {self.context_tokens}.")
        if command.id in self:
            raise InvalidValue("A part of this prompt is being computed already.")
        if len(self) >= limits.ASSISTS:
            raise Overloaded(f"This machine helps with {limits.ASSISTS} prompts already.")
        # All tokens that its layers attend to.
        tokens = split.tokens_of(rank).stop
        self.budget.lend(command.id, sharable.layout.kept_bytes(layers, tokens))
        self.trim()
        there = self.warm.find(command.home, command.warm, command.kv_bits)
        if there is not None and there.rows.tokens <= split.cached:
            self._warm_of[command.id] = there
        is_warm = command.id in self._warm_of
        return _Task(command), Accepted(command.id, split.tokens, split.cached, split.chunk, is_warm=is_warm)

    def trim(self) -> None:
        """Let go of rows of earlier prompts whose memory something else wants now."""
        if self.warm:
            self.warm.trim(self.spare_bytes())

    @property
    def _sharable(self) -> Sharable:
        if self.sharable is None:
            raise ModelUnsupported("A model of this kind cannot be shared between machines.")
        return self.sharable

    def stream_names(self, command: AssistPrefill) -> Iterable[str]:
        return helper_streams(command.split, command.rank)

    def begin_work(self, task: _Task, streams: HandedOverStreams) -> HelperPrefill:
        sharable = self._sharable.with_kv_bits(task.command.kv_bits)
        return HelperPrefill(
            sharable.stage,
            sharable.layout,
            task.command,
            streams.connect(task.id),
            warm=self._warm_of.get(task.id),
        )

    def advance(self, task: _Task, work: HelperPrefill, chunk_tokens: int) -> Assisted | None:
        """``chunk_tokens`` has no effect: the split says how the prompt is cut."""
        if not work.finished:
            work.step()
        if not work.finished:
            return None
        kept = self.warm.keep(work.warm, self.spare_bytes(), instead_of=self._warm_of.get(task.id))
        return Assisted(task.id, work.steps, kept)

    def on_end(self, task: _Task) -> None:
        self._warm_of.pop(task.id, None)
