"""The HTTP server for metrics, of relays and consumers."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import orjson
from prometheus_client import CollectorRegistry, Metric, disable_created_metrics, make_wsgi_app
from prometheus_client.registry import Collector

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from _typeshed import WriteableBuffer

_MOST_CONNECTIONS: Final = 16
"""At the same time, with a thread each: the process needs its descriptors for its work. A further one takes the place
of the one that has waited longest with its request, so that a probe gets through; without such, it is closed."""
_PATIENCE: Final = 10.0
"""Seconds for a whole request to arrive, and again for the client to take the answer."""
_PLACE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """A line of ``/readyz?verbose``. With ``counts`` off, a failure is shown and the process stays ready."""

    name: str
    passed: bool
    text: str = ""
    counts: bool = True

    def line(self) -> str:
        """Return the check as Kubernetes writes it."""
        text = f": {' '.join(self.text.split())}" if self.text else ""
        if self.passed:
            return f"[+]{self.name} ok{text}"
        return f"[-]{self.name} failed{text}{'' if self.counts else ' (leaves it ready)'}"


class Readiness(Protocol):
    """The answer of ``/readyz``: a dataclass, written as JSON without its checks, which are for ``?verbose``.

    It is ready when each check that counts has passed.
    """

    @property
    def ready(self) -> bool:
        """Return whether the process is working."""

    @property
    def checks(self) -> Sequence[Check]:
        """Return the checks that were made."""


class _OfOutbox(Collector):
    """What a registry collects, with a label for the outbox: one Prometheus may have several."""

    def __init__(self, registry: Any, outbox: str) -> None:
        self._registry = registry
        self._outbox = outbox

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={"outbox": self._outbox, **sample.labels}) for sample in family.samples
            ]
            yield family

    def restricted_registry(self, names: Iterable[str]) -> _OfOutbox:
        """Return what a scrape with ``name[]`` asks for."""
        return _OfOutbox(self._registry.restricted_registry(names), self._outbox)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._silent: dict[socket.socket, None] = {}
        """The connections whose request has not arrived, the oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection when there are too many."""
        if not self._free.acquire(blocking=False) and not (
            self._end_a_silent_one() and self._free.acquire(timeout=_PLACE_SECONDS)
        ):
            self.shutdown_request(request)
            return
        self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread was started.
            self.note_request(request)
            self._free.release()
            raise

    def _end_a_silent_one(self) -> bool:
        with contextlib.suppress(StopIteration, RuntimeError, OSError):
            oldest = next(iter(self._silent))
            self.note_request(oldest)
            # Its thread reads the end, and frees the place.
            oldest.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def note_request(self, connection: socket.socket) -> None:
        self._silent.pop(connection, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.note_request(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print mistakes of ours. A client that went away or was too slow is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Request(io.RawIOBase):
    """Reads from a connection until ``_PATIENCE`` is over, however often a byte arrives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + _PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        # 0 would mean: do not wait, and that is another error.
        self._connection.settimeout(max(self._until - time.monotonic(), 0.001))
        return self._connection.recv_into(buffer)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def get_environ(self) -> WSGIEnvironment:
        """Return the environment of a request that is complete. From now on the time-out is that of writing."""
        self.connection.settimeout(_PATIENCE)
        cast("_Server", self.server).note_request(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  named so in the base class
        """Log nothing: a probe arrives every few seconds."""


def serve(
    address: str,
    registry: CollectorRegistry,
    setting: str = "OUTBOX_RELAY__METRICS_ADDRESS",
    health: Callable[[], Readiness] | None = None,
    outbox: str | None = None,
) -> threading.Thread:
    """Serve metrics and ``/livez`` at ``host:port`` from a thread of its own; with ``health``, also ``/readyz``, and
    with ``?verbose`` a line for each of its checks. ``outbox`` is a label of all metrics.

    ``/livez`` answers as long as the process does: whatever it waits for, a restart would not help. Connections are
    limited in number, and in the time that a request may take to arrive.

    Raises ConfigurationError, naming the setting, when it can't listen there.
    """
    host, _, port = address.rpartition(":")
    # By default each counter has a second series, with the time at which it was created.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = make_wsgi_app(registry if outbox is None else _OfOutbox(registry, outbox))

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/livez":
            start("200 OK", [("Content-Type", "text/plain")])
            return [b"alive\n"]
        if health is None or environ["PATH_INFO"] != "/readyz":
            answer: Iterable[bytes] = metrics(environ, start)
            return answer
        now: Any = health()
        verbose = "verbose" in parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        kind = "text/plain; charset=utf-8" if verbose else "application/json"
        start("200 OK" if now.ready else "503 Service Unavailable", [("Content-Type", kind)])
        if verbose:
            lines = [*(check.line() for check in now.checks), f"readyz check {'passed' if now.ready else 'failed'}"]
            return ["".join(f"{line}\n" for line in lines).encode()]
        shown = {each.name: getattr(now, each.name) for each in fields(now) if each.name != "checks"}
        return [orjson.dumps(shown, default=list) + b"\n"]

    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server_class: type[WSGIServer] = type("Server", (_Server,), {"address_family": family})
        server = make_server(str(sockaddr[0]), int(port), application, server_class, _Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{setting}={address}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return thread
