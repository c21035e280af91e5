"""Finds the daemon's home and socket, by the same rules as the daemon itself.

`--socket`, else `--home`, else `$FLEETD_HOME`, else `$STATE_DIRECTORY` (set by systemd), else the platform's
state folder of this user.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKET_NAME = "fleetd.sock"
# Where `fleetctl service install --system` lets systemd keep the state.
SYSTEM_HOME = Path("/var/lib/fleetd")


@dataclass(frozen=True, slots=True)
class Address:
    """A daemon's home and socket.

    ``chosen_by``: the option or environment variable that named it; "" if none did.
    """

    home: Path
    socket: Path
    chosen_by: str = ""

    @property
    def default(self) -> bool:
        return not self.chosen_by


def default_home(environ: Mapping[str, str]) -> Path:
    """The home if no option names one."""
    if home := environ.get("FLEETD_HOME"):
        return _absolute(Path(home))
    if state := environ.get("STATE_DIRECTORY"):
        # systemd lists several folders with colons; the unit declares one.
        return _absolute(Path(state.split(":")[0]))
    import platformdirs  # a few milliseconds that an explicit home saves

    return Path(platformdirs.user_state_dir("fleetd", appauthor=False))


def locate(home: Path | None, socket: Path | None, environ: Mapping[str, str] = os.environ) -> Address:
    """The address of the daemon that the options or the environment name."""
    if socket is not None:
        socket = _absolute(socket)
        return Address(socket.parent, socket, "--socket")
    if home is not None:
        home = _absolute(home)
        return Address(home, home / SOCKET_NAME, "--home")
    found = default_home(environ)
    cause = next((name for name in ("FLEETD_HOME", "STATE_DIRECTORY") if environ.get(name)), "")
    return Address(found, found / SOCKET_NAME, cause)


def settings_file(home: Path) -> dict[str, dict[str, object]]:
    """What `fleetd.toml` in the home says, section by section; nothing if it cannot be read."""
    try:
        found = tomllib.loads((home / "fleetd.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: section for name, section in found.items() if isinstance(section, dict)}


def model_folders(home: Path, environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders that a daemon of this home reads, by what they are called."""
    said = settings_file(home).get("models", {})
    folders = {"the home": home}
    for name, what in (("dir", "the folder of models"), ("hub_cache", "the Hugging Face cache")):
        if chosen := environ.get(f"FLEETD_MODELS_{name.upper()}") or said.get(name):
            folders[what] = _absolute(Path(str(chosen)))
    return folders


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))
