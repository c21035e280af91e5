"""What other machines sent of prompts, and what was sent to them: by machine, since the daemon started."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from fleetd.control.cache_report import MachineFetches

#: Told how each fetch ended ("done" or an error's code), and its bytes.
FetchObserver = Callable[[str, int], None]


class FetchCounts:
    """Names are at most as many as the roster has had machines. Blocks are sent on threads."""

    def __init__(self, observe: FetchObserver = lambda outcome, n_bytes: None) -> None:
        self._observe = observe
        self._machines: dict[str, MachineFetches] = {}
        self._lock = threading.Lock()

    def machines(self) -> list[MachineFetches]:
        """The counts of each machine, in the order of their names."""
        return [self._machines[name] for name in sorted(self._machines)]

    def received(
        self, machine: str, tokens: int, n_bytes: int, *, took_s: float, predicted_s: float, saved_s: float
    ) -> None:
        """A fetch that went well, or as far as it went. ``saved_s``: computing would have taken longer."""
        self._observe("done", n_bytes)
        self._add(
            machine,
            prompts=1,
            tokens=tokens,
            n_bytes=n_bytes,
            took_s=took_s,
            predicted_s=predicted_s,
            saved_s=saved_s,
        )

    def failed(self, machine: str, code: str) -> None:
        self._observe(code, 0)
        self._add(machine, failed=1)

    def sent(self, machine: str, n_bytes: int) -> None:
        self._add(machine, sent_prompts=1, sent_bytes=n_bytes)

    def _add(self, machine: str, **more: float) -> None:
        with self._lock:
            before = self._machines.get(machine, MachineFetches(machine))
            grown = {name: getattr(before, name) + amount for name, amount in more.items()}
            self._machines[machine] = msgspec.structs.replace(before, **grown)
