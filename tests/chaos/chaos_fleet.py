"""Three real, paired daemons that may be harmed, one that is not, and the network between them.

Two networks: on loopback every machine sees the others through proxies (``tcp_proxy``); in a lab every
machine has a network namespace on a switch (``tests/p2p/netns.py``), which loses, doubles or delays frames.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import chain_model
from forked_programs import Programs
from live_daemon import LiveDaemon, OverUnixSocket, until
from live_fleet import LiveFleet, free_port, give_model
from netns import Lab
from tcp_proxy import Address, Proxies
from tries import DRAFTER, Ask, TryReply

NAMES = ("alpha", "beta", "gamma")
ORACLE = "oracle"
SMALL = "smollm2-135m"
#: A request without an answer by then hangs: more than the longest silence that the daemon allows others.
HANG_S = 100.0
_AT_ONCE_S = 0.5
#: The machines, and the models that they have loaded before each try.
PLACES = (("alpha", "chain"), ("beta", SMALL), ("beta", DRAFTER), ("gamma", SMALL))
_ALONE = ("local", "remote", "undecided", "")
# A machine that failed is left out for so long only, or few faults would find a fleet that works together.
# And prompts of one block are fetched already, so that reading them does not take most of the time.
# Machines that share a processor take their time to say what they keep.
_LIMITS = {
    "BACKOFF_S": 0.5,
    "BACKOFF_MOST_S": 2.0,
    "FETCH_LEAST_TOKENS": 256,
    "FETCH_LOOK_S": 1.0,
    "FETCH_LOOK_SHARE": 1e9,
    "FETCH_FIND_S": 2.0,
}


class ChaosFleet(LiveFleet):
    """alpha has no model of its own but the chain, whose answers beta and gamma draft; those two share the
    prompts of the small model, and fetch from each other what one of them has read.

    Args:
        lab: the machines' networks; None for proxies on loopback.
    """

    def __init__(self, root: Path, small: Path, stack: contextlib.ExitStack, lab: Lab | None) -> None:
        self.lab = lab
        self.proxies = None if lab is not None else stack.enter_context(Proxies())
        self._port = free_port()
        forkers: dict[str, Programs] = {}
        for number, name in enumerate(NAMES):
            if lab is not None or not forkers:
                enter = lab.hosts[number].command([]) if lab is not None else []
                made = Programs(
                    root.with_name(f"{root.name}-{name}.programs"),
                    limits=_LIMITS,
                    install=["process_hooks"],
                    enter=enter,
                )
                stack.callback(made.close)
            forkers[name] = made
        self._forkers = forkers
        chain = chain_model.build(root.with_name(f"{root.name}-chain") / "chain")
        scribe = chain_model.build(root.with_name(f"{root.name}-chain") / DRAFTER)
        others = [chain, scribe, small]
        super().__init__(root, {"alpha": [chain], "beta": others, "gamma": others})
        give_model(self.models_dir(ORACLE), chain)
        give_model(self.models_dir(ORACLE), small)
        if self.proxies is not None:
            for name in NAMES:
                for other in NAMES:
                    if other != name:
                        self.proxies.add(
                            f"{name}>{other}",
                            self.way(name, other),
                            self.peer_address(other),
                            self.way(other, name)[0],
                        )
        undisturbed = LiveDaemon(
            self.home(ORACLE), self.models_dir(ORACLE), programs=forkers["alpha"], FLEETD_FLEET_NAME=ORACLE
        )
        self._all.append(undisturbed)
        self.oracle = undisturbed
        self._answers: dict[tuple[str, str, int], Any] = {}

    def peer_address(self, name: str) -> Address:
        number = NAMES.index(name)
        return (self.lab.hosts[number].address if self.lab else f"127.0.0.{number + 2}"), self._port

    def way(self, name: str, other: str) -> Address:
        if self.lab is not None:
            return self.peer_address(other)
        return f"127.1.{NAMES.index(name)}.{NAMES.index(other) + 1}", self._port

    def programs(self, name: str) -> Programs | None:
        return self._forkers[name]

    def __enter__(self) -> ChaosFleet:
        super().__enter__()
        self.oracle.__enter__()
        return self

    def expected(self, ask: Ask) -> Any:
        """What the undisturbed machine answers."""
        if ask.question not in self._answers:
            reply = asked(self.oracle, ask)
            assert reply.answer is not None, reply
            self._answers[ask.question] = reply.answer
        return self._answers[ask.question]

    def all_loaded(self) -> bool:
        """Load every model where it is not, as in a fleet that has been at work; False if one could not be.
        No machine loads a model to draft for another, or to help."""
        return [self._told(machine, "load", model) for machine, model in PLACES] == [True] * len(PLACES)

    def load_again(self, machine: str) -> None:
        """Have a machine unload the small model, which writes what it has read, and load it: what it has of
        prompts then is on its disk alone."""
        self._told(machine, "unload", SMALL)
        self._told(machine, "load", SMALL)

    def unload(self, machine: str, seen_by: str) -> None:
        """Have a machine unload the small model, which writes what it has read; wait until the other one
        knows that. Raises AssertionError if it never does."""
        self._told(machine, "unload", SMALL)

        def unloaded() -> bool:
            models = self.peers(seen_by).get(machine, {}).get("models", ())
            return all(model["state"] != "loaded" for model in models if model["name"] == SMALL)

        until(unloaded)

    def _told(self, machine: str, verb: str, model: str) -> bool:
        connection = OverUnixSocket(self.home(machine) / "fleetd.sock")
        connection.timeout = HANG_S
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            body, headers = json.dumps({"model": model}), {"Content-Type": "application/json"}
            connection.request("POST", f"/fleet/v1/models/{verb}", body, headers)
            return connection.getresponse().status == 200
        return False


def workers(daemon: LiveDaemon) -> list[int]:
    """Process ids of a daemon's workers; none if it does not say so at once."""
    engines = _view(daemon, "/fleet/v1/status").get("engines", ())
    return [engine["pid"] for engine in engines if engine["pid"]]


