"""Host addresses (resolution; whether one is local, private or loopback) and ports."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable

from ridgeline.configs.environment import is_number

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 61_000, 65_535
"""Above Linux's ephemeral ports (up to 60,999), so no outgoing connection uses one of these."""
BACKLOG = 4096
SHARED_SPACE = ipaddress.ip_network("100.64.0.0/10")
"""Carrier and cluster-internal networks (RFC 6598): unreachable from outside, though `ipaddress` does not report them as private."""


def resolve(host: str) -> list[str]:
    """Return the addresses of a host from this machine's resolver, IPv4 first; empty if the name does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # a link-local IPv6 address is valid only with its interface: other hosts cannot use it
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found if not str(entry[4][0]).startswith("fe80"))
    return sorted(addresses, key=lambda address: ":" in address)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def is_private(address: str) -> bool:
    """Return whether an address is unreachable from outside the site."""
    ip = ipaddress.ip_address(address)
    return not ip.is_unspecified and (ip.is_private or ip.is_loopback or ip.is_link_local or ip in SHARED_SPACE)


def is_own(address: str) -> bool:
    """Return whether this host has the address: a socket can be bound to it."""
    with socket.socket(family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(address: str) -> str | None:
    """Return this host's address on the route to another address (no packet is sent); None without a route."""
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
    """Format an address with its port, IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_port(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT or [IPV6]:PORT; None for anything else."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not is_number(port) or len(port) > 5 or not 0 < int(port) < 65536:
        return None
    return host, int(port)


def listen(addresses: Iterable[str], port: int) -> list[socket.socket] | None:
    """Listen on one port of all the addresses; None if it is in use on any of them."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for address in addresses:
            listener = stack.enter_context(socket.socket(family(address), socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections of the port
            try:
                listener.bind((address, port))
                listener.listen(BACKLOG)
            except OSError:
                return None
            listener.setblocking(False)
            sockets.append(listener)
        stack.pop_all()
        return sockets


def free_port(address: str = LOOPBACK) -> int:
    """Return a free port of `address` above the ephemeral ports. Raises RuntimeError if none is free."""
    slots = (LAST_PORT - FIRST_PORT) // 2
    for number in range(slots):
        port = FIRST_PORT + 2 * ((os.getpid() * 7919 + number) % slots)
        listeners = listen([address], port)
        if listeners is not None:
            listeners[0].close()
            return port
    raise RuntimeError(f"no port of {FIRST_PORT}-{LAST_PORT} is free on {address}")
