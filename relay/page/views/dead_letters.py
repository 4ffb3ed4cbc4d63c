"""Dead letters of both sides: grouped by their error, one by one, and the actions: retry and discard."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outbox.errors import ConfigurationError
from relay.operations import dead_letter_pages as relay_pages
from relay.operations.dead_letter_pages import DeadLetterPages
from relay.operations.dead_letters import DeadLetters, Selection
from relay.page.page import Form, Page

_RELAY: Final = "/dead-letters/relay"
_CONSUMER: Final = "/dead-letters/consumer"


def routes(page: Page) -> list[Route]:
    """Return the routes of these views."""
    relay, consumer = _RelaySide(page), _ConsumerSide(page)

    def show(request: Request) -> Response:
        with page.outbox() as connection:
            events = DeadLetterPages(connection, page.schema).groups()
        messages, unseen = page.read(consumer.groups)
        return page.render(request, "dead_letters.html", events=events, messages=messages, unseen=unseen)

    return [
        Route("/dead-letters", show),
        Route(_RELAY, relay.list),
        Route(f"{_RELAY}/retry", page.action(relay.retry), methods=["POST"]),
        Route(f"{_RELAY}/discard", page.action(relay.discard), methods=["POST"]),
        Route(f"{_RELAY}/{{event_id}}", relay.show),
        Route(_CONSUMER, consumer.list),
        Route(f"{_CONSUMER}/retry", page.action(consumer.retry), methods=["POST"]),
        Route(f"{_CONSUMER}/discard", page.action(consumer.discard), methods=["POST"]),
        Route(f"{_CONSUMER}/{{number}}", consumer.show),
    ]


class _RelaySide:
    """Events that could not be published."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def list(self, request: Request) -> Response:
        """Show the events of a group, page by page."""
        asked = request.query_params
        chosen = relay_pages.Filter(asked.get("kind") or None, asked.get("type") or None, asked.get("state") or None)
        with self._page.outbox() as connection:
            found = DeadLetterPages(connection, self._page.schema).page(chosen, _relay_position(asked))
        more = None
        if found.next is not None:
            place = {"at": found.next.first_failed_at.isoformat(), "lane": found.next.lane, "id": found.next.id}
            more = urlencode({**_without_none(chosen.bound()), **place})
        return self._page.render(
            request, "dead_letters_relay.html", view="dead letters", chosen=chosen, rows=found.rows, more=more
        )

    def show(self, request: Request) -> Response:
        """Show one event: contents, attempts, and what waits behind it."""
        event_id = _uuid(request.path_params["event_id"])
        with self._page.outbox() as connection:
            found = DeadLetters(connection, self._page.schema).show(str(event_id))
        return self._page.render(
            request,
            "dead_letter_relay.html",
            view="dead letters",
            letter=found,
            shows_payloads=self._page.shows_payloads,
        )

    def retry(self, request: Request, form: Form) -> Response:
        """Retry one event, or after a look at the number all of a group."""
        page = self._page
        with page.outbox() as connection:
            letters = DeadLetters(connection, page.schema)
            selection, what = self._selection(form, DeadLetterPages(connection, page.schema))
            if form.get("confirmed") is None and not form.all("event_id"):
                counts = letters.count(selection, discard=False)
                return page.confirm(request, f"Retry {what}", _counted(counts, "retried"), form, "Retry")
            page.audit(request, "retry dead letters", None, {"which": what})
            done = letters.retry(selection)
        return page.done(request, "/dead-letters", f"{len(set(done))} events will be tried again{_locked(done.locked)}")

    def discard(self, request: Request, form: Form) -> Response:
        """Discard events for good, after a look at what it would do."""
        page = self._page
        reason = form.require("reason", "why the events may be lost: the audit keeps it")
        with page.outbox() as connection:
            letters = DeadLetters(connection, page.schema)
            selection, what = self._selection(form, DeadLetterPages(connection, page.schema))
            if form.get("confirmed") is None:
                counts = letters.count(selection, discard=True)
                lines = [*_counted(counts, "discarded for good"), f"The reason: {reason}"]
                return page.confirm(request, f"Discard {what}", lines, form, "Discard")
            page.audit(request, "discard dead letters", reason, {"which": what})
            gone = letters.discard(selection, reason)
        return page.done(request, "/dead-letters", f"{len(gone)} events were discarded{_locked(gone.locked)}")

    @staticmethod
    def _selection(form: Form, pages: DeadLetterPages) -> tuple[Selection, str]:
        ids = [str(_uuid(text)) for text in form.all("event_id")]
        if ids:
            return Selection(ids), ids[0] if len(ids) == 1 else f"{len(ids)} events"
        chosen = relay_pages.Filter(form.get("kind"), form.get("type"), form.get("state"))
        what = f"events of {chosen.aggregate_type or 'all types'}" + (f" with: {chosen.kind}" if chosen.kind else "")
        found = pages.event_ids(chosen)
        if not found:
            raise ConfigurationError("no failed event matches any more")
        if len(found) >= relay_pages.COUNTED:
            what = f"the first {relay_pages.COUNTED:,} {what}"
        return Selection(found), what


