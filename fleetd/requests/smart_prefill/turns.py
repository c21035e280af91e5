"""Taking turns: the model that scores and the one that answers do not fit this machine together.

    the target is not loaded     scorer loads ─► scores ─► gives way ─► target loads, which it has to anyhow
    the target is loaded, idle   target gives way ─► the same

What the target keeps of prompts on the disk stays; what it keeps in memory is lost, so what is left of a
prompt is priced as if nothing of it were cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Loading
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.plan.scoring import Parking


@dataclass(frozen=True, slots=True)
class TwoModels:
    """The models of one prompt: ``scorer`` scores it, then ``target`` answers."""

    pool: EnginePool
    scorer: ModelFolder
    target: ModelFolder

    def scoring(self) -> AbstractAsyncContextManager[None]:
        """Meanwhile the first one may be loaded and used, as ``TurnTaking.in_turn`` says."""
        return self.pool.turn_taking.in_turn(self.scorer, self.target)

    def loading(self) -> AsyncGenerator[Loading, None]:
        """The load of what answers, after that. Raises FleetError."""
        return self.pool.loading(self.target)


class ModelTurns:
    """Args:
    usable_bytes: what one more model may take now, with what it works with.
    needed_bytes: what a model needs of that. Reads files.
    """

    def __init__(
        self,
        pool: EnginePool,
        usable_bytes: Callable[[], int],
        needed_bytes: Callable[[ModelFolder], int],
    ) -> None:
        self._pool = pool
        self._usable_bytes = usable_bytes
        self._needed_bytes = needed_bytes

    async def price(self, scorer: ModelFolder, target: ModelFolder) -> Parking | str | None:
        """The loads of taking turns, or why that cannot be; None if both fit, or if that is not known."""
        if scorer.name == target.name:
            return None
        if await file_threads.look(self._pool.takes_others, target, None):
            return None  # this machine holds a part of it only
        needs = [file_threads.look(self._needed_bytes, folder) for folder in (scorer, target)]
        scorer_bytes, target_bytes = await asyncio.gather(*needs)
        usable_bytes = self._usable_bytes()
        scores, answers = (self._pool.engine(folder) is not None for folder in (scorer, target))
        if answers:
            if scores or scorer_bytes <= usable_bytes:
                return None
            if scorer_bytes > usable_bytes + self._pool.turn_taking.freed_by(target):
                return f"{scorer.name} does not fit here, even in place of {target.name}."
        elif scores:
            if target_bytes <= usable_bytes:
                return None
        elif scorer_bytes + target_bytes - WORKING_BYTES <= usable_bytes or scorer_bytes > usable_bytes:
            # Models that are idle may make room for the target; what fits then is seen once it is loaded.
            return None
        if why := self._pool.turn_taking.why_stays(target) or self._pool.turn_taking.why_pinned(scorer):
            return f"{scorer.name} does not fit beside {target.name}: they cannot take turns, as {why}."
        scorer_s = 0.0 if scores else self._pool.load_s(scorer)
        return Parking(scorer_s, self._pool.load_s(target), needed=not answers)

    def turn(self, scorer: ModelFolder, target: ModelFolder) -> TwoModels:
        return TwoModels(self._pool, scorer, target)
