"""Addresses of hosts, and which of them are ours, private, or loopback."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

Resolve = Callable[[str], Sequence[str]]
"""Host name -> its addresses, nearest first; empty when it does not resolve."""

SHARED_SPACE = ipaddress.ip_network("100.64.0.0/10")
"""Addresses of carriers and cluster-internal networks (RFC 6598): not reachable from outside, though Python does not call them private."""


def resolve(host: str) -> list[str]:
    """Return the addresses of a host by the resolver of this machine, IPv4 first; empty when there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # a link-local IPv6 address means nothing without its interface: other hosts cannot use it
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found if not str(entry[4][0]).startswith("fe80"))
    return sorted(addresses, key=lambda address: ":" in address)


def is_loopback(address: str) -> bool:
    """Tell whether an address is this machine's own loopback."""
    return ipaddress.ip_address(address).is_loopback


def is_private(address: str) -> bool:
    """Tell whether an address cannot be reached from outside the site."""
    ip = ipaddress.ip_address(address)
    return not ip.is_unspecified and (ip.is_private or ip.is_loopback or ip.is_link_local or ip in SHARED_SPACE)


def is_own(address: str) -> bool:
    """Tell whether this host has the address: a socket can be bound to it."""
    with socket.socket(family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(address: str) -> str | None:
    """Return our address on the route to another host's (nothing is sent); None without a route."""
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def family(address: str) -> socket.AddressFamily:
    """Return the socket family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def with_port(address: str, port: int) -> str:
    """Write an address with its port, IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_port(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT or [IPV6]:PORT; None when it is neither."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host, int(port)
