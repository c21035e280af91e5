"""Machines that could share a prompt: daemons whose workers have cores of their own, or a share of them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from bench.figures import alternated
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.cores import Share, starting_on, why_no_cores, why_no_share, worker_of
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.network import Cable, Link, passed_bytes, why_not
from bench.harness.samples import Closing, wait_for
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.models.catalog import DEFAULT_MODEL

LOOPBACK = Link("loopback")
HOME, HELPER, SECOND_HELPER = "home", "helper", "helper-2"
LOCAL = "local"
# Alone, one core would take smaller chunks, not to keep others waiting; each one reads all weights anew, so
# sharing would seem to gain what it only spares.
CHUNK_TOKENS = 256
SETTINGS = {
    "FLEETD_ENGINE_THREADS": "1",
    "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1",
    "FLEETD_ENGINE_PREFILL_CHUNK_TOKENS": str(CHUNK_TOKENS),
}
_KNOWN_WITHIN_S = 120.0
_TRACED_WITHIN_S = 5.0
_LAST_TRACES = 5
_POLL_S = 0.1
# Long enough to see how fast each machine really is.
_WARM_TOKENS = 500
# Any: nothing that long is asked.
_LONG_TOKENS = 4000


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and its trace where other machines could have helped; ``at`` decoded it."""

    heard: Heard
    trace: Trace | None
    at: str = HOME

    @property
    def ttft_s(self) -> float:
        return self.heard.began_s

    @property
    def shared(self) -> bool:
        return self.trace is not None and self.trace.outcome == "shared"

    @property
    def how(self) -> str:
        """What became of it, in a few words."""
        if self.trace is None or self.trace.chosen.kind == LOCAL:
            return LOCAL
        why = f" ({self.trace.code}: {self.trace.reason})" if self.trace.code else ""
        where = "" if self.at == HOME else f", answered by the {self.at}"
        return f"{self.trace.chosen.kind}, {self.trace.outcome}{where}{why}"


def why_none(link: Link = LOOPBACK, *shares: float) -> str:
    """Why such machines cannot be had here; "" where they can."""
    return why_no_cores() or why_not(link) or (why_no_share() if any(s < 1 for s in shares) else "")


