"""Each cause of silence gets its own sentence, on either system."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from fleetd.p2p.discovery.unreachable import explain, explain_multicast


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "platform", "said", "advice"),
    [
        (
            OSError(65, "No route to host"),
            "darwin",
            "does not let fleetd use the local network",
            "Local Network",
        ),
        (os_error(errno.EHOSTUNREACH), "linux", "no route to host", "port 8115"),
        (OSError(64, "Host is down"), "darwin", "no route to host", "port 8115"),
        (OSError(61, "Connection refused"), "darwin", "nothing listens", "Start fleetd"),
        (os_error(errno.ECONNREFUSED), "linux", "nothing listens", "Start fleetd"),
        (OSError(51, "Network is unreachable"), "darwin", "no network that leads", "Tailscale"),
        (os_error(errno.ENETUNREACH), "linux", "no network that leads", "Tailscale"),
        (os_error(errno.ETIMEDOUT), "linux", "did not answer", "firewall"),
        (OSError(60, "Operation timed out"), "darwin", "did not answer", "firewall"),
        (TimeoutError(), "linux", "did not answer", "firewall"),
        (None, "linux", "did not answer", "firewall"),
        (os_error(errno.EPERM), "linux", "does not let fleetd connect", "outgoing"),
        (os_error(errno.EIO), "linux", os.strerror(errno.EIO), ""),
    ],
)
def test_a_failed_call_is_explained(error: OSError | None, platform: str, said: str, advice: str) -> None:
    message, hint = explain(error, "192.168.1.7", 8115, platform)
    assert "192.168.1.7:8115" in message
    assert said in message
    assert advice in hint


def test_error_65_beyond_the_local_network_is_not_blamed_on_the_permission() -> None:
    message, hint = explain(OSError(65, "No route to host"), "8.8.8.8", 8115, "darwin")
    assert "macOS" not in message
    assert "Privacy" not in hint


def test_a_name_that_cannot_be_looked_up_is_said_to_be_one() -> None:
    message, hint = explain(socket.gaierror(8, "nodename nor servname provided"), "studoi", 8115, "darwin")
    assert "studoi is not a name" in message
    assert "spelling" in hint


def test_ipv6_addresses_are_written_so_that_the_port_can_be_told() -> None:
    assert explain(None, "fe80::1%en0", 8115, "darwin")[0].startswith("[fe80::1%en0]:8115 ")


@pytest.mark.parametrize(
    ("error", "platform", "said"),
    [
        (OSError(65, "No route to host"), "darwin", "Local Network"),
        (OSError(48, "Address already in use"), "darwin", "disallow-other-stacks"),
        (os_error(errno.EADDRINUSE), "linux", "disallow-other-stacks"),
        (os_error(errno.EPERM), "linux", "firewall"),
        (os_error(errno.ENETUNREACH), "linux", "no network interface"),
        (os_error(errno.EIO), "linux", os.strerror(errno.EIO)),
    ],
)
def test_multicast_that_fails_is_explained(error: OSError, platform: str, said: str) -> None:
    assert said in explain_multicast(error, platform)
