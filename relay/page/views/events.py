"""Events: search and pages; and one event's way through the pipeline, with its contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outbox._app.text import event_id_of
from outbox.errors import ConfigurationError
from relay.operations.event_search import Contents, EventCursor, EventSearch, EventState
from relay.operations.trace import of_key
from relay.page.api import Rows, view
from relay.page.page import Page, number_of, time_of
from relay.pipeline.trace import Found, Step, find_event

_KEY_EVENTS = 200
# A request waits for it; the command looks for longer.
_SEARCH_SECONDS = 3.0


@view(
    "/events",
    "events by state, page by page, or those of one aggregate",
    {
        "q": "an event's id, or TYPE/ID of an aggregate",
        "state": f"one of {', '.join(EventState)}",
        "type": "an aggregate type",
        "days": "how far back to look among published ones",
        "id": "`next.id` of the page before",
        "at": "`next.at` of the page before",
    },
    shows={
        **dict.fromkeys(("q", "type", "days"), str),
        "state": EventState,
        "states": Sequence[EventState],
        "key_rows": Rows | None,
        "rows": Rows,
        "next": EventCursor | None,
    },
)
def show(page: Page, request: Request) -> Response:
    asked = request.query_params
    wanted = asked.get("q", "").strip()
    kind = asked.get("type", "").strip() or None
    state = _state(asked.get("state") or "waiting")
    days = asked.get("days", "1")
    values: dict[str, Any] = {
        "q": wanted,
        "type": kind or "",
        "state": state,
        "states": list(EventState),
        "days": days,
        "key_rows": None,
        "rows": [],
        "next": None,
    }
    if wanted and "/" not in wanted:
        return page.elsewhere(request, f"/events/{event_id_of(wanted)}")
    aggregate_type, _, key = wanted.partition("/")
    if wanted and not (aggregate_type and key):
        raise ConfigurationError(f"{wanted!r} must be an event id, or TYPE/ID such as Order/order-17")
    number, at = number_of(asked.get("id")), time_of(asked.get("at"))
    after = None if number is None else EventCursor(number, at)
    with page.outbox() as connection:
        if wanted:
            values["key_rows"] = of_key(connection, page.schema, aggregate_type, key, _KEY_EVENTS)
        else:
            search, back = EventSearch(connection, page.schema), _days(asked.get("days"))
            values["rows"], values["next"] = search.page(state, kind, after, days=back)
    return page.render(request, "events.html", **values)


@view(
    "/events/{event_id}",
    "an event's way, its headers and its payload",
    shows={"found": Found, "steps": Sequence[Step], "contents": Contents | None},
)
def trace(page: Page, request: Request) -> Response:
    event_id = event_id_of(request.path_params["event_id"])
    found = find_event(page.settings, event_id, [], _SEARCH_SECONDS)
    contents = found.contents if page.shows_payloads else None
    if contents is None and page.shows_payloads:
        with page.outbox() as connection:
            contents = EventSearch(connection, page.schema).contents(event_id)
    return page.render(
        request,
        "event.html",
        404 if not found.known else 200,
        view="events",
        found=found,
        steps=found.steps(),
        contents=contents,
    )


def _state(text: str) -> EventState:
    try:
        return EventState(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a state of events: {', '.join(EventState)}") from None


def _days(text: str | None) -> int:
    problem = f"days must be a whole number from 1 to 3650, not {(text or '')[:80]!r}"
    days = number_of(text, problem)
    if days is not None and not 1 <= days <= 3650:
        raise ConfigurationError(problem)
    return days or 1


VIEWS = (show, trace)
