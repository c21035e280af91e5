"""How an address and its port are written for people and in URLs."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """``host:port``; an IPv6 address, which has colons of its own, is written in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
