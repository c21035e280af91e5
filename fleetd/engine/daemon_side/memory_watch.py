"""Whether a worker takes more memory than its model's files explain, as the daemon sees it from outside.

Code runs over a publisher's files while a worker builds a model and while it prepares a prompt. Where
``address_space`` bounds that code, the kernel does this at once. Elsewhere the daemon looks at the worker's
resident memory a few times a second, and ends a worker that is beyond its bound: other programs then lose
little memory, and for a moment only. Pure.
"""

from __future__ import annotations

from fleetd import limits
from fleetd.engine.measure.memory import human
from fleetd.errors import FleetError, ModelUnsupported
from fleetd.models.memory_need import WORKING_BYTES, build_bytes


class MemoryWatch:
    """The bounds of one worker.

    Args:
        name: of its model.
        weights_bytes: what the weights take in memory, by their files' headers.
    """

    def __init__(self, name: str, weights_bytes: int) -> None:
        self._name = name
        self._weights_bytes = weights_bytes
        # While prompts are prepared: resident bytes when the first of them began, what the worker held of
        # the device's memory then, and the most of it since.
        self._before = 0
        self._held_before: int | None = None
        self._held_most = 0

    def loading(self, resident_bytes: int) -> FleetError | None:
        """What to end a worker with that loads, or has loaded only now; None if it is within its bound."""
        bound = build_bytes(self._weights_bytes)
        if resident_bytes <= bound:
            return None
        return ModelUnsupported(
            f"Building {self._name} took {human(resident_bytes)}; its weights explain no more than "
            f"{human(bound)}.",
            hint="Its config does not fit its weights; choose another copy of the model.",
        )

    def preparing(self, resident_bytes: int, held_bytes: int) -> FleetError | None:
        """The same of a worker that prepares prompts.

        Args:
            held_bytes: what it holds of the device's memory, as it told last. Keys and values of other
                prompts may grow meanwhile.
        """
        if self._held_before is None:
            self._before, self._held_before, self._held_most = resident_bytes, held_bytes, held_bytes
        # What it has given back may be resident still, to be used again.
        self._held_most = max(self._held_most, held_bytes)
        explained = self._held_most - self._held_before + WORKING_BYTES + limits.RENDER_BYTES
        grown = resident_bytes - self._before
        if grown <= explained:
            return None
        return ModelUnsupported(
            f"Rendering a prompt with the chat template of {self._name} took {human(grown)} of memory; "
            f"at most {human(explained)} are allowed.",
            hint="The model's template is at fault; choose another model.",
        )

    def prepared(self) -> None:
        """No prompt is being prepared any more."""
        self._held_before = None
