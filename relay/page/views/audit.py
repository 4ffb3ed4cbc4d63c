"""Audit: who has done what, and why, on both sides."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relay.operations.audit import read
from relay.page.page import Page, number_of

_PAGE = 50


def routes(page: Page) -> list[Route]:
    """Return the routes of this view."""

    def show(request: Request) -> Response:
        side = "consumer" if request.query_params.get("side") == "consumer" else "relay"
        before = number_of(request.query_params.get("before"))
        if side == "relay":
            with page.outbox() as connection:
                rows = read(connection, page.schema, before=before, limit=_PAGE)
        else:
            with page.consumers.pages() as pages:
                rows = pages.audit(before, _PAGE)
        return page.render(
            request,
            "audit.html",
            side=side,
            rows=rows,
            next=rows[-1]["id"] if len(rows) == _PAGE else None,
        )

    return [Route("/audit", show)]
