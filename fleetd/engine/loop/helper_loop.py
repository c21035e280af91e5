"""The compute loop of a worker that has some of a model's layers: it only helps other machines."""

from __future__ import annotations

from fleetd.engine.loop.compute_loop import ComputeLoop
from fleetd.engine.loop.inbox import Item
from fleetd.engine.protocol import DraftFor, Failed
from fleetd.errors import ModelUnsupported


class HelperLoop(ComputeLoop):
    """A ``Scheduler`` for helpers: it has no sequences of its own."""

    def _take(self, item: Item) -> None:
        if isinstance(item, DraftFor):
            self.emit(Failed(item.id, ModelUnsupported.code, "Some layers of a model draft nothing."))
        else:
            super()._take(item)

    def _compute(self) -> None:
        # Of no effect: a split says how its prompt is cut.
        self._turn_guests(chunk_tokens=0)
