"""What a client asks of Postgres, counted on the way there."""

from __future__ import annotations

from urllib.parse import urlsplit

from proxy import Connection, TcpProxy


class Counting(TcpProxy):
    """In front of Postgres: counts connections, and the statements that clients send."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        super().__init__(where.hostname, where.port)
        self.opened = 0
        self.terminated = 0
        """Sessions that were ended by their clients, and not by the end of a connection."""
        self.statements: list[bytes] = []
        self.sessions: dict[Connection, list[bytes]] = {}
        """The same by session."""
        self.executed = 0
        """Statements that were executed, prepared ones among them: those are in ``statements`` once."""
        self.cut_at: bytes | None = None
        """A statement that begins so loses its connection, and does not arrive."""
        self._rest: dict[Connection, bytes] = {}
        self._begun: set[Connection] = set()
        self.url = url.replace(f"{where.hostname}:{where.port}", f"127.0.0.1:{self.port}")

    def _from_client(self, connection: Connection, data: bytes) -> None:
        rest = self._rest.pop(connection, b"") + data
        while True:
            # Before the session begins, messages have no type.
            head = 1 if connection in self._begun else 0
            size = head + int.from_bytes(rest[head : head + 4], "big")
            if len(rest) < head + 4 or len(rest) < size:
                break
            message, rest = rest[:size], rest[size:]
            self.executed += bool(head) and message[:1] in b"EQ"
            if message[:1] in b"PQ" and head:
                statement = message[5:].strip(b"\0").partition(b"\0")[0]
                self.statements.append(statement)
                self.sessions.setdefault(connection, []).append(statement)
                if self.cut_at is not None and statement.startswith(self.cut_at):
                    self._close(connection)
                    return
            elif message[:1] == b"X" and head:
                self.terminated += 1
            elif not head and message[4:8] == b"\0\3\0\0":
                self.opened += 1
                self._begun.add(connection)
        self._rest[connection] = rest
        self._to_target(connection, data)


class RoundTrips(Counting):
    """Counts how often the client waits for an answer."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.round_trips = 0
        self._asking: set[Connection] = set()

    def _from_client(self, connection: Connection, data: bytes) -> None:
        self._asking.add(connection)
        super()._from_client(connection, data)

    def _from_target(self, connection: Connection, data: bytes) -> None:
        if connection in self._asking:
            self._asking.discard(connection)
            self.round_trips += 1
        super()._from_target(connection, data)
