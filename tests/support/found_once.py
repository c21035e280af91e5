"""What a load finds out about a model by computing with it is found out once for all daemons of a run.

Every daemon of the tests has a home of its own, so none of them knows what another one has stored about the
same files, and each would try their arithmetic again: three fifths of a load of the default model. A result
that a home does not have yet is taken from a folder that all share, and is stored in the home as if it had
been found there; the first load finds it out. What decides a result is its basis here as well, so that
another model or device has results of its own.

A daemon whose environment names the folder in ``VARIABLE`` has workers that do so; others are left as they
are. What is stored, and when it is found out again, has tests of its own (tests/engine/test_load_findings.py,
tests/engine/test_speculation_verdicts.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VARIABLE = "FOUND_ONCE"


def install() -> None:
    """Called in the process that all programs are forked from."""
    from fleetd.engine.load.load_findings import FindingsKey
    from fleetd.engine.speculation.verdicts import VerdictKey
    from fleetd.storage.cached_results import CachedResult

    class FoundOnce(CachedResult[Any]):
        """``shared``: the same result in the folder of all homes."""

        def __init__(self, own: CachedResult[Any], shared: CachedResult[Any]) -> None:
            self._own, self._shared = own, shared

        def find(self) -> Any:
            known = self._own.find()
            if known is None and (known := self._shared.find()) is not None:
                self._own.keep(known)
            return known

        def keep(self, found: Any) -> None:
            self._own.keep(found)
            self._shared.keep(found)

    for kind in (FindingsKey, VerdictKey):
        usual = kind.cached

        def cached(self: Any, cache: Path, usual: Any = usual) -> CachedResult[Any]:
            own = usual(self, cache)
            folder = os.environ.get(VARIABLE)
            return own if folder is None else FoundOnce(own, usual(self, Path(folder)))

        kind.cached = cached  # type: ignore[method-assign,assignment]