def failed_fetches(daemon: LiveDaemon) -> int:
    """How many fetches failed since the daemon started; 0 if it does not say so at once."""
    return sum(machine["failed"] for machine in _view(daemon, "/fleet/v1/cache").get("machines", ()))


def _view(daemon: LiveDaemon, path: str) -> dict[str, Any]:
    """What a daemon shows; {} if it does not at once."""
    connection = OverUnixSocket(daemon.home / "fleetd.sock")
    connection.timeout = _AT_ONCE_S
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        connection.request("GET", path)
        found: dict[str, Any] = json.load(connection.getresponse())
        return found
    return {}


def asked(daemon: LiveDaemon, ask: Ask) -> TryReply:
    """Ask over the Unix socket of a daemon; never raises."""
    body = {
        "model": SMALL if ask.model == "small" else ask.model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "temperature": 0,
        "max_tokens": ask.tokens,
        "logprobs": True,
        "stream": ask.stream,
    }
    if ask.drafter:
        body["speculate"] = {"sources": ["drafter"], "draft_model": ask.drafter}
    connection = OverUnixSocket(daemon.home / "fleetd.sock")
    connection.timeout = HANG_S
    try:
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            with connection.getresponse() as response:
                reply = _streamed(response) if ask.stream and response.status == 200 else _whole(response)
                plan = reply.plan or (response.headers["X-Fleet-Plan"] or "").partition(";")[0]
                shared = () if reply.answer is None or plan in _ALONE else ("shared",)
                return replace(reply, plan=plan, parts=reply.parts + shared)
    except TimeoutError:
        return TryReply(late=True)
    except (OSError, http.client.HTTPException) as error:
        return TryReply(broken=f"{type(error).__name__}: {error}")


def _whole(response: http.client.HTTPResponse) -> TryReply:
    text = response.read()
    try:
        body = json.loads(text)
    except ValueError:
        return TryReply(broken=f"status {response.status}, {text[:200]!r}")
    if "error" in body:
        return TryReply(code=str(body["error"].get("code")))
    choice = body["choices"][0]
    return TryReply(
        _essence(choice["message"]["content"], choice["finish_reason"], choice["logprobs"]["content"]),
        parts=_parts(body),
    )


def _streamed(response: http.client.HTTPResponse) -> TryReply:
    text, plan, finish, logprobs = "", "", None, list[Mapping[str, Any]]()
    parts: tuple[str, ...] = ()
    for line in iter(response.readline, b""):
        if line.startswith(b": plan "):
            # The header does not wait for it; and one without helpers follows where they fail.
            plan = line.removeprefix(b": plan ").partition(b";")[0].decode()
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return TryReply(_essence(text, finish, logprobs), plan=plan, parts=parts)
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            return TryReply(code=str(event["error"].get("code")))
        parts = parts or _parts(event)
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            logprobs += (choice.get("logprobs") or {}).get("content") or []
    return TryReply(broken="the stream ended without its end")


def _parts(body: Mapping[str, Any]) -> tuple[str, ...]:
    """What the timings of an answer say that it was made of."""
    timings = body.get("timings") or {}
    names = {"fetched": "fetched_n", "restored": "restored_n", "drafted": "draft_n"}
    return tuple(name for name, field in names.items() if timings.get(field))


def _essence(text: str, finish: Any, logprobs: list[Any]) -> Any:
    return text, finish, [(each["token"], each["logprob"]) for each in logprobs]


def take_copy(models_dir: Path, target: Path) -> Path:
    """The small model in a folder of its own."""
    return Path(shutil.copytree(models_dir / SMALL, target / SMALL))
