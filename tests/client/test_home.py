"""The client looks for the daemon where the daemon is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetctl.connection.home import locate
from fleetd.storage import paths

ENVIRONMENTS = [
    {},
    {"FLEETD_HOME": "/srv/fleet"},
    {"FLEETD_HOME": "~/fleet"},
    {"FLEETD_HOME": "relative/home"},
    {"FLEETD_HOME": ""},
    {"STATE_DIRECTORY": "/var/lib/fleetd"},
    {"STATE_DIRECTORY": "/var/lib/fleetd:/var/lib/other"},
    {"STATE_DIRECTORY": "/var/lib/fleetd", "FLEETD_HOME": "/srv/fleet"},
]


@pytest.mark.parametrize("environ", ENVIRONMENTS)
@pytest.mark.parametrize("flag", [None, "/opt/home", "~/home", "home"])
def test_same_home_as_the_daemon(environ: dict[str, str], flag: str | None) -> None:
    theirs = paths.resolve(flag, environ)
    ours = locate(Path(flag) if flag else None, None, environ)
    assert (ours.home, ours.socket) == (theirs.root, theirs.socket)


def test_only_an_unchosen_home_is_the_default() -> None:
    assert locate(None, None, {}).default
    assert not locate(None, None, {"FLEETD_HOME": "/x"}).default
    assert not locate(Path("/x"), None, {}).default


def test_a_socket_is_taken_as_it_is() -> None:
    found = locate(None, Path("/run/other.sock"), {"FLEETD_HOME": "/x"})
    assert (found.socket, found.home) == (Path("/run/other.sock"), Path("/run"))
