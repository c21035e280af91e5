"""Two machines that could share a prompt: two daemons whose workers have one core each, and a link."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from bench import prompts
from bench.fleet_daemons import Fleet
from bench.shard_core import Share, starting_on, why_no_cores, why_no_share, worker_of
from bench.shard_link import Cable, Link, passed_bytes, why_not
from bench.throwaway import MODEL, Daemon, Heard
from fleetd.control.prefill_plan import PlanView
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.models.catalog import DEFAULT_MODEL

LOOPBACK = Link("loopback")
HOME, HELPER = "home", "helper"
LOCAL = "local"
# Alone, one core would take smaller chunks, not to keep others waiting; each one reads all weights anew, so
# sharing would seem to gain what it only spares.
CHUNK_TOKENS = 256
_KNOWN_WITHIN_S = 120.0
_TRACED_WITHIN_S = 5.0
_LAST_TRACES = 5
_POLL_S = 0.1
# Long enough for a first look at how fast each machine really is.
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


def why_none(link: Link = LOOPBACK, helper_share: float = 1.0) -> str:
    """Why such machines cannot be had here; "" where they can."""
    return why_no_cores() or why_not(link) or (why_no_share() if helper_share < 1 else "")


class Machines:
    """Both are ready, know the link, and have computed a prompt. Use as a context manager.

    Nothing is kept in the prefix cache, so that the same prompt can be asked again.

    Args:
        helper_share: the helper's share of its core.
        helper_has_model: otherwise it is a member of the fleet that cannot help.
    """

    def __init__(
        self, link: Link = LOOPBACK, helper_share: float = 1.0, *, helper_has_model: bool = True
    ) -> None:
        self._link = link
        self._share = helper_share
        self._model_there = helper_has_model
        self._exit = contextlib.ExitStack()
        self.cores = dict(zip((HOME, HELPER), sorted(os.sched_getaffinity(0)), strict=False))
        self._workers: dict[str, int] = {}

    def __enter__(self) -> Self:
        with self._exit:
            self._start()
            # Kept open from here on; closed in __exit__.
            self._exit = self._exit.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def worker_connections(self) -> int:
        """How many both workers have to other machines."""
        return sum(len(psutil.Process(pid).net_connections("inet")) for pid in self._workers.values())

    def passed_bytes(self) -> int:
        """What has crossed the link so far, both ways, seen from home; not on loopback."""
        return passed_bytes(self._fleet[HOME].process.pid)

    def _traced(self, heard: Heard, request_id: str) -> Asked:
        """Traces are written beside the answer, so soon after it, by whoever decoded it.

        There is none where nobody could help.
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

    def _start(self) -> None:
        keep = self._exit.enter_context
        shaped = self._link.shaped
        ends = keep(Cable(self._link)).ends if shaped else []
        enter: list[Sequence[str]] = [end.enter for end in ends] or [(), ()]
        hosts = [end.address for end in ends] or ["127.0.0.1", "127.0.0.1"]
        share = keep(contextlib.closing(Share(self._share))) if self._share < 1 else None
        models = {} if self._model_there else {HELPER: Path(keep(tempfile.TemporaryDirectory()))}
        self._fleet = keep(Fleet([HOME, HELPER], models=models, mdns=False))
        settings = {
            "FLEETD_ENGINE_THREADS": "1",
            "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1",
            "FLEETD_ENGINE_PREFILL_CHUNK_TOKENS": str(CHUNK_TOKENS),
        }
        home = self._fleet.start(HOME, enter=enter[0], FLEETD_FLEET_LISTEN=f"{hosts[0]}:0", **settings)
        known = f"{hosts[0]}:{home.status()['fleet']['port']}"
        settings |= {"FLEETD_FLEET_LISTEN": f"{hosts[1]}:0", "FLEETD_FLEET_PEERS": known}
        self._fleet.start(HELPER, enter=enter[1], **settings)
        self._fleet.until_usable(HOME, HELPER)
        self._load(HOME, None)
        if self._model_there:
            self._load(HELPER, share)
            self._until_helpful()

    def _load(self, name: str, share: Share | None) -> None:
        daemon, core = self._fleet[name], self.cores[name]
        with starting_on(core, share, daemon.process.pid):
            # Not elsewhere: that is what loads the model here.
            body = {"max_tokens": 4, "local_only": True}
            with daemon.stream("completions", prompt=[1, 2, 3, 4], **body) as stream:
                stream.hear()
        self._workers[name] = worker_of(daemon.process.pid, core)
        self.ask(prompts.tokens(MODEL, 77, _WARM_TOKENS), alone=True, at=name)

    def _until_helpful(self) -> None:
        """Until home knows the link, and has a price for its neighbour's help."""
        home = self._fleet[HOME]
        deadline = time.monotonic() + _KNOWN_WITHIN_S
        question = {"model": DEFAULT_MODEL, "tokens": _LONG_TOKENS}
        while time.monotonic() < deadline:
            paths = self._fleet.peer(HOME, HELPER)["paths"]
            told = home.control("POST", "/fleet/v1/plan", question)
            plan = msgspec.json.decode(told, type=PlanView)
            priced = any(o.kind != "local" and o.predicted_s is not None for o in plan.options)
            if priced and any(path["bytes_per_s"] is not None for path in paths):
                return
            time.sleep(_POLL_S)
        raise RuntimeError(f"home never had a price for help:\n{json.dumps(paths)}\n{told!r}\n{home.log()}")
