"""The HTTP server for metrics, of relays and consumers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import orjson
from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class Readiness(Protocol):
    """The answer of ``/readyz``: a dataclass, written as JSON."""

    @property
    def ready(self) -> bool:
        """Return whether the process is working."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  named so in the base class
        """Log nothing: a probe arrives every few seconds."""


def serve(
    address: str,
    registry: CollectorRegistry,
    setting: str = "OUTBOX_RELAY__METRICS_ADDRESS",
    health: Callable[[], Readiness] | None = None,
) -> threading.Thread:
    """Serve metrics and ``/livez`` at ``host:port`` from a thread of its own; with ``health``, also ``/readyz``.

    ``/livez`` answers as long as the process does: whatever it waits for, a restart would not mend it.

    Raises ConfigurationError, naming the setting, when it can't listen there.
    """
    host, _, port = address.rpartition(":")
    # Else each counter would have a second series, with the time at which it was made.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/livez":
            start("200 OK", [("Content-Type", "text/plain")])
            return [b"alive\n"]
        if health is None or environ["PATH_INFO"] != "/readyz":
            shown: Iterable[bytes] = metrics(environ, start)
            return shown
        now = health()
        start("200 OK" if now.ready else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [orjson.dumps(now, default=list) + b"\n"]

    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server_class: type[WSGIServer] = type("Server", (_Server,), {"address_family": family})
        server = make_server(str(sockaddr[0]), int(port), application, server_class, _Quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{setting}={address}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return thread
