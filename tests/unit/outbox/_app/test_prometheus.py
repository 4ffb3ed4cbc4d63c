"""The metrics port over real HTTP: what slow, silent and many clients get."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from support import wait_until

from outbox._app import prometheus
from outbox._app.prometheus import Check
from outbox.sandbox._ports import free_ports

HALF = b"GET /livez HTTP/1.1\r\nHost: "


@dataclass
class Ready:
    """A process that is ready, and says so when it is let."""

    checks: tuple[Check, ...] = ()

    @property
    def ready(self) -> bool:
        return True


@pytest.fixture
def served(monkeypatch) -> Iterator[Callable[..., Callable[[bytes], socket.socket]]]:
    """Return a function that serves with a short patience, and returns a function that sends to it."""
    with ExitStack() as connections:

        def start(patience: float, registry: CollectorRegistry | None = None, health: Any = None) -> Any:
            monkeypatch.setattr(prometheus, "_PATIENCE", patience, raising=False)
            # A client whose connection does not fit in the system's queue tries again after a second. The product keeps
            # the 5 of socketserver: this is about its patience with the connections that it has accepted, and how many.
            monkeypatch.setattr(prometheus._Server, "request_queue_size", 64)
            (port,) = free_ports(1)
            prometheus.serve(f"127.0.0.1:{port}", registry or CollectorRegistry(), health=health)

            def send(sent: bytes) -> socket.socket:
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                connection.sendall(sent)
                return connection

            return send

        yield start


def answer(send: Callable[[bytes], socket.socket], path: str = "/livez") -> str:
    """Return the first line of an answer; empty when the connection was closed without one."""
    try:
        with send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as connection:
            return connection.makefile().readline().strip()
    except ConnectionError:
        return ""


def ended(connection: socket.socket) -> bool:
    """Wait until the other side ends a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_request_that_never_ends_is_ended(served):
    send = served(0.5)
    silent, half, dripping = send(b""), send(HALF), send(HALF)
    # A byte now and then gives no more time.
    until = time.monotonic() + 20
    while not select.select([dripping], [], [], 0.05)[0]:
        assert time.monotonic() < until
        # It may end just now.
        with suppress(ConnectionError):
            dripping.sendall(b"x")
    assert ended(dripping)
    assert ended(silent)
    assert ended(half)
    # Unless the system lets this thread wait for as long between connecting and asking.
    wait_until(lambda: answer(send) == "HTTP/1.0 200 OK", what="an answer to the next one")


def test_no_more_connections_than_a_few(served):
    send = served(600.0)
    before = threading.active_count()
    held = [send(HALF) for _ in range(40)]
    # Connections are accepted in order. The first ones are ended at once, long before the patience with them ends.
    assert all(ended(connection) for connection in held[:24])
    wait_until(lambda: threading.active_count() - before <= 16, what="the threads of those to end")


def test_a_probe_gets_through_whoever_holds_connections(served, monkeypatch):
    monkeypatch.setattr(prometheus, "_PLACE_SECONDS", 20.0)
    send = served(600.0)
    held = [send(HALF) for _ in range(16)]
    for number in range(20):
        assert answer(send) == "HTTP/1.0 200 OK"
        held.append(send(HALF if number % 2 else b""))
    assert ended(held[0])


def test_while_all_are_answered_a_further_connection_is_closed(served, monkeypatch):
    monkeypatch.setattr(prometheus, "_MOST_CONNECTIONS", 1, raising=False)
    asked, may_answer = threading.Event(), threading.Event()

    def health() -> Ready:
        asked.set()
        assert may_answer.wait(20)
        return Ready()

    send = served(10.0, health=health)
    first = send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert asked.wait(20)
    assert answer(send) == ""
    may_answer.set()
    assert first.makefile().readline().strip() == "HTTP/1.0 200 OK"
    wait_until(lambda: answer(send) == "HTTP/1.0 200 OK", what="the place of the connection that was answered")


def test_an_answer_may_take_longer_than_a_request(served):
    """Consumers ask Postgres and Kafka when they are scraped."""

    def health() -> Ready:
        threading.Event().wait(0.6)
        return Ready()

    send = served(0.2, health=health)
    # Unless the system lets this thread wait for as long between connecting and asking.
    wait_until(lambda: answer(send, "/readyz") == "HTTP/1.0 200 OK", what="a late answer")


def test_a_client_that_takes_no_answer_is_ended(served, monkeypatch):
    monkeypatch.setattr(prometheus, "_MOST_CONNECTIONS", 1, raising=False)
    registry = CollectorRegistry()
    large = Gauge("large", "More than the buffers of a connection hold.", ["label"], registry=registry)
    for number in range(10_000):
        large.labels(f"{number}" + "x" * 1_000).set(1)
    send = served(1.0, registry)
    unread = send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert unread.recv(4) == b"HTTP"
    wait_until(lambda: answer(send) == "HTTP/1.0 200 OK", what="the place of the client that does not read")
