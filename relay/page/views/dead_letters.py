"""Dead letters of both sides: grouped by their error, one by one, and the actions: retry and discard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from outbox._app.text import event_id_of
from outbox._clients.counting import counted
from outbox.consumer.admin import dead_letters as consumer_letters
from outbox.errors import ConfigurationError
from relay.insights import COUNTED
from relay.operations.dead_letters import COUNTS, DeadLetters, FailureCursor, Filter, Selection
from relay.page.api import CONFIRMED, MANY, REASON, Rows, View, view
from relay.page.page import DAMAGED_LINK, Form, Page, number_of, time_of

_CONTENTS: Final = frozenset({"payload", "payload_bytes", "headers", "key", "key_encoding", "value", "value_encoding"})


@view(
    "/dead-letters",
    "the dead letters of both sides, grouped by their errors",
    shows={"events": Rows, "messages": Rows | None, "unseen": str | None},
)
def show(page: Page, request: Request) -> Response:
    with page.outbox() as connection:
        events = DeadLetters(connection, page.schema).groups()
    messages, unseen = page.read(_ConsumerSide(page).groups)
    return page.render(request, "dead_letters.html", events=events, messages=messages, unseen=unseen)


def _views(side: type[_RelaySide | _ConsumerSide]) -> list[View]:
    def retry(page: Page, request: Request, form: Form) -> Response:
        return _act(page, side(page), request, form, None)

    def discard(page: Page, request: Request, form: Form) -> Response:
        reason = form.require("reason", f"why the {side.noun} may be lost: the audit keeps it")
        return _act(page, side(page), request, form, reason)

    # Those that are named, or else a group.
    fields = {side.id_field: f"{MANY}{side.which}", **side.filters}
    return [
        View(
            side.path,
            lambda page, request: side(page).index(request),
            f"{side.noun} of a group, page by page",
            side.filters | side.pages,
            shows={"filters": Mapping[str, str | int], "rows": Rows, "more": str | None},
        ),
        View(f"{side.path}/retry", retry, f"retry {side.noun}", fields=fields | CONFIRMED),
        View(f"{side.path}/discard", discard, f"discard {side.noun}", fields=fields | REASON | CONFIRMED),
        View(
            f"{side.path}/{{id}}",
            lambda page, request: side(page).show(request),
            "one of them: its contents, attempts, and what waits behind it",
            shows={"letter": Mapping[str, Any]},
        ),
    ]


def _act(page: Page, side: _RelaySide | _ConsumerSide, request: Request, form: Form, reason: str | None) -> Response:
    """Discard for a reason, or retry without one, after a confirmation: what is shown is what is done."""
    verb = "Retry" if reason is None else "Discard"
    if form.get("confirmed") is not None:
        selection, what = page.chosen(request, form)
    else:
        selection, what = side.selection(form)
        # One dead letter is retried without a question, several after one.
        if reason is not None or len(form.all(side.id_field)) != 1:
            lines = [*side.count(selection, discard=reason is not None)]
            lines += [] if reason is None else [f"The reason: {reason}"]
            return page.confirm(request, f"{verb} {what}", lines, form, verb, (selection, what))
    details = {"which": what, "count": side.size(selection)}
    page.audit(request, f"{verb.lower()} {side.noun}", reason, details)
    done = side.retry(selection) if reason is None else side.discard(selection, reason)
    return page.done(request, "/dead-letters", done)


class _RelaySide:
    """Events that could not be published."""

    path: Final = "/dead-letters/relay"
    id_field: Final = "event_id"
    which: Final = "event ids; of copies for dead-letter topics, lane/id"
    filters: Final = {"kind": "the kind of error", "type": "an aggregate type", "state": "dead or retrying"}
    pages: Final = dict.fromkeys(("at", "lane", "id"), "where the page begins: `more` of the page before")
    noun: Final = "dead letters"

    def __init__(self, page: Page) -> None:
        self._page = page

    def index(self, request: Request) -> Response:
        asked = request.query_params
        chosen = Filter(asked.get("kind"), asked.get("type"), asked.get("state"))
        with self._page.outbox() as connection:
            rows, cursor = DeadLetters(connection, self._page.schema).page(chosen, _cursor(asked))
        filters = _given(chosen._asdict())
        more = None if cursor is None else urlencode({**filters, **cursor._asdict(), "at": cursor.at.isoformat()})
        return self._page.render(
            request, "dead_letters_relay.html", view="dead letters", filters=filters, rows=rows, more=more
        )

    def show(self, request: Request) -> Response:
        event_id = event_id_of(request.path_params["id"])
        with self._page.outbox() as connection:
            found = DeadLetters(connection, self._page.schema).show(str(event_id))
        letter = self._page.without_hidden(found, _CONTENTS)
        return self._page.render(request, "dead_letter_relay.html", view="dead letters", letter=letter)

    def selection(self, form: Form) -> tuple[Selection, str]:
        """Return the events that a form names, and a text for them."""
        texts = form.all(self.id_field)
        if texts:
            what = texts[0] if len(texts) == 1 else f"{len(texts)} events"
            if all("/" in text for text in texts):
                return Selection(rows=[_row(text) for text in texts]), what
            return Selection([str(event_id_of(text)) for text in texts]), what
        chosen = Filter(form.exact("kind"), form.exact("type"), form.exact("state"))
        if chosen == Filter():
            raise ConfigurationError("give the ids of events, or a group of them")
        what = "events" + (f" of {chosen.type}" if chosen.type is not None else "")
        what += f" with: {chosen.kind}" if chosen.kind else ""
        with self._page.outbox() as connection:
            found = DeadLetters(connection, self._page.schema).rows(chosen)
        if not found:
            raise ConfigurationError("no failed event matches any more")
        return Selection(rows=found), f"the first {COUNTED:,} {what}" if len(found) >= COUNTED else what

    def size(self, selection: Selection) -> int:
        return len(selection.event_ids or selection.rows or ())

    def count(self, selection: Selection, *, discard: bool) -> list[str]:
        with self._page.outbox() as connection:
            counts = DeadLetters(connection, self._page.schema).count(selection, discard=discard)
        done = "discarded for good" if discard else "retried"
        found = [f"{counted(count, COUNTS[name])} would be {done}" for name, count in counts.items() if count]
        return found or [f"nothing would be {done}"]

    def retry(self, selection: Selection) -> str:
        with self._page.outbox() as connection:
            done = DeadLetters(connection, self._page.schema).retry(selection)
        return f"{counted(len(set(done)), 'event')} will be retried{_locked(done.locked)}"

    def discard(self, selection: Selection, reason: str) -> str:
        with self._page.outbox() as connection:
            gone = DeadLetters(connection, self._page.schema).discard(selection, reason)
        return f"{counted(len(gone), 'event', 'was')} discarded{_locked(gone.locked)}"


class _ConsumerSide:
    """Messages that could not be applied."""

    path: Final = "/dead-letters/consumer"
    id_field: Final = "number"
    which: Final = "which ones"
    filters: Final = {
        "kind": "the kind of error",
        "group": "a consumer group",
        "topic": "a topic",
        "part": "the number of a partition",
        "cause": "undecodable, no-id, …",
    }
    pages: Final = {"after": "where the page begins: `more` of the page before"}
    noun: Final = "messages"

    def __init__(self, page: Page) -> None:
        self._page = page

    def groups(self) -> Sequence[Any]:
        """Return the groups of messages; none without the consumers' tables."""
        if not self._page.consumers.exist():
            return []
        with self._page.consumers.opened(consumer_letters.DeadLetters) as letters:
            return letters.groups()

    def index(self, request: Request) -> Response:
        chosen, filters = self._filter(request.query_params.get)
        with self._page.consumers.opened(consumer_letters.DeadLetters) as letters:
            rows, after = letters.page(chosen, number_of(request.query_params.get("after")))
        more = None if after is None else urlencode({**filters, "after": after})
        return self._page.render(
            request, "dead_letters_consumer.html", view="dead letters", filters=filters, rows=rows, more=more
        )

    def show(self, request: Request) -> Response:
        found = self._page.consumers.dead_letter(_number(request.path_params["id"]))
        letter = self._page.without_hidden(found, _CONTENTS)
        return self._page.render(request, "dead_letter_consumer.html", view="dead letters", letter=letter)

    def selection(self, form: Form) -> tuple[Any, str]:
        """Return the messages that a form names, and a text for them."""
        numbers = [_number(text) for text in form.all(self.id_field) if text]
        if numbers:
            what = f"dead letter {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} dead letters"
            return consumer_letters.Selection(numbers), what
        chosen, filters = self._filter(form.exact)
        if not filters:
            raise ConfigurationError("give the numbers of dead letters, or a group of them")
        with self._page.consumers.opened(consumer_letters.DeadLetters) as letters:
            selection = letters.selection(chosen)
        if not (size := self.size(selection)):
            raise ConfigurationError("no dead letter matches any more")
        what = "messages of " + ", ".join(f"{name} {value}" for name, value in filters.items())
        return selection, f"the first {size:,} {what}" if size >= consumer_letters.COUNTED else what

    def size(self, selection: Any) -> int:
        return len(selection.ids or ())

    def count(self, selection: Any, *, discard: bool) -> list[str]:
        return [f"{counted(self.size(selection), 'message')} would be {'discarded for good' if discard else 'retried'}"]

    def retry(self, selection: Any) -> str:
        with self._page.consumers.opened(consumer_letters.DeadLetters) as letters:
            done = letters.retry(selection)
        return f"{counted(len(done), 'message')} will be retried in the next round of their groups"

    def discard(self, selection: Any, reason: str) -> str:
        with self._page.consumers.opened(consumer_letters.DeadLetters) as letters:
            done = letters.discard(selection, reason)
        freed = f"; {len(done.freed)} that waited behind them will be retried" if done.freed else ""
        return f"{counted(len(done.gone), 'message', 'was')} discarded{freed}"

    def _filter(self, get: Callable[[str], str | None]) -> tuple[consumer_letters.Filter, dict[str, str]]:
        values = {name: get(name) for name in self.filters}
        part = number_of(values["part"])
        chosen = consumer_letters.Filter(values["kind"], values["group"], values["topic"], part, values["cause"])
        return chosen, _given(values)


def _given(filters: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in filters.items() if value is not None}


def _locked(event_ids: Sequence[str]) -> str:
    return f"; left unchanged, as another transaction has them locked: {len(event_ids):,}" if event_ids else ""


def _number(text: str) -> int:
    number = number_of(text, f"{text[:80]!r} is not the number of a dead letter")
    if number is None:
        raise ConfigurationError("give the number of a dead letter")
    return number


def _row(text: str) -> tuple[int, int]:
    lane, _, number = text.partition("/")
    return _number(lane), _number(number)


def _cursor(asked: Mapping[str, str]) -> FailureCursor | None:
    at = time_of(asked.get("at"))
    if at is None:
        return None
    lane, number = number_of(asked.get("lane")), number_of(asked.get("id"))
    if lane is None or number is None:
        raise ConfigurationError(DAMAGED_LINK)
    return FailureCursor(at, lane, number)


VIEWS = (show, *_views(_RelaySide), *_views(_ConsumerSide))
