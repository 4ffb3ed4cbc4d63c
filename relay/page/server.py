"""Serves the page by itself: `outbox web`, and ``make demo``."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from uvicorn.protocols.http.h11_impl import H11Protocol

from outbox.errors import ConfigurationError
from relay.page.app import create_page
from relay.page.security import Access, ask_for_link, from_proxy

if TYPE_CHECKING:
    from relay.config import Settings
    from relay.page.sampling import Sampler

# Requests that are still answered when it stops; live connections end by themselves.
_GRACE_SECONDS: Final = 5
_BACKLOG: Final = 128
_HTTP: Final = 80
_MOST_CONNECTIONS: Final = 64
"""At the same time. As on the metrics port a further one takes the place of the one that has waited longest with its
request; without such, it is closed. A browser holds one for the tab that is looked at, and some to load it."""
_PATIENCE: Final = 10.0
"""Seconds for a whole request to arrive."""


class LimitedProtocol(H11Protocol):
    """A connection that ends when a request does not arrive in time: uvicorn waits for ever for half of one."""

    _deadline: asyncio.TimerHandle | None = None
    waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """Wait for the first request. Of too many connections one is closed."""
        super().connection_made(transport)
        connections = cast("set[LimitedProtocol]", self.connections)
        if len(connections) > _MOST_CONNECTIONS:
            silent = [one for one in connections if one is not self and one.waits and not one.transport.is_closing()]
            min(silent, key=lambda one: one.waits_since, default=self).transport.abort()
        if not transport.is_closing():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.waits_since = self.loop.time()
        self._deadline = self.loop.call_later(_PATIENCE, self._end_unless_answering)

    @property
    def waits(self) -> bool:
        """Return whether no whole request has arrived that is not answered."""
        cycle: Any = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete

    def _end_unless_answering(self) -> None:
        if self.waits:
            self.transport.abort()


class PageServer:
    """Listens from the beginning, so that ``link`` can be given out; answers while ``run`` runs.

    Raises ConfigurationError when it can't listen at the address.
    """

    def __init__(self, settings: Settings) -> None:
        web = settings.web
        token = None if web.proxy_secret else secrets.token_urlsafe(24)
        proxy = from_proxy(web.proxy_secret, web.user_header) if web.proxy_secret else None
        self.access = Access(token=token, authenticate=proxy, read_only=web.read_only)
        self._socket = _listen(web.address)
        self.port: int = self._socket.getsockname()[1]
        try:
            origins = _origins(settings, self.port)
            page = create_page(self.access, settings, origins=origins)
            # Keeps the cookie from other ports: see relay.page.security.
            path = "" if token is None else f"/{secrets.token_urlsafe(16)}"
            app = Starlette(
                routes=[Mount(path, page)], exception_handlers={404: _elsewhere}, lifespan=page.router.lifespan_context
            )
            config = uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Only we say where a request comes from; a header of the client's would be believed otherwise.
                proxy_headers=False,
                http=LimitedProtocol,
                # A connection that becomes a WebSocket's would leave the limits.
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
                lifespan="on",
            )
            config.load()
        except BaseException:
            self._socket.close()
            raise
        self._server = _Server(config, page.state.page.sampler)
        self._base = f"{web.origin or origins[0]}{path}/"
        self.link = self._base if token is None else f"{self._base}?token={token}"

    def link_to_open(self) -> str:
        """Return a link for a browser, which keeps it in its history: its token is taken once, and soon."""
        return self._base if self.access.token is None else f"{self._base}?token={self.access.one_time_token()}"

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer until SIGTERM, Ctrl-C or ``stop``. ``ready`` is called once requests are answered."""
        self._server.ready = ready
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End ``run``. May be called from any thread."""
        self._server.end()


class _Server(uvicorn.Server):
    """Ends the live connections when it ends: they would be waited for."""

    def __init__(self, config: uvicorn.Config, sampler: Sampler) -> None:
        super().__init__(config)
        self._sampler = sampler
        self.ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._sampler.end()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        self._sampler.end()
        self.should_exit = True


async def _elsewhere(_: Request, __: Exception) -> Response:
    return ask_for_link()


def _origins(settings: Settings, port: int) -> list[str]:
    web = settings.web
    # Behind a proxy there is no other way in, whatever the address is.
    if web.origin is not None:
        return [web.origin]
    hosts = [web.address.rpartition(":")[0], "127.0.0.1", "localhost", "[::1]"]
    return list(dict.fromkeys(f"http://{host}" if port == _HTTP else f"http://{host}:{port}" for host in hosts))


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = found[0]
        dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"OUTBOX_WEB__ADDRESS={address}: {error}") from error
