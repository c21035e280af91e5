"""systemd and launchd: install, start, remove and inspect a service.

Commands go through a runner and files below a root, so that tests see every step without a service manager.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from fleetctl.exits import ClientError

Scope = Literal["system", "user"]
_COMMAND_S = 120.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    output: str


RequestRunner = Callable[[Sequence[str]], CommandResult]


def run_command(arguments: Sequence[str]) -> CommandResult:
    """The real runner; a missing program is outcome 127, as in a shell."""
    program = shutil.which(arguments[0])
    if program is None:
        return CommandResult(127, f"{arguments[0]}: not found")
    try:
        done = subprocess.run(
            [program, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandResult(124, f"{arguments[0]} did not finish within {_COMMAND_S:.0f} s")
    return CommandResult(done.returncode, done.stdout)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a service; ``detail`` is the manager's own word for it."""

    manager: str
    scope: Scope
    file: str
    installed: bool
    active: bool
    detail: str
    pid: int | None = None


class Manager(Protocol):
    """A service manager as `fleetctl service` uses it. Both verbs return sentences that say what they did."""

    scope: Scope
    file: Path

    def install(self, text: str) -> list[str]: ...
    def uninstall(self) -> list[str]: ...
    def state(self) -> State: ...


def manager_for(scope: Scope, platform: str = sys.platform, run: RequestRunner = run_command) -> Manager:
    """The service manager of this platform."""
    if platform == "darwin":
        return Launchd(scope, run=run)
    if platform.startswith("linux"):
        return Systemd(scope, run=run)
    raise ClientError(f"fleetctl service knows systemd and launchd, not {platform}.")


