"""The network as this process sees it, for ``fleetctl doctor``. Blocks for a second or two.

A terminal may see another network than a service does: on macOS each program has its own permission to use
the local network. So the daemon collects the facts itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fleetd.control.network_diagnosis import InterfaceView, NetworkDiagnosis, PeerPortView
from fleetd.p2p.discovery import interfaces, network_checks
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.discovery.network_checks import PortFact

_PROBES = 4
_EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104  compared with, not bound


def gather(host: str, port: int) -> NetworkDiagnosis:
    """All but the clocks of peers.

    Args:
        host: where the peer port listens, as the settings say it.
    """
    found = interfaces.read()
    shared = [interface for interface in found if interface.is_shared]
    everywhere = host in _EVERYWHERE
    own = [address for interface in shared for address in interface.addresses] if everywhere else [host]
    # In parallel: each may run into its timeout, and a person waits for all of them.
    with ThreadPoolExecutor(_PROBES) as pool:
        found_interfaces = pool.map(_interface, [interface for interface in found if interface.up])
        ports = pool.map(network_checks.probe_port, own[:_PROBES], [port] * _PROBES)
    return NetworkDiagnosis(
        interfaces=list(found_interfaces),
        port=_port(list(ports), port),
        firewall=[fact.hint for fact in network_checks.read_firewalls(port) if fact.hint],
        mtu=list(network_checks.mtu_hints(found)),
        clock_synchronised=network_checks.read_clock_synchronised(),
    )


def _interface(interface: Interface) -> InterfaceView:
    multicast = ""
    if interface.is_shared:
        fact = network_checks.probe_multicast(interface)
        multicast = "ok" if fact.works else fact.reason
    addresses = list(interface.addresses)
    return InterfaceView(interface.name, interface.kind, interface.mtu, addresses, multicast)


def _port(facts: list[PortFact], port: int) -> PeerPortView:
    """The first of this machine's addresses that answers, or why the first one does not."""
    if not facts:
        return PeerPortView(port=port, reason="This machine is on no network.")
    best = next((fact for fact in facts if fact.open), facts[0])
    return PeerPortView(best.address, port, best.open, best.reason)
