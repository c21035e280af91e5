"""The parts of zeroconf that its documentation does not name: which release they were checked with."""

from __future__ import annotations

from importlib.metadata import version

from fleetd.p2p.discovery import zeroconf_adapter


def test_the_installed_zeroconf_is_one_that_the_adapter_was_checked_with() -> None:
    """After an upgrade: run tests/p2p/test_discovery.py, read zeroconf's changes, then widen ``TESTED``."""
    oldest, newest = (tuple(map(int, release.split("."))) for release in zeroconf_adapter.TESTED)
    installed = tuple(int(part) for part in version("zeroconf").split(".")[:2])
    assert oldest <= installed <= newest
