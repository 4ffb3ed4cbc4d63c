"""Audit: who has done what, and why, on both sides, and what `outbox audit --follow` has found."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from relay.insights import ALL_TOPICS, Verified, read_verified
from relay.operations.audit import read
from relay.page.api import Rows, view
from relay.page.page import Page, number_of

_PAGE = 50
_CONTENTS = frozenset({"payload", "payload_base64", "headers", "key_base64", "value_base64", "message_value"})
"""What the audits of the outbox and of its consumers have of an event or a message itself."""


@view(
    "/audit",
    "who did what, and why, on one side; or what `outbox audit --follow` has found",
    {"side": "relay (the default), consumer or events", "before": "the number of a line: those before it"},
    shows=({"side": str, "rows": Rows, "next": int | None}, {"side": str, "topics": Sequence[Verified]}),
)
def show(page: Page, request: Request) -> Response:
    side = request.query_params.get("side")
    if side == "events":
        with page.outbox() as connection:
            verified = [one for one in read_verified(connection, page.schema) if one.topic != ALL_TOPICS]
        return page.render(request, "verified.html", side=side, topics=verified)
    side = "consumer" if side == "consumer" else "relay"
    before = number_of(request.query_params.get("before"))
    session, schema = page.outbox, page.schema
    if side == "consumer":
        session, schema = page.consumers.session, page.settings.consumer_schema
    with session() as connection:
        rows = read(connection, schema, before=before, limit=_PAGE)
    return page.render(
        request,
        "audit.html",
        side=side,
        rows=[{**row, "details": page.without_hidden(row["details"], _CONTENTS)} for row in rows],
        next=rows[-1]["id"] if len(rows) == _PAGE else None,
    )


VIEWS = (show,)
