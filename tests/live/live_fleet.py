"""A fleet of real daemons on loopback: paired beforehand or not at all, and how their machines meet."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from forked_programs import Programs
from live_daemon import FLEETCTL, REPO, LiveDaemon, until

from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import AddressFile, RosterFile

#: How a machine learns where the others are. "unknown": not at all, until somebody tells it.
Meet = Literal["remembered", "static", "mdns", "unknown"]
USABLE_S = 60.0
VERB_S = 60.0
# An answer in one piece: the load of its model may come before it.
SILENT_S = 180.0
LOOPBACK = "127.0.0.1"
SMOL, WEIGHTS = "smollm2-135m", "model.safetensors"
# Below what systems hand out by themselves, so that nobody takes a port between its choice and its use; and
# none is chosen twice.
_PORTS = iter(random.SystemRandom().sample(range(20_000, 30_000), 10_000))


class LiveFleet:
    """Daemons by name. Use as a context manager; whatever was done to them, none survives it.

    Args:
        root: a short path; sockets are below it.
        models: name → the folders that this machine has as models; they are linked, not copied.
        homes: where a machine's home is not below ``root``.
        programs: forks the daemons; without it they are started as users do.
        paired: False for machines that do not know each other yet.
    """

    def __init__(
        self,
        root: Path,
        models: Mapping[str, Iterable[Path]],
        *,
        meet: Meet = "remembered",
        paired: bool = True,
        homes: Mapping[str, Path] | None = None,
        settings: Mapping[str, Mapping[str, str]] | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.root = root
        self.names = list(models)
        self._meet = meet
        self._homes = homes or {}
        self._settings = settings or {}
        self._programs = programs
        self._ports = {name: free_port() for name in self.names}
        self._daemons: dict[str, LiveDaemon] = {}
        #: Every daemon ever started here: logs and leftovers are looked for in all of them.
        self._all: list[LiveDaemon] = []
        root.mkdir(mode=0o700)
        for name, folders in models.items():
            self.home(name).mkdir(mode=0o700)
            for folder in folders:
                give_model(self.models_dir(name), folder)
            self.models_dir(name).mkdir(exist_ok=True)
        self.ids = {name: Identity.load_or_create(self.home(name) / "identity") for name in self.names}
        if paired:
            self._pair()

    def home(self, name: str) -> Path:
        return self._homes.get(name, self.root / name)

    def models_dir(self, name: str) -> Path:
        return self.root / f"{name}-models"

    def peer_address(self, name: str) -> tuple[str, int]:
        """Where a machine listens."""
        return LOOPBACK, self._ports[name]

    def way(self, name: str, other: str) -> tuple[str, int]:
        """Where ``name`` finds ``other``."""
        return self.peer_address(other)

    def enter(self, name: str) -> Sequence[str]:
        """A command that runs the daemon of this machine somewhere else."""
        return ()

    def programs(self, name: str) -> Programs | None:
        """Forks the daemon of this machine."""
        return self._programs

    def __enter__(self) -> LiveFleet:
        try:
            # All begin at once; waiting for one of them gives the others the time they need as well.
            for name in self.names:
                self._launch(name)
            for name in self.names:
                self._daemons[name].__enter__()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> LiveDaemon:
        return self._daemons[name]

    def __iter__(self) -> Iterator[LiveDaemon]:
        return iter([self._daemons[name] for name in self.names])

    def close(self) -> None:
        for daemon in self._all:
            daemon.kill()

    # ---- machines that come and go -----------------------------------------------------------------------

    def start(self, name: str) -> LiveDaemon:
        """Begin one that has ended."""
        return self._launch(name).__enter__()

    def revive(self) -> None:
        """Begin those that have ended."""
        ended = [name for name in self.names if self._daemons[name].process.poll() is not None]
        for daemon in [self._launch(name) for name in ended]:
            daemon.__enter__()

    def _launch(self, name: str) -> LiveDaemon:
        host, port = self.peer_address(name)
        more = {
            "FLEETD_FLEET_NAME": name,
            "FLEETD_FLEET_LISTEN": f"{host}:{port}",
            "FLEETD_FLEET_MDNS": "on" if self._meet == "mdns" else "off",
            **self._settings.get(name, {}),
        }
        flags: list[str] = []
        if self._meet == "static":
            others = [self.way(name, other) for other in self.names if other != name]
            flags = [flag for host, port in others for flag in ("--peer", f"{host}:{port}")]
        daemon = LiveDaemon(
            self.home(name),
            self.models_dir(name),
            programs=self.programs(name),
            flags=flags,
            enter=self.enter(name),
            **more,
        )
        self._daemons[name] = daemon
        self._all.append(daemon)
        return daemon

    def _pair(self) -> None:
        """What pairing leaves on the disk of each machine."""
        for name in self.names:
            identity, folder = self.ids[name], self.home(name) / "identity"
            roster = Roster(identity)
            others = [other for other in self.names if other != name]
            for other in others:
                roster.admit(self.ids[other].certificate, other, True)
            RosterFile(folder / "roster").save(roster.records())
            if self._meet == "remembered":
                known = {self.ids[other].node_id: [self.way(name, other)] for other in others}
                AddressFile(folder / "addresses.json").save(known)

    # ---- looking at it -----------------------------------------------------------------------------------

    def peers(self, name: str) -> dict[str, dict[str, Any]]:
        """What a machine sees of the others, by name."""
        return {peer["name"]: peer for peer in view(self[name])["peers"]}

    def states(self, name: str) -> dict[str, str]:
        return {other: peer["state"] for other, peer in self.peers(name).items()}

    def until_usable(self, *names: str, limit_s: float = USABLE_S) -> float:
        """Until each of these, or of all, can use each other one; returns the seconds that took."""
        chosen = names or tuple(self.names)

        def met() -> bool:
            return all(
                self.states(name).get(other) == "usable"
                for name in chosen
                for other in chosen
                if other != name
            )

        return until(met, limit_s)

    def until_has(self, name: str, other: str, model: str, state: str = "") -> None:
        """Until ``name`` knows that ``other`` has the model, with its digest, and in this state."""

        def known() -> bool:
            found = [m for m in self.peers(name).get(other, {}).get("models", ()) if m["name"] == model]
            return any(m["digest"] and state in ("", m["state"]) for m in found)

        until(known, USABLE_S)

    def load(self, name: str, model: str, *, seen_by: str) -> None:
        """Load a model, so that this machine is the one that requests of ``seen_by`` go to."""
        assert self[name].control("POST", "/fleet/v1/models/load", {"model": model}) == {"ok": True}
        self.until_has(seen_by, name, model, "loaded")

    def saved(self, name: str) -> set[str]:
        """Members as a machine would find them after a start."""
        file, copy = self.home(name) / "identity" / "roster", self.root / f"{name}-roster"
        if not file.exists():
            return set()
        # Of a copy: a reader sweeps what a writer, who may be at work, has not finished.
        shutil.copy2(file, copy)
        return set(Roster(self.ids[name], RosterFile(copy).load()).members)

    def text_left(self) -> dict[str, str]:
        """Everything that any of the daemons has written anywhere, by file, models aside."""
        logs = {daemon.log for daemon in self._all}
        files = [path for name in self.names for path in self.home(name).rglob("*") if path.is_file()]
        return {str(path): path.read_bytes().decode("latin-1") for path in {*logs, *files}}


def view(daemon: LiveDaemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.control("GET", "/fleet/v1/peers")
    return found


def give_model(models_dir: Path, folder: Path) -> None:
    """Put a model into a models folder without copying its weights."""
    shutil.copytree(folder, models_dir / folder.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # another file system
        shutil.copy2(source, target)


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise RuntimeError("of all ports none is free any more")


# ---- Asking ----------------------------------------------------------------------------------------------


@dataclass
class StreamedAnswer:
    """A streamed answer as it comes: events, and comments beside them."""

    response: http.client.HTTPResponse
    comments: list[str] = field(default_factory=list)
    _unread: deque[bytes] = field(default_factory=deque)

    def plans(self) -> list[str]:
        """As told so far. A header does not wait for long, and then a comment has the first plan."""
        told = self.response.headers["X-Fleet-Plan"]
        header = [] if told.startswith("undecided") else [told]
        return header + [c.removeprefix("plan ") for c in self.comments if c.startswith("plan ")]

    def plan(self) -> str:
        """The first, once there is one."""
        while not self.plans():
            assert self._more(), "it ended without a plan"
        return self.plans()[0]

    def shared_with(self) -> str:
        """The machine that helps the one that answers, once both have agreed; "" if none does."""
        while True:
            for plan in self.plans()[-1:]:
                match plan.partition(":")[0].partition("nodes=")[2].split(","):
                    case [helper, "this"] | [_, helper]:
                        return helper
            if not self._more():
                return ""

    def events(self) -> Iterator[dict[str, Any]]:
        for line in iter(lambda: self._unread.popleft() if self._unread else self._line(), b""):
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def _more(self) -> bool:
        """Reads on, and keeps what is not about plans."""
        line = self._line()
        self._unread.append(line)
        return bool(line)

    def _line(self) -> bytes:
        line = self.response.readline()
        if line.startswith(b": "):
            self.comments.append(line[2:].decode().strip())
        return line

    def text(self) -> str:
        """The rest of the answer, which must end well."""
        return "".join(map(said, self.events()))


def said(event: dict[str, Any]) -> str:
    assert "error" not in event, event
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def body(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **fields}


@contextlib.contextmanager
def posted(
    daemon: LiveDaemon, request: dict[str, Any], silent_s: float = SILENT_S
) -> Iterator[http.client.HTTPResponse]:
    """A chat request over TCP; leaving the block drops the connection."""
    connection = http.client.HTTPConnection(*daemon.address, timeout=silent_s)
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
        with connection.getresponse() as response:
            yield response


@contextlib.contextmanager
def heard(daemon: LiveDaemon, model: str, prompt: str, **fields: Any) -> Iterator[StreamedAnswer]:
    """A streamed chat."""
    with posted(daemon, body(model, prompt, stream=True, **fields)) as response:
        assert response.status == 200, response.read()
        yield StreamedAnswer(response)


def answer(
    daemon: LiveDaemon, request: dict[str, Any], within_s: float = SILENT_S
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of an answer in one piece."""
    with posted(daemon, request, within_s) as response:
        return response.status, dict(response.getheaders()), json.load(response)


