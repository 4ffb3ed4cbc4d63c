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
from relay.insights import COUNTED
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
        chosen = relay_pages.Filter(asked.get("kind"), asked.get("type"), asked.get("state"))
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
            if form.get("confirmed") is None:
                selection, what = self._selection(form, DeadLetterPages(connection, page.schema))
                if not form.all("event_id"):
                    lines = _counted(letters.count(selection, discard=False), "retried")
                    return page.confirm(request, f"Retry {what}", lines, form, "Retry", (selection, what))
            else:
                selection, what = page.chosen(request, form)
            page.audit(request, "retry dead letters", None, _which(what, selection.event_ids))
            done = letters.retry(selection)
        return page.done(request, "/dead-letters", f"{len(set(done))} events will be retried{_locked(done.locked)}")

    def discard(self, request: Request, form: Form) -> Response:
        """Discard events for good, after a look at what it would do."""
        page = self._page
        reason = form.require("reason", "why the events may be lost: the audit keeps it")
        with page.outbox() as connection:
            letters = DeadLetters(connection, page.schema)
            if form.get("confirmed") is None:
                selection, what = self._selection(form, DeadLetterPages(connection, page.schema))
                lines = [
                    *_counted(letters.count(selection, discard=True), "discarded for good"),
                    f"The reason: {reason}",
                ]
                return page.confirm(request, f"Discard {what}", lines, form, "Discard", (selection, what))
            selection, what = page.chosen(request, form)
            page.audit(request, "discard dead letters", reason, _which(what, selection.event_ids))
            gone = letters.discard(selection, reason)
        return page.done(request, "/dead-letters", f"{len(gone)} events were discarded{_locked(gone.locked)}")

    @staticmethod
    def _selection(form: Form, pages: DeadLetterPages) -> tuple[Selection, str]:
        """Return the events that a form names, each by its id: what is shown is what is done."""
        ids = [str(_uuid(text)) for text in form.all("event_id")]
        if ids:
            return Selection(ids), ids[0] if len(ids) == 1 else f"{len(ids)} events"
        chosen = relay_pages.Filter(form.exact("kind"), form.exact("type"), form.exact("state"))
        if chosen == relay_pages.Filter():
            raise ConfigurationError("say which events: by their ids, or a group of them")
        what = "events" + (f" of {chosen.aggregate_type}" if chosen.aggregate_type is not None else "")
        what += f" with: {chosen.kind}" if chosen.kind else ""
        found = pages.event_ids(chosen)
        if not found:
            raise ConfigurationError("no failed event matches any more")
        if len(found) >= COUNTED:
            what = f"the first {COUNTED:,} {what}"
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
        """Retry messages in the next round of their group."""
        page = self._page
        if form.get("confirmed") is None:
            selection, what = self._selection(form)
            if not form.all("number"):
                lines = [f"{len(selection.ids):,} messages would be retried"]
                return page.confirm(request, f"Retry {what}", lines, form, "Retry", (selection, what))
        else:
            selection, what = page.chosen(request, form)
        page.audit(request, "retry messages", None, _which(what, selection.ids))
        with page.consumers.dead_letters() as letters:
            done = letters.retry(selection)
        text = f"{len(done)} messages will be retried in the next round of their groups"
        return page.done(request, "/dead-letters", text)

    def discard(self, request: Request, form: Form) -> Response:
        """Discard messages for good, after a look at what it would do."""
        page = self._page
        reason = form.require("reason", "why the messages may be lost: the audit keeps it")
        if form.get("confirmed") is None:
            selection, what = self._selection(form)
            lines = [f"{len(selection.ids):,} messages would be discarded for good", f"The reason: {reason}"]
            return page.confirm(request, f"Discard {what}", lines, form, "Discard", (selection, what))
        selection, what = page.chosen(request, form)
        page.audit(request, "discard messages", reason, _which(what, selection.ids))
        with page.consumers.dead_letters() as letters:
            done = letters.discard(selection, reason)
        freed = f"; {len(done.freed)} that waited behind them will be retried" if done.freed else ""
        return page.done(request, "/dead-letters", f"{len(done.gone)} messages were discarded{freed}")

    def _selection(self, form: Form) -> tuple[Any, str]:
        """Return the messages that a form names, each by its number: what is shown is what is done."""
        numbers = [number for text in form.all("number") if (number := _number(text)) is not None]
        if numbers:
            what = f"dead letter {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} dead letters"
            return self._page.consumers.selection(numbers)[0], what
        chosen = self._filter(form.exact)
        shown = _without_none(_fields(chosen))
        if not shown:
            raise ConfigurationError("say which messages: by their numbers, or a group of them")
        selection, more = self._page.consumers.selection(chosen)
        if not selection.ids:
            raise ConfigurationError("no dead letter matches any more")
        what = "messages of " + ", ".join(f"{name} {value}" for name, value in shown.items())
        return selection, f"the first {len(selection.ids):,} {what}" if more else what

    def _filter(self, get: Any) -> Any:
        return self._page.consumers.filter(*(get(name) for name in ("kind", "group", "topic", "cause")))


def _which(what: str, ids: Sequence[Any] | None) -> dict[str, Any]:
    """Return an audit line's details: what was chosen, and how many there are."""
    return {"which": what, "count": len(ids or ())}


def _fields(chosen: Any) -> dict[str, str | None]:
    return {"kind": chosen.kind, "group": chosen.group, "topic": chosen.topic, "cause": chosen.cause}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _counted(counts: dict[str, int], done: str) -> list[str]:
    names = {"dead": "dead letters", "retrying": "retrying events", "without_event": "leftovers"}
    return [f"{count:,} {names[name]} would be {done}" for name, count in counts.items() if count] or [
        f"nothing would be {done}"
    ]


def _locked(event_ids: Sequence[str]) -> str:
    return (
        f"; {len(event_ids)} are locked by another transaction and were left unchanged: retry them" if event_ids else ""
    )


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not an event's id: that is a UUID") from None


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ConfigurationError(f"{text[:80]!r} is not the number of a dead letter")
    return int(text)


def _relay_position(asked: Any) -> relay_pages.FailureCursor | None:
    at, lane, number = (asked.get(name) for name in ("at", "lane", "id"))
    if not at:
        return None
    try:
        when, place = dt.datetime.fromisoformat(at), (int((lane or "")[:20]), int((number or "")[:20]))
    except ValueError:
        raise ConfigurationError("the address of the next page is damaged: begin with the first") from None
    if when.tzinfo is None or abs(place[0]) > 32_767 or abs(place[1]) >= 2**63:
        raise ConfigurationError("the address of the next page is damaged: begin with the first")
    return relay_pages.FailureCursor(when, *place)
