"""Relays: instances, lanes, leases, and what is paused; and the WAL that a slot keeps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relay.page.page import Page


def routes(page: Page) -> list[Route]:
    """Return the routes of these views."""

    def show(request: Request) -> Response:
        overview = page.sampler.latest()
        outbox = None if overview is None else overview.outbox
        unseen = {} if overview is None else overview.unseen
        return page.render(request, "relays.html", outbox=outbox, unseen=unseen, settings=page.settings)

    def wal(request: Request) -> Response:
        overview = page.sampler.latest()
        outbox = None if overview is None else overview.outbox
        unseen = {} if overview is None else overview.unseen
        return page.render(request, "wal.html", outbox=outbox, unseen=unseen, settings=page.settings)

    return [Route("/relays", show), Route("/wal", wal)]
