"""A proxy that breaks connections where a test says so, for any server. See kafka_proxy for single requests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final, Self

from outbox.sandbox._ports import free_ports

_HOST: Final = "127.0.0.1"
_CHUNK: Final = 1 << 16
_CONNECT_TIMEOUT: Final = 20.0


class Connection:
    """One client's connection and the one to the target that belongs to it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.target: socket.socket | None = None
        self.closed = False
        self.lossy = False
        """Bytes of it were swallowed: what comes after them would make no sense to the other side."""
        self.client_gone = False
        """We closed the client's side and go on with the target's."""


class TcpProxy:
    """Listens on 127.0.0.1 and forwards every connection to a target, both ways; knows nothing of the protocol.

    target_host, target_port   where connections go. The target may be away: clients are then closed. None: nowhere
                               before ``lead_to``, for a server that has to know the proxy's port when it starts.

    A context manager: it listens inside the ``with`` block, and leaves no thread and no socket behind.
    """

    connection_type: type[Connection] = Connection

    def __init__(self, target_host: str, target_port: int | None) -> None:
        # It stays the same over ``stop`` and ``start``.
        (self.port,) = free_ports(1)
        self._target = (target_host, target_port)
        self._changed = threading.Condition()
        self._dark = False
        self._connections: dict[Connection, threading.Thread] = {}
        self._acceptor: threading.Thread | None = None
        # While it is bound and does not listen, connections are refused and nobody else gets the port.
        self._listener = self._bind()

    @property
    def address(self) -> str:
        """Where clients connect, as ``host:port``."""
        return f"{_HOST}:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._changed:
            return len(self._connections)

    def lead_to(self, target_port: int) -> None:
        """Forward to this port from now on."""
        self._target = (self._target[0], target_port)

    def start(self) -> Self:
        """Accept connections (again)."""
        if self._acceptor is None:
            self._listener.listen(128)
            self._acceptor = self._thread(self._accept, self._listener)
            self._acceptor.start()
        return self

    def stop(self) -> None:
        """Refuse connections and close the present ones, until ``start``."""
        if self._acceptor is None:
            return
        # Wakes the thread that waits in accept; closing alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._acceptor = None
        self._listener.close()
        self._listener = self._bind()
        for connection, thread in self._present():
            self._close(connection)
            thread.join()

    def close(self) -> None:
        """Stop, and give the port back."""
        self.stop()
        self._listener.close()

    def cut(self) -> None:
        """Close all clients' present connections, and wait until they are gone; new ones are accepted."""
        for connection, thread in self._present():
            if not connection.client_gone:
                self._close(connection)
                thread.join()

    def blackhole(self) -> None:
        """Swallow what comes from either side, also a side's end, and accept connections that lead nowhere."""
        with self._changed:
            self._dark = True

    def heal(self) -> None:
        """End the black hole. Connections that lost something in it are closed, the others go on."""
        with self._changed:
            self._dark = False
            self._changed.notify_all()
        for connection, _ in self._present():
            if connection.lossy:
                self._close(connection)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a protocol's proxy overrides

    def _from_client(self, connection: Connection, data: bytes) -> None:
        """Bytes came from the client."""
        self._to_target(connection, data)

    def _from_target(self, connection: Connection, data: bytes) -> None:
        """Bytes came from the target."""
        self._to_client(connection, data)

    def _ended(self, connection: Connection) -> None:
        """A connection is closed on both sides. The lock is held."""

    # -- what it uses

    def _to_client(self, connection: Connection, data: bytes) -> None:
        try:
            connection.client.sendall(data)
        except OSError:
            if not connection.client_gone:
                raise

    def _to_target(self, connection: Connection, data: bytes) -> None:
        assert connection.target is not None
        connection.target.sendall(data)

    def _close(self, connection: Connection) -> None:
        """Close both sides. The threads that read them end then."""
        with self._changed:
            connection.closed = True
            _hang_up(connection.client)
            _hang_up(connection.target)
            self._changed.notify_all()

    def _close_client(self, connection: Connection) -> None:
        """Close the client's side only."""
        with self._changed:
            connection.client_gone = True
            _hang_up(connection.client)

    # -- the threads

    def _thread(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        return threading.Thread(target=work, args=arguments, name=f"proxy-{self.port}{work.__name__}", daemon=True)

    def _bind(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, self.port))
        except OSError:
            listener.close()
            raise
        return listener

    def _present(self) -> list[tuple[Connection, threading.Thread]]:
        with self._changed:
            return list(self._connections.items())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            connection = self.connection_type(client)
            thread = self._thread(self._serve, connection)
            with self._changed:
                connection.lossy = self._dark
                self._connections[connection] = thread
                # Under the lock: who finds the thread in the table may join it.
                thread.start()

    def _serve(self, connection: Connection) -> None:
        back: threading.Thread | None = None
        try:
            if connection.lossy or self._connect(connection):
                if connection.target is not None:
                    back = self._thread(self._pump, connection, connection.target, self._from_target)
                    back.start()
                self._pump(connection, connection.client, self._from_client)
        finally:
            if not connection.client_gone:
                self._close(connection)
            if back is not None:
                back.join()
            with self._changed:
                del self._connections[connection]
                connection.closed = True
                connection.client.close()
                if connection.target is not None:
                    connection.target.close()
                self._ended(connection)
                self._changed.notify_all()

    def _connect(self, connection: Connection) -> bool:
        """Connect to the target. Gives whether it went well and nobody closed the client's side meanwhile."""
        host, port = self._target
        if port is None:
            return False
        try:
            target = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
        except OSError:
            return False
        target.settimeout(None)
        for side in (target, connection.client):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            connection.target = target
            return not connection.closed

    def _pump(
        self, connection: Connection, source: socket.socket, forward: Callable[[Connection, bytes], None]
    ) -> None:
        """Forward what comes from one side until it ends; then close the other, unless only the client is gone."""
        try:
            while True:
                data = _receive(source)
                if self._swallows(connection):
                    if data:
                        continue
                    with self._changed:
                        self._changed.wait_for(lambda: not self._dark or connection.closed)
                    break
                if not data:
                    break
                forward(connection, data)
        except OSError:
            pass  # the other side ended, which its own reader sees as well
        finally:
            if not (connection.client_gone and source is connection.client):
                self._close(connection)

    def _swallows(self, connection: Connection) -> bool:
        """Return whether what just came is lost."""
        with self._changed:
            if connection.client_gone or not (self._dark or connection.lossy):
                return False
            connection.lossy = True
            return True


def _receive(source: socket.socket) -> bytes:
    """Wait for bytes; none when the connection has ended in whatever way."""
    try:
        return source.recv(_CHUNK)
    except OSError:
        return b""


def _hang_up(side: socket.socket | None) -> None:
    if side is not None:
        try:
            side.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it had ended by itself
