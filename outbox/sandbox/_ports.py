"""Ports on loopback for servers that are stopped and started again."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from outbox.sandbox.errors import ServiceError

_LOWEST = 15_000
_HIGHEST = 32_000


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports of 127.0.0.1 that no process listens on now.

    They lie below the range from which the system gives ports to outgoing connections. In that range, a client that
    tries to reach a stopped server can be given the server's own port: it then connects to itself, and the server
    can't come back. Another process can still take a port before the caller does: start, then check who owns it.
    """
    low, high = _LOWEST, min(_HIGHEST, max(_first_outgoing_port(), _LOWEST + 1000))
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(range(low, high), k=min(high - low, 200 * count)):
            # Each is held until all are found, so that the same port is not returned twice.
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ServiceError(f"no {count} free ports between {low} and {high} on 127.0.0.1; end some servers")


def listening(port: int) -> bool:
    """Return whether a process accepts connections on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _first_outgoing_port() -> int:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # IANA's dynamic range, which other systems use
