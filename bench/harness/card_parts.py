"""What the families of an accelerator share: parts of which one may fail, models, and requests' traces."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.figures import Figure, NotMeasured
from bench.harness.daemon import Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import wait_for
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.engine.protocol import Profile
from fleetd.engine.scoring.known_profiles import DEVICES, ProfileStore
from fleetd.models.model_store import ModelStore

_KNOWN_WITHIN_S, _TRACED_WITHIN_S, _POLL_S = 60.0, 5.0, 0.05
_LAST_TRACES = 5
#: A search would find nothing in random weights either, and would compute between two requests.
SCORES_NOTHING = Profile([], 0)


class MeasuredParts:
    """Parts of a measurement, each of which may fail alone: what failed is printed to stderr and told at the
    end, so that a measurement which lacks a part never looks like a whole one."""

    def __init__(self) -> None:
        self._missed: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The next part may work if this one fails."""
        try:
            yield
        except NotMeasured as error:
            self.miss(name, str(error))
        except Exception as error:  # the part's boundary
            traceback.print_exc()
            self.miss(name, type(error).__name__)

    def miss(self, name: str, why: str) -> None:
        print(f"  not measured: {name}: {why}", file=sys.stderr, flush=True)
        self._missed.append(f"{name}: {why}")

    def of(self, figures: Iterable[Figure]) -> Iterator[Figure]:
        """The figures. Raises NotMeasured behind the last one if a part failed."""
        yield from figures
        if self._missed:
            raise NotMeasured("; ".join(self._missed))


def digests(folder: Path, *names: str) -> dict[str, str]:
    """Name → digest of models in a models folder; daemons over the folder then need not hash their files."""
    store = ModelStore(folder, hub_cache=folder / "no-hub")
    return {name: store.digest(store.resolve(name)).hex for name in names}


def keep_profile(home: Path, digest: str, profile: Profile) -> None:
    """Have a daemon over ``home`` take this for what a search for the model's scoring heads has found."""
    for device in DEVICES:
        ProfileStore.in_home(home / "cache").keep(digest, device, profile)


def until_linked(fleet: Fleet, at: str, of: str) -> None:
    """Until one machine has measured its link to another one: before, it plans nothing with it."""

    def linked() -> bool:
        return any(path["bytes_per_s"] is not None for path in fleet.peer(at, of)["paths"])

    wait_for(linked, _KNOWN_WITHIN_S, _POLL_S, lambda: f"{at} has not measured its link:\n{fleet[at].log()}")


def traced(daemon: Daemon, request_id: str) -> Trace:
    """What became of a request, once that is written. Raises RuntimeError if it never is."""

    def found() -> Trace | None:
        told = daemon.control("GET", f"/fleet/v1/traces?last={_LAST_TRACES}")
        traces = msgspec.json.decode(told, type=TracesView).traces
        # An answer's id goes on with the number of the choice, and of the attempt elsewhere.
        return next((trace for trace in traces if trace.id.startswith(request_id)), None)

    return wait_for(found, _TRACED_WITHIN_S, _POLL_S, lambda: f"no trace of {request_id}:\n{daemon.log()}")
