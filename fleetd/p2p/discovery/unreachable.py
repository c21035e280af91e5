"""Explains a failed connection or an unsent packet in sentences."""

from __future__ import annotations

import errno
import ipaddress
import socket

from fleetd.p2p.links import REFUSED
from fleetd.text.host_port import host_port

# The numbers differ between systems. Both sets are explained on either system, so that tests cover all.
_DARWIN = {
    48: "EADDRINUSE",
    49: "EADDRNOTAVAIL",
    50: "ENETDOWN",
    51: "ENETUNREACH",
    54: "ECONNRESET",
    60: "ETIMEDOUT",
    61: "ECONNREFUSED",
    64: "EHOSTDOWN",
    65: "EHOSTUNREACH",
}
_PERMISSION = "Allow it in System Settings, Privacy & Security, Local Network."


def error_name(error: OSError, platform: str) -> str:
    if platform == "darwin" and error.errno in _DARWIN:
        return _DARWIN[error.errno]
    return errno.errorcode.get(error.errno or 0, "")


def explain(error: BaseException | None, host: str, port: int, platform: str) -> tuple[str, str]:
    """The reason why an address cannot be reached, and what to do: two sentences.

    Args:
        error: the error of connecting; a TimeoutError or None if no answer came.
        platform: ``sys.platform`` of this machine.
    """
    place = host_port(host, port)
    if isinstance(error, socket.gaierror | UnicodeError):
        return (
            f"{host} is not a name that this machine can look up.",
            "Check the spelling, or use the address.",
        )
    name = error_name(error, platform) if isinstance(error, OSError) else ""
    if error is None or isinstance(error, TimeoutError) or name == "ETIMEDOUT":
        return (
            f"{place} did not answer: the machine is off or elsewhere, or a firewall drops what comes.",
            f"Check that it is on, and that its firewall lets TCP port {port} in.",
        )
    if name == "ECONNREFUSED":
        return (
            f"{place} {REFUSED}: the machine is there, and nothing listens on that port.",
            "Start fleetd there, or correct the port; fleetctl status on that machine tells it.",
        )
    if name == "EHOSTUNREACH" and platform == "darwin" and _is_local(host):
        return (
            f"{place}: no route to host (error 65). Either macOS does not let fleetd use the local network, "
            "or no machine has that address.",
            _PERMISSION,
        )
    if name in ("EHOSTUNREACH", "EHOSTDOWN"):
        return (
            f"{place}: no route to host. The machine is off or in another network, or its firewall refuses.",
            f"Check that it is on, and that its firewall lets TCP port {port} in.",
        )
    if name in ("ENETUNREACH", "ENETDOWN", "EADDRNOTAVAIL"):
        return (
            f"This machine has no network that leads to {place}.",
            "Check its network connection, and for a tailnet address that Tailscale runs.",
        )
    if name in ("EPERM", "EACCES"):
        return (
            f"This machine does not let fleetd connect to {place}.",
            "Look at its firewall's rules for outgoing connections.",
        )
    return (f"{place} cannot be reached: {error}.", "")


def explain_multicast(error: OSError, platform: str) -> str:
    """The reason why mDNS does not work on this machine, and what to do."""
    name = error_name(error, platform)
    if name == "EADDRINUSE":
        return "another mDNS program holds UDP port 5353 for itself; with Avahi, set disallow-other-stacks=no"
    if name == "EHOSTUNREACH" and platform == "darwin":
        return f"macOS does not let fleetd use the local network (error 65). {_PERMISSION}"
    if name in ("EPERM", "EACCES"):
        return "this machine's firewall or sandbox does not let fleetd send multicast (UDP port 5353)"
    if name in ("ENETUNREACH", "ENETDOWN", "EHOSTUNREACH", "EADDRNOTAVAIL", "ENODEV"):
        return "no network interface of this machine takes multicast now"
    return f"mDNS does not work here: {error.strerror or error}"


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.endswith(".local")
    return address.is_private or address.is_link_local
