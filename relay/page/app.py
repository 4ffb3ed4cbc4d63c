"""The page as an ASGI application."""

from __future__ import annotations

import mimetypes
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from outbox.consumer.postgres_errors import connect
from outbox.consumer.progress import latencies
from outbox.errors import OutboxError
from relay.config import load
from relay.core.ports import DatabaseUnavailable
from relay.database import Connector
from relay.insights import OutboxState
from relay.metrics.topics import TopicBacklogs
from relay.page import api
from relay.page.page import Page
from relay.page.sampling import Latency, Sampler
from relay.page.security import Access, Guard
from relay.page.views import audit, consumers, dead_letters, events, overview, relays, system, topics
from relay.parts import build_router
from relay.pipeline.consumers import Consumers
from relay.pipeline.overview import Reader

if TYPE_CHECKING:
    from relay.config import Settings

_FOLDER = Path(__file__).parent
_MOST: Final = 12
"""Connections at the same time; a further request waits for a moment. They must not take all threads of the page."""
_WAIT_SECONDS: Final = 1.0
_MODULES = (overview, topics, events, dead_letters, relays, consumers, system, audit)
_VIEWS: Final = [view for module in _MODULES for view in module.VIEWS]


def create_page(access: Access, settings: Settings | None = None, *, origins: Collection[str] = ()) -> Starlette:
    """Return the operations page.

    access     how it knows its users.
    settings   the outbox's; None: from the environment and outbox.toml, as for every command.
    origins    the addresses that it is reached by, such as http://127.0.0.1:8722; empty: a host application that mounts
               it has checked the host of each request, and is reached as its requests say. Behind a proxy that ends
               TLS they do not say it: then the https address is needed here.

    A host application mounts it: ``Mount("/outbox", create_page(Access(authenticate=…)))``, and calls
    ``app.state.page.close()`` when it ends. Each operator's action is written into the audit with the user's name.
    Raises ConfigurationError.
    """
    settings = load() if settings is None else settings
    outbox = _limited(Connector(settings.require_database(), "outbox web"))
    sink = _limited(partial(connect, settings.relay.sink_url or settings.require_database(), "outbox web"))
    consumers_side = Consumers(settings, sink)
    backlogs = TopicBacklogs(settings.db_schema, build_router(settings))

    def topic_ages(state: OutboxState) -> Mapping[str, float] | None:
        with outbox() as connection:
            found = backlogs.look(connection, state)
        return None if found is None else {topic: one.seconds for topic, one in found.items()}

    sampler = Sampler(Reader(settings), partial(_latency, consumers_side), topic_ages, settings.web.refresh_seconds)
    page = Page(settings, outbox, consumers_side, sampler)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            page.close()

    def description(request: Request) -> Response:
        return api.answer(api.openapi(_VIEWS, request.scope.get("root_path", "")))

    async def live(request: Request) -> Response:
        """Send an event (server-sent events, WHATWG HTML 9.2) whenever there are new figures."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        lines = (f"id: {number}\ndata: new\n\n" async for number in sampler.ticks())
        return StreamingResponse(lines, media_type="text/event-stream")

    app = Starlette(
        routes=[
            *(_route(page, view, prefix) for prefix in ("", api.PREFIX) for view in _VIEWS),
            Route(f"{api.PREFIX}/openapi.json", description),
            Route("/live", live),
            *(Route(f"/static/{file.name}", _file(file)) for file in sorted((_FOLDER / "static").iterdir())),
        ],
        middleware=[Middleware(Guard, access=access, origins=origins, broken=page.broken)],
        exception_handlers={OutboxError: page.failed, 404: page.not_found},
        lifespan=lifespan,
    )
    app.state.page = page
    # An address is one view's, and no other's with a slash behind it.
    app.router.redirect_slashes = False
    return app


def _route(page: Page, view: api.View, prefix: str) -> Route:
    endpoint = partial(view.endpoint, page)
    if view.fields is None:
        return Route(prefix + view.path, endpoint)
    return Route(prefix + view.path, page.action(endpoint), methods=["POST"])


def _latency(side: Consumers) -> Latency | None:
    if not side.exist():
        return None
    with side.opened(latencies) as found:
        return Latency(found[len(found) // 2], found[int(len(found) * 0.95)]) if found else None


def _file(file: Path) -> Callable[[Request], Any]:
    """Return an endpoint for a small file that is kept in memory: it needs none of the threads that views wait in."""
    content, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0]

    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


def _limited(
    connect: Callable[[], psycopg.Connection[Any]],
) -> Callable[[], AbstractContextManager[psycopg.Connection[Any]]]:
    """Return a function whose context is a new connection, of at most a certain number at the same time.

    It raises DatabaseUnavailable while too many requests wait for the server.
    """
    free = threading.BoundedSemaphore(_MOST)

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        if not free.acquire(timeout=_WAIT_SECONDS):
            raise DatabaseUnavailable(f"Postgres: {_MOST} requests of this page wait for it already; try again")
        try:
            with closing(connect()) as opened:
                yield opened
        finally:
            free.release()

    return connection