def write_atomically(path: Path, text: str) -> None:
    """Write all of the file or none of it, readable by all users: service files hold no secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Systemd:
    """systemd, for the system or for this user."""

    UNIT = "fleetd.service"

    def __init__(self, scope: Scope, *, root: Path = Path("/"), run: RequestRunner = run_command) -> None:
        self.scope: Scope = scope
        self._run = run
        if scope == "system":
            self.file = root / "etc/systemd/system" / self.UNIT
        else:
            config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
            self.file = Path(config) / "systemd/user" / self.UNIT

    def install(self, text: str) -> list[str]:
        self._need_systemd()
        write_atomically(self.file, text)
        self._must("daemon-reload")
        self._must("enable", self.UNIT)
        # restart also starts, and lets an update take effect.
        self._must("restart", self.UNIT)
        did = [f"wrote {self.file}", f"enabled and started {self.UNIT}"]
        if self.scope == "user" and not self._lingers():
            did.append(
                "it runs from your login to your logout; `loginctl enable-linger` lets it run from boot on"
            )
        return did

    def uninstall(self) -> list[str]:
        if not self.file.exists():
            return []
        self._need_systemd()
        self._must("disable", "--now", self.UNIT)
        self.file.unlink()
        self._must("daemon-reload")
        return [f"stopped and disabled {self.UNIT}", f"removed {self.file}"]

    def state(self) -> State:
        wanted = "LoadState,ActiveState,SubState,UnitFileState,MainPID"
        shown = self._systemctl("show", self.UNIT, f"--property={wanted}")
        facts = dict(line.split("=", 1) for line in shown.output.splitlines() if "=" in line)
        active = facts.get("ActiveState") == "active"
        if not self.file.exists():
            detail = "not installed"
        elif shown.code != 0 or not facts:
            detail = f"unknown: {_first_line(shown)}"
        else:
            detail = f"{facts.get('ActiveState')} ({facts.get('SubState')}), {facts.get('UnitFileState')}"
            if self.scope == "user" and not self._lingers():
                detail += ", until you log out (`loginctl enable-linger` keeps it)"
        pid = int(facts.get("MainPID") or 0) or None
        return State("systemd", self.scope, str(self.file), self.file.exists(), active, detail, pid)

    def _lingers(self) -> bool:
        """True if this user's services run while the user is not logged in."""
        shown = self._run(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        return shown.code == 0 and shown.output.strip() == "Linger=yes"

    def _systemctl(self, *arguments: str) -> CommandResult:
        return self._run(["systemctl", *(["--user"] if self.scope == "user" else []), *arguments])

    def _must(self, *arguments: str) -> None:
        done = self._systemctl(*arguments)
        if done.code != 0:
            user = " --user" if self.scope == "user" else ""
            raise ClientError(
                f"systemctl{user} {' '.join(arguments)} failed: {_first_line(done)}",
                hint=f"`journalctl{user} -u {self.UNIT} -n 30` shows what happened.",
            )

    def _need_systemd(self) -> None:
        done = self._systemctl("show", "--property=Version")
        if done.code != 0:
            raise ClientError(
                f"No systemd to talk to: {_first_line(done)}",
                hint="Run `fleetd run` under the service manager you have; "
                "`fleetctl service install --print` shows the unit.",
            )


class Launchd:
    """A launch daemon (system) or a launch agent of this user."""

    def __init__(
        self,
        scope: Scope,
        *,
        root: Path = Path("/"),
        run: RequestRunner = run_command,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scope: Scope = scope
        self._run = run
        self._sleep = sleep
        self.label = "fleetd.daemon" if scope == "system" else "fleetd.agent"
        self._domain = "system" if scope == "system" else f"gui/{os.getuid()}"
        if scope == "system":
            self.file = root / "Library/LaunchDaemons" / f"{self.label}.plist"
        else:
            self.file = Path.home() / "Library/LaunchAgents" / f"{self.label}.plist"

    def install(self, text: str) -> list[str]:
        if self._loaded():
            self._bootout()
        write_atomically(self.file, text)
        self._must("enable", f"{self._domain}/{self.label}")
        self._must("bootstrap", self._domain, str(self.file))
        return [f"wrote {self.file}", f"loaded {self.label}, which starts it"]

    def uninstall(self) -> list[str]:
        did = []
        if self._loaded():
            self._bootout()
            did.append(f"stopped and unloaded {self.label}")
        if self.file.exists():
            self.file.unlink()
            did.append(f"removed {self.file}")
        return did

    def state(self) -> State:
        shown = self._launchctl("print", f"{self._domain}/{self.label}")
        facts: dict[str, str] = {}
        for line in shown.output.splitlines():
            key, equals, value = line.strip().partition(" = ")
            if equals:
                facts.setdefault(key, value)
        installed, loaded = self.file.exists(), shown.code == 0
        active = loaded and facts.get("state") == "running"
        detail = facts.get("state", "loaded") if loaded else "not loaded" if installed else "not installed"
        if loaded and not active and (last := facts.get("last exit code")):
            detail += f", last exit code {last}"
        pid = int(facts["pid"]) if active and facts.get("pid", "").isdigit() else None
        return State("launchd", self.scope, str(self.file), installed, active, detail, pid)

    def _loaded(self) -> bool:
        return self._launchctl("print", f"{self._domain}/{self.label}").code == 0

    def _bootout(self) -> None:
        """Unload the job and wait for its end: until then launchd refuses a bootstrap."""
        self._launchctl("bootout", f"{self._domain}/{self.label}")
        for _ in range(100):
            if not self._loaded():
                return
            self._sleep(0.5)
        raise ClientError(f"launchd did not let go of {self.label} within 50 s.", hint="Try again.")

    def _launchctl(self, *arguments: str) -> CommandResult:
        return self._run(["launchctl", *arguments])

    def _must(self, *arguments: str) -> None:
        done = self._launchctl(*arguments)
        if done.code != 0:
            raise ClientError(
                f"launchctl {' '.join(arguments)} failed: {_first_line(done)}",
                hint="`fleetd.log` in the home tells why it did not start."
                if arguments[0] == "bootstrap"
                else "Run it from a terminal of the logged-in user.",
            )


def _first_line(done: CommandResult) -> str:
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    return lines[0] if lines else f"exit code {done.code}"