class Machines(Closing):
    """All are ready, know the links, and have computed a prompt.

    Nothing is kept in the prefix cache, so that the same prompt can be asked again. Each machine's worker has
    a core of its own; where there are more machines than cores, all of them have all cores and their shares.

    Args:
        link: between home and its helper; others than loopback are for two machines.
        shares: each machine's share of a core, home's first.
        helper_has_model: otherwise it is a member of the fleet that cannot help.
        helper_bytes: memory that a helper may take; where the model does not fit, it loads some layers.
        models: the models folder of all machines, where it is not the one of all benchmarks.
    """

    def __init__(
        self,
        link: Link = LOOPBACK,
        shares: Sequence[float] = (1.0, 1.0),
        *,
        helper_has_model: bool = True,
        helper_bytes: int = 0,
        models: Path | None = None,
    ) -> None:
        self._shares = dict(zip((HOME, HELPER, SECOND_HELPER), shares, strict=False))
        self._model_there = helper_has_model
        self._helper_bytes = helper_bytes
        self._models = models
        self._exit = contextlib.ExitStack()
        every = sorted(os.sched_getaffinity(0))
        crowded = len(every) < len(shares)
        own = [set(every)] * len(shares) if crowded else [{core} for core in every]
        self.cores = dict(zip(self._shares, own, strict=False))
        self._workers: dict[str, int] = {}
        with self._exit:
            self._start(link)
            # Kept open from here on; closed by ``close``.
            self._exit = self._exit.pop_all()

    def close(self) -> None:
        self._exit.close()

    def __getitem__(self, name: str) -> Daemon:
        return self._fleet[name]

    # ---- asking ------------------------------------------------------------------------------------------

    def ask(
        self,
        prompt: list[int],
        *,
        alone: bool,
        answer_tokens: int = 1,
        at: str = HOME,
        each: Callable[[], None] | None = None,
    ) -> Asked:
        """Ask at one machine; ``alone`` keeps the others out of it, ``each`` is called for every token."""
        daemon = self._fleet[at]
        body = {"local_only": True} if alone else {}
        with daemon.stream("completions", prompt=prompt, max_tokens=answer_tokens, **body) as stream:
            heard, request_id = stream.hear(each), stream.id
        for name, pid in self._workers.items():
            if worker_of(self._fleet[name].process.pid, self.cores[name]) != pid:
                raise RuntimeError(f"the worker of {name} was started again:\n{self._fleet[name].log()}")
        return Asked(heard, None) if alone else self._traced(heard, request_id)

    def both(
        self, run: int, seed: int, length: int, answer_tokens: int = 1, each: Callable[[], None] | None = None
    ) -> tuple[Asked, Asked]:
        """The same prompt alone and as the planner decides; which one goes first changes with the run."""
        prompt = prompts.tokens(MODEL, seed, length)
        found = {
            alone: self.ask(prompt, alone=alone, answer_tokens=answer_tokens, each=each)
            for alone in alternated(run, (True, False))
        }
        return found[True], found[False]

    def worker_connections(self) -> int:
        """How many connections all workers have to other machines."""
        return sum(len(psutil.Process(pid).net_connections("inet")) for pid in self._workers.values())

    def passed_bytes(self) -> int:
        """What has crossed the link so far, both ways, seen from home; not on loopback."""
        return passed_bytes(self._fleet[HOME].process.pid)

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """While this lasts, home cannot use this machine: its daemon stands still."""
        self._fleet.signal(name, signal.SIGSTOP)
        self._fleet.until_unusable(HOME, name)
        try:
            yield
        finally:
            self._fleet.signal(name, signal.SIGCONT)
            self._fleet.until_usable(*self._shares)
            self._until_helpful()

    def part_of_helper(self) -> tuple[int, int]:
        """The layers that the helper has, as home sees it: first, and one after the last; (0, 0): none."""
        models = self._fleet.peer(HOME, HELPER)["models"]
        (seen,) = [model for model in models if model["name"] == DEFAULT_MODEL]
        return seen["part_first"], seen["part_last"]

    def _traced(self, heard: Heard, request_id: str) -> Asked:
        """Traces are written soon after the answer, by the machine that decoded it.

        There is none where no machine could help.
        """
        deadline = time.monotonic() + _TRACED_WITHIN_S
        while time.monotonic() < deadline:
            for name in self._workers:
                told = self._fleet[name].control("GET", f"/fleet/v1/traces?last={_LAST_TRACES}")
                for trace in msgspec.json.decode(told, type=TracesView).traces:
                    # An answer's id goes on with the number of the choice, and of the attempt elsewhere.
                    if trace.id.startswith(request_id):
                        return Asked(heard, trace, name)
            time.sleep(_POLL_S)
        return Asked(heard, None)

    # ---- starting ----------------------------------------------------------------------------------------

    def _start(self, link: Link) -> None:
        keep = self._exit.enter_context
        ends = keep(Cable(link)).ends if link.shaped else []
        shares = {name: keep(Share(share)) if share < 1 else None for name, share in self._shares.items()}
        models = dict.fromkeys(self._shares, self._models) if self._models else {}
        if not self._model_there:
            models[HELPER] = Path(keep(tempfile.TemporaryDirectory()))
        self._fleet = keep(Fleet(self._shares, models=models, mdns=False))
        known: list[str] = []
        for place, name in enumerate(self._shares):
            host = ends[place].address if ends else "127.0.0.1"
            settings = SETTINGS | {"FLEETD_FLEET_LISTEN": f"{host}:0", "FLEETD_FLEET_PEERS": ",".join(known)}
            if name != HOME and self._helper_bytes:
                settings["FLEETD_ENGINE_MAX_MEMORY_BYTES"] = str(self._helper_bytes)
            daemon = self._fleet.start(name, enter=ends[place].enter if ends else (), **settings)
            known.append(f"{host}:{daemon.status()['fleet']['port']}")
        self._fleet.until_usable(*self._shares)
        self._load(HOME, shares[HOME])
        if self._helper_bytes:
            self._load_part(shares[HELPER])
        elif self._model_there:
            for name in list(self._shares)[1:]:
                self._load(name, shares[name])
            self._until_helpful()

    def _load(self, name: str, share: Share | None) -> None:
        daemon = self._fleet[name]
        with starting_on(self.cores[name], share, daemon.process.pid):
            daemon.warm()
        self._workers[name] = worker_of(daemon.process.pid, self.cores[name])
        self.ask(prompts.tokens(MODEL, 77, _WARM_TOKENS), alone=True, at=name)

    def _load_part(self, share: Share | None) -> None:
        """Have the helper load the layers for which it has room: a long prompt at home asks for them."""
        daemon = self._fleet[HELPER]
        with starting_on(self.cores[HELPER], share, daemon.process.pid):
            asked = self.ask(prompts.tokens(MODEL, 78, _LONG_TOKENS), alone=False)
            wait_for(
                lambda: self.part_of_helper()[1],
                _KNOWN_WITHIN_S,
                _POLL_S,
                lambda: f"the helper loaded nothing ({asked.how}):\n{daemon.log()}",
            )
        self._workers[HELPER] = worker_of(daemon.process.pid, self.cores[HELPER])
        self._until_helpful()

    def _until_helpful(self) -> None:
        """Until home knows the links, and has a price for the help of each machine."""
        self._fleet.until_priced(HOME, list(self._shares)[1:], _LONG_TOKENS)
