"""Service definitions: the templates of systemd/ and launchd/, filled in. Values are escaped or refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from fleetctl.exits import ClientError

SYSTEM_UNIT = "systemd/fleetd.service"
USER_UNIT = "systemd/fleetd-user.service"
DAEMON_PLIST = "launchd/fleetd.daemon.plist"
AGENT_PLIST = "launchd/fleetd.agent.plist"

# The names that useradd and macOS both accept; nothing in it means anything to systemd or XML.
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
# Quotes and backslashes end or change systemd's quoting, a dollar starts a variable.
_NOT_IN_UNITS = re.compile(r"[\"'\\$]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Values:
    """What differs between machines. ``groups`` give access to the GPU, where they exist."""

    fleetd: Path
    home: Path
    user: str = ""
    user_home: Path = Path("/")
    groups: tuple[str, ...] = ()


def render(template: str, values: Values) -> str:
    """The text of a service file.

    Raises:
        ClientError: a path or name that cannot be written into it safely.
    """
    for path in (values.fleetd, values.home, values.user_home):
        _check_path(path)
    for name in (values.user, *values.groups):
        if name and not _USER.fullmatch(name):
            raise ClientError(f"{name!r} cannot be the name of a user or group.", hint="Check --run-as.")
    text = Template(find_template(template).read_text(encoding="utf-8"))
    if template.startswith("launchd/"):
        return text.substitute(
            fleetd=escape(str(values.fleetd)),
            home=escape(str(values.home)),
            user=escape(values.user),
            user_home=escape(str(values.user_home)),
        )
    groups = " ".join(values.groups)
    return text.substitute(
        fleetd=_for_systemd(values.fleetd),
        home=_for_systemd(values.home),
        user=values.user,
        supplementary_groups=f"SupplementaryGroups={groups}"
        if groups
        else "# No group video or render here.",
    )


def find_template(name: str) -> Path:
    """The template in the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "templates", package.parent):
        if (path := folder / name).is_file():
            return path
    raise ClientError(f"The template {name} is missing from this installation.", hint="Reinstall fleetd.")


def _check_path(path: Path) -> None:
    if not path.is_absolute() or _CONTROL.search(str(path)):
        raise ClientError(f"{str(path)!r} is not an absolute path of printable characters.")


def _for_systemd(path: Path) -> str:
    if found := _NOT_IN_UNITS.search(str(path)):
        raise ClientError(
            f"The path {path} contains {found[0]}, which a systemd unit cannot hold safely.",
            hint="Use a path without quotes, backslashes and dollars.",
        )
    # A percent sign starts one of systemd's own placeholders.
    return str(path).replace("%", "%%")
