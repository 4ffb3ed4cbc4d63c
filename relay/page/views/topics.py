"""Topics: where events go, what waits for each topic, and what Kafka says of it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from relay.operations.event_search import EventSearch
from relay.page.api import view
from relay.page.page import Page
from relay.pipeline.topics import TopicState, topics


@view(
    "/topics",
    "where events go, what waits for each topic, and its state on Kafka",
    shows={"topics": Sequence[TopicState], "away": str | None},
)
def show(page: Page, request: Request) -> Response:
    with page.outbox() as connection:
        waiting = EventSearch(connection, page.schema).waiting_types()
    found, away = topics(page.settings, waiting)
    return page.render(request, "topics.html", topics=found, away=away)


VIEWS = (show,)
