"""A payment provider over real HTTP, with a book of its own in SQLite, and orders to be difficult.

``POST /charges`` with an Idempotency-Key does an effect once for each key; ``POST /cancel`` takes back what a key did,
and bars it for the future; ``GET /charges/KEY`` shows it. Every request and every effect is in the book, in its order.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

_BOOK = """
CREATE TABLE IF NOT EXISTS requests (n INTEGER PRIMARY KEY, at REAL, method TEXT, path TEXT, key TEXT, name TEXT);
CREATE TABLE IF NOT EXISTS effects (n INTEGER PRIMARY KEY, key TEXT UNIQUE, name TEXT);
CREATE TABLE IF NOT EXISTS cancelled (key TEXT PRIMARY KEY, name TEXT, times INTEGER DEFAULT 1);
"""


class Provider(ThreadingHTTPServer):
    """The server, from ``with`` on. ``url`` is where it is.

    ``tell(name, *orders)``: what happens to the next requests for an order (its name, or ``cancel NAME``), in turn;
    after that all goes well. A lookup of a key is ``look KEY``, which only N and N:S concern.

    | order      | what the server does                                                                   |
    |------------|----------------------------------------------------------------------------------------|
    | ok         | the effect, and says so                                                                |
    | refuse     | says 402                                                                               |
    | stall      | waits for ``release()``, then does the effect                                          |
    | done-stall | does the effect, then waits for ``release()``                                          |
    | drop       | ends the connection without an effect                                                  |
    | done-drop  | does the effect and ends the connection                                                |
    | done-303   | does the effect and says 303; done-500: 500                                            |
    | done-half  | does the effect and sends half an answer                                               |
    | trickle    | does the effect and answers byte by byte, for ever                                     |
    | echo       | answers with the request's own body                                                    |
    | N or N:S   | says the status N, with Retry-After: S                                                 |
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._path = path
        self._lock = threading.Lock()
        self._orders: dict[str, list[str]] = defaultdict(list)
        self.released = threading.Event()
        self.under_way = 0
        self.most_at_once = 0
        with self._book() as book:
            book.executescript(_BOOK)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self._thread.join(30)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers that were killed end their connections: that is what is tested."""

    def tell(self, name: str, *orders: str) -> None:
        with self._lock:
            self._orders[name].extend(orders)

    def release(self) -> None:
        """Let those that stall go on, now and later."""
        self.released.set()

    def next_order(self, name: str) -> str:
        with self._lock:
            return self._orders[name].pop(0) if self._orders[name] else "ok"

    @contextmanager
    def _book(self) -> Iterator[sqlite3.Connection]:
        with self._lock, closing(sqlite3.connect(self._path, isolation_level=None)) as book:
            yield book

    def note(self, method: str, path: str, key: str, name: str) -> None:
        with self._book() as book:
            book.execute(
                "INSERT INTO requests (at, method, path, key, name) VALUES (?, ?, ?, ?, ?)",
                (time.monotonic(), method, path, key, name),
            )

    def charge(self, key: str, name: str) -> bool:
        """Do the effect unless the key has done it. False: the key was cancelled."""
        with self._book() as book:
            if book.execute("SELECT 1 FROM cancelled WHERE key = ?", (key,)).fetchone():
                return False
            book.execute("INSERT OR IGNORE INTO effects (key, name) VALUES (?, ?)", (key, name))
            return True

    def take_back(self, key: str, name: str) -> None:
        with self._book() as book:
            book.execute(
                "INSERT INTO cancelled (key, name) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET times = times + 1",
                (key, name),
            )

    def look(self, key: str) -> Any:
        with self._book() as book:
            row = book.execute(
                "SELECT n FROM effects WHERE key = ? AND key NOT IN (SELECT key FROM cancelled)", (key,)
            ).fetchone()
        return row and {"charge": row[0]}

    def requests(self, name: str | None = None, path: str | None = None) -> list[tuple[float, str, str, str]]:
        """(at, path, key, name) of the requests, in their order."""
        with self._book() as book:
            rows = book.execute("SELECT at, path, key, name FROM requests ORDER BY n").fetchall()
        return [row for row in rows if name in {None, row[3]} and (path is None or row[1].startswith(path))]

    def effects(self) -> list[str]:
        """The names of the orders that were charged, in their order, those taken back as well."""
        with self._book() as book:
            return [row[0] for row in book.execute("SELECT name FROM effects ORDER BY n").fetchall()]

    def standing(self) -> Counter[str]:
        """How often each order is charged now."""
        with self._book() as book:
            query = "SELECT name FROM effects WHERE key NOT IN (SELECT key FROM cancelled)"
            return Counter(row[0] for row in book.execute(query).fetchall())


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        key = self.path.rpartition("/")[2]
        self.server.note("GET", self.path, self.headers.get("Idempotency-Key", ""), "")
        order = self.server.next_order(f"look {key}")
        if order != "ok":
            return self._obey(order, False, key, "", None)
        found = self.server.look(key)
        return self._say(200 if found else 404, found)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        # A number may have more digits than Python takes.
        body = json.loads(content, parse_int=str)
        key, name = self.headers["Idempotency-Key"], body["order"]
        cancel = self.path == "/cancel"
        server = self.server
        server.note("POST", self.path, key, name)
        order = server.next_order(f"cancel {name}" if cancel else name)
        with server._lock:
            server.under_way += 1
            server.most_at_once = max(server.most_at_once, server.under_way)
        try:
            if order == "echo":
                self._send(200, content)
            else:
                self._obey(order, cancel, key, name, body)
        finally:
            with server._lock:
                server.under_way -= 1

    def _obey(self, order: str, cancel: bool, key: str, name: str, body: Any) -> None:
        if order == "stall":
            assert self.server.released.wait(120)
        if order == "refuse":
            return self._say(402, {"error": "no money"})
        if order[0].isdigit():
            status, _, retry_after = order.partition(":")
            return self._say(int(status), {"error": "not now"}, {"Retry-After": retry_after} if retry_after else {})
        if order == "drop":
            return self._drop()
        if cancel:
            self.server.take_back(body["key"], name)
            answer = {"cancelled": body["key"]}
        elif self.server.charge(key, name):
            answer = self.server.look(key)
        else:
            return self._say(410, {"error": "this key was cancelled"})
        return self._answer(order, answer)

    def _answer(self, order: str, answer: Any) -> None:
        match order:
            case "done-stall":
                assert self.server.released.wait(120)
                return self._say(200, answer)
            case "done-drop":
                return self._drop()
            case "done-303" | "done-500":
                return self._say(int(order.removeprefix("done-")), {"error": "after the effect"})
            case "done-half":
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"char')
                return self._drop()
            case "trickle":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while not self.server.released.wait(0.05):
                    self.wfile.write(b" ")
                return None
            case _:
                return self._say(200, answer)

    def _say(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def _drop(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
