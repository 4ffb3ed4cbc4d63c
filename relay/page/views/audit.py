"""Audit: who has done what, and why, on both sides."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outbox.errors import ConfigurationError
from relay.operations.audit import read
from relay.page.page import Page

_PAGE = 50


def routes(page: Page) -> list[Route]:
    """Return the routes of this view."""

    def show(request: Request) -> Response:
        side = "consumer" if request.query_params.get("side") == "consumer" else "relay"
        before = _number(request.query_params.get("before"))
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
            page_shows_payloads=page.shows_payloads,
        )

    return [Route("/audit", show)]


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ConfigurationError("the address of the next page is damaged: begin with the first")
    return int(text)
