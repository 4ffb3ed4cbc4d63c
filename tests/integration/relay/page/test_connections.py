"""What slow and many clients get from the operations page, without knowing its token."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from page_access import environment, serve
from support import wait_until

__all__ = ["environment", "serve"]

HEAD = b"POST /relays/change HTTP/1.1\r\nHost: localhost\r\n"
FIRST = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def send() -> Iterator[Any]:
    with ExitStack() as connections:

        def start(page: Any, sent: bytes) -> socket.socket:
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", page.port), 20))
            connection.sendall(sent)
            return connection

        yield start


def live_of(page: Any) -> bytes:
    """Return a user's request for the figures of the charts."""
    return f"GET {page.base}/live HTTP/1.1\r\nHost: {page.address}\r\nCookie: {page.cookie}\r\n\r\n".encode()


def ended(connection: socket.socket) -> bool:
    """Wait until the other side ends a connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_a_request_that_never_ends_is_ended(serve, send, monkeypatch, caplog):
    page = serve().sign_in()
    monkeypatch.setattr("relay.page.server._PATIENCE", 0.5)
    form = f"POST {page.base}/relays/change HTTP/1.1\r\nHost: {page.address}\r\nCookie: {page.cookie}\r\n".encode()
    halves = [
        send(page, b""),
        send(page, HEAD),
        # The body is missing; the next request is; and a user's body is waited for by the page.
        send(page, HEAD + b"Content-Length: 10\r\n\r\nx"),
        send(page, FIRST + HEAD),
        send(page, form + b"Content-Length: 10\r\n\r\nx"),
    ]
    dripping = send(page, HEAD + b"X: ")
    until = time.monotonic() + 20
    while not select.select([dripping], [], [], 0.05)[0]:
        assert time.monotonic() < until
        # It may end just now.
        with suppress(ConnectionError):
            dripping.sendall(b"x")
    assert all(ended(connection) for connection in [dripping, *halves])
    monkeypatch.setattr("relay.page.server._PATIENCE", 600.0)
    assert page.ask("/").status == 200
    # It is no mistake of ours.
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_an_answer_may_take_longer_than_a_request(serve, send, monkeypatch):
    """Charts wait for new figures as long as the page is open."""
    page = serve().sign_in()
    monkeypatch.setattr("relay.page.server._PATIENCE", 0.2)
    asked = live_of(page)

    def stays_open() -> bool:
        try:
            with send(page, asked) as live, live.makefile() as lines:
                until = time.monotonic() + 1
                while time.monotonic() < until:
                    if lines.readline() == "":
                        return False
        except ConnectionError:
            return False
        return True

    # Unless the system lets this thread wait for as long between connecting and asking.
    wait_until(stays_open, what="a connection that outlasts the patience with a request")


def test_a_silent_connection_makes_place_for_another(serve, send, monkeypatch):
    """Long before the patience with it ends; the one that has waited longest is the first."""
    monkeypatch.setattr("relay.page.server._PATIENCE", 600.0)
    monkeypatch.setattr("relay.page.server._MOST_CONNECTIONS", 8)
    page = serve().sign_in()
    asked = live_of(page)
    live = send(page, asked)
    assert live.recv(12) == b"HTTP/1.1 200"
    half = [send(page, each) for each in (HEAD, b"", HEAD + b"Content-Length: 10\r\n\r\nx", HEAD, HEAD, HEAD, HEAD)]
    assert all(page.ask("/").status == 200 for _ in range(3))
    assert ended(half[0])
    others = [send(page, asked) for _ in range(2)]
    assert ended(half[1])
    assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in others)
    assert not select.select([half[-1]], [], [], 0)[0]
    # What is answered keeps its place.
    assert b"data" in live.recv(4096)


def test_no_more_connections_than_some(serve, send, monkeypatch):
    monkeypatch.setattr("relay.page.server._MOST_CONNECTIONS", 8)
    page = serve().sign_in()
    asked = live_of(page)
    held = [send(page, asked) for _ in range(8)]
    assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in held)

    def answers() -> bool:
        try:
            return page.ask("/").status == 200
        except ConnectionError:
            return False

    # Connections are accepted in order.
    assert not any(answers() for _ in range(20))
    held.pop().close()
    wait_until(answers, what="the place of a connection that ended")
