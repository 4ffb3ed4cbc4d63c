"""Serves the page by itself: `outbox web`, and ``make demo``."""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from outbox.errors import ConfigurationError
from relay.config import is_loopback
from relay.page.app import create_page
from relay.page.security import Access, Account

if TYPE_CHECKING:
    from relay.config import Settings
    from relay.page.sampling import Sampler

_ANY: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared with, not listened on
# Requests that are still answered when it stops; live connections end by themselves.
_GRACE_SECONDS: Final = 5
_BACKLOG: Final = 128


class PageServer:
    """Listens from the beginning, so that ``link`` can be given out; answers while ``run`` runs.

    Raises ConfigurationError when it can't listen at the address, or without a usable certificate.
    """

    def __init__(self, settings: Settings, sink_url: str | None = None) -> None:
        web = settings.web
        token = None if web.users else secrets.token_urlsafe(24)
        self.access = Access(
            accounts={name: Account(user.password_hash, user.role) for name, user in web.users.items()},
            token=token,
            read_only=web.read_only,
        )
        self._socket = _listen(web.address)
        self.port: int = self._socket.getsockname()[1]
        scheme = "http" if web.tls_certificate is None else "https"
        try:
            origins = _origins(settings, scheme, web.address.rpartition(":")[0], self.port)
            app = create_page(self.access, settings, sink_url=sink_url, origins=origins)
            config = uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Only we say where a request comes from; a header of the client's would be believed otherwise.
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                ssl_certfile=web.tls_certificate,
                ssl_keyfile=web.tls_key,
                lifespan="on",
            )
            config.load()
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            raise ConfigurationError(f"OUTBOX_WEB__TLS_CERTIFICATE and OUTBOX_WEB__TLS_KEY: {error}") from error
        except BaseException:
            self._socket.close()
            raise
        self._server = _Server(config, app.state.page.sampler)
        base = web.origin or origins[0]
        self.link = f"{base}/" if token is None else f"{base}/?token={token}"

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


def _origins(settings: Settings, scheme: str, host: str, port: int) -> list[str]:
    default = {"https": 443, "http": 80}[scheme]
    suffix = "" if port == default else f":{port}"
    found = []
    if host.strip("[]") not in _ANY:
        found.append(f"{scheme}://{host}{suffix}")
    if is_loopback(settings.web.address):
        found += [f"{scheme}://{name}{suffix}" for name in ("127.0.0.1", "localhost", "[::1]")]
    if settings.web.origin is not None:
        found.append(settings.web.origin)
    if not found:
        raise ConfigurationError(
            f"OUTBOX_WEB__ADDRESS={settings.web.address} is every address of this machine: set OUTBOX_WEB__ORIGIN to "
            "the one that the page is opened by, such as https://outbox.example.com"
        )
    return list(dict.fromkeys(found))


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"OUTBOX_WEB__ADDRESS={address}: {error}") from error
    return listening