# ---- Pairing ---------------------------------------------------------------------------------------------


class Verb:
    """`fleetctl pair` or `join`, running while the test goes on, and its events."""

    def __init__(self, daemon: LiveDaemon, *arguments: str, enter: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*enter, *FLEETCTL, "--home", str(daemon.home), *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )

    def event(self, kind: str) -> dict[str, Any]:
        """The next event, which has to be of this kind."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.end())
        found: dict[str, Any] = json.loads(line)
        assert found["type"] == kind, found
        return found

    def end(self) -> tuple[int, str]:
        """Exit code, and what was said on stderr."""
        _, said = self.process.communicate(timeout=VERB_S)
        return self.process.returncode, said


# ---- Copies of models -------------------------------------------------------------------------------------


def senders(fleet: LiveFleet) -> dict[str, psutil.Process]:
    """The processes that send files now, by machine."""
    found = {}
    for name in fleet.names:
        for process in fleet[name].processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "fleetd.models.copy.send" in process.cmdline():
                    found[name] = process
    return found


def stop_in_the_middle(fleet: LiveFleet, receiver: str) -> str:
    """Halt whoever sends the model once some of it has arrived, and not all; its name."""
    found: dict[str, psutil.Process] = {}

    def sending() -> bool:
        found.update(senders(fleet))
        return bool(found)

    until(sending)
    ((name, process),) = found.items()
    partial = fleet.models_dir(receiver) / ".partial"
    total = (fleet.models_dir(name) / SMOL / WEIGHTS).stat().st_size

    def arrived() -> int:
        return sum(file.stat().st_blocks * 512 for file in partial.rglob(f"{WEIGHTS}*"))

    process.suspend()
    # A millisecond at a time: however fast the machine is, it stops somewhere in between.
    while arrived() == 0:
        process.resume()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.001)
        process.suspend()
    assert 0 < arrived() < total
    return name


# ---- Doing harm ------------------------------------------------------------------------------------------


def stays(condition: Callable[[], Any], for_s: float) -> None:
    """Something that must not change; for what has no end that could be waited for."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        assert condition()
        time.sleep(0.05)