class _ConsumerSide:
    """Messages that could not be applied."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def groups(self) -> Sequence[Any]:
        """Return the groups of messages; none without the consumers' tables."""
        if not self._page.consumers.exist():
            return []
        with self._page.consumers.pages() as pages:
            return pages.dead_letter_groups()

    def list(self, request: Request) -> Response:
        """Show the messages of a group, page by page."""
        chosen = self._filter(request.query_params.get)
        with self._page.consumers.pages() as pages:
            rows, after = pages.dead_letters(chosen, _number(request.query_params.get("after")))
        more = None if after is None else urlencode({**_without_none(_fields(chosen)), "after": after})
        return self._page.render(
            request, "dead_letters_consumer.html", view="dead letters", chosen=chosen, rows=rows, more=more
        )

    def show(self, request: Request) -> Response:
        """Show one message: contents, attempts, and what waits behind it."""
        number = _number(request.path_params["number"])
        if number is None:
            raise ConfigurationError("a dead letter has a number")
        return self._page.render(
            request,
            "dead_letter_consumer.html",
            view="dead letters",
            letter=self._page.consumers.dead_letter(number),
            shows_payloads=self._page.shows_payloads,
        )

    def retry(self, request: Request, form: Form) -> Response:
        """Have messages tried again in the next round of their group."""
        page = self._page
        selection, what, count = self._selection(form)
        if form.get("confirmed") is None and not form.all("number"):
            return page.confirm(request, f"Retry {what}", [f"{count} messages would be retried"], form, "Retry")
        page.audit(request, "retry messages", None, {"which": what})
        with page.consumers.dead_letters() as letters:
            done = letters.retry(selection)
        return page.done(
            request, "/dead-letters", f"{len(done)} messages will be tried again in their groups' next round"
        )

    def discard(self, request: Request, form: Form) -> Response:
        """Discard messages for good, after a look at what it would do."""
        page = self._page
        reason = form.require("reason", "why the messages may be lost: the audit keeps it")
        selection, what, count = self._selection(form)
        if form.get("confirmed") is None:
            lines = [f"{count} messages would be discarded for good", f"The reason: {reason}"]
            return page.confirm(request, f"Discard {what}", lines, form, "Discard")
        page.audit(request, "discard messages", reason, {"which": what})
        with page.consumers.dead_letters() as letters:
            done = letters.discard(selection, reason)
        freed = f"; {len(done.freed)} that waited behind them will be tried again" if done.freed else ""
        return page.done(request, "/dead-letters", f"{len(done.gone)} messages were discarded{freed}")

    def _selection(self, form: Form) -> tuple[Any, str, int]:
        numbers = [number for text in form.all("number") if (number := _number(text)) is not None]
        if numbers:
            what = f"dead letter {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} dead letters"
            return self._page.consumers.selection(numbers)[0], what, len(numbers)
        chosen = self._filter(form.get)
        selection, more = self._page.consumers.selection(chosen)
        count = len(selection.ids or ())
        if not count:
            raise ConfigurationError("no dead letter matches any more")
        shown = _without_none(_fields(chosen))
        what = "messages of " + (", ".join(f"{name} {value}" for name, value in shown.items()) or "all groups")
        return selection, f"the first {count:,} {what}" if more else what, count

    def _filter(self, get: Any) -> Any:
        return self._page.consumers.filter(*(get(name) or None for name in ("kind", "group", "topic", "cause")))


def _fields(chosen: Any) -> dict[str, str | None]:
    return {"kind": chosen.kind, "group": chosen.group, "topic": chosen.topic, "cause": chosen.cause}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _counted(counts: dict[str, int], done: str) -> list[str]:
    names = {"dead": "dead letters", "waiting": "events that wait for another attempt", "without_event": "leftovers"}
    return [f"{count:,} {names[name]} would be {done}" for name, count in counts.items() if count] or [
        f"nothing would be {done}"
    ]


def _locked(event_ids: Sequence[str]) -> str:
    return f"; {len(event_ids)} are locked by another transaction and were left: try again" if event_ids else ""


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not an event's id: that is a UUID") from None


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text[:20]) < 2**63):
        raise ConfigurationError(f"{text!r} is not the number of a dead letter")
    return int(text)


def _relay_position(asked: Any) -> relay_pages.Position | None:
    at, lane, number = (asked.get(name) for name in ("at", "lane", "id"))
    if not at:
        return None
    try:
        when, place = dt.datetime.fromisoformat(at), (int(lane or ""), int(number or ""))
    except ValueError:
        raise ConfigurationError("the address of the next page is damaged: begin with the first") from None
    if when.tzinfo is None or abs(place[0]) > 32_767 or abs(place[1]) >= 2**63:
        raise ConfigurationError("the address of the next page is damaged: begin with the first")
    return relay_pages.Position(when, *place)
