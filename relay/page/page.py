"""What all views share: settings, connections, templates, and the way in which an action is asked for and recorded."""

from __future__ import annotations

import datetime as dt
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import psycopg
import structlog
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from outbox import __version__
from outbox._app.choices import Payloads
from outbox._app.console import printable
from outbox._app.text import age_text, bytes_text, time_text
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, NotFound, OutboxError
from relay.config import Settings
from relay.database import unavailable_on_error
from relay.operations.audit import note
from relay.page import api
from relay.page.charts import MINUTES, charts
from relay.page.sampling import Sampler
from relay.page.security import Role, User
from relay.pipeline.consumers import Consumers, state_word
from relay.pipeline.overview import Overview
from relay.settle.statements import names_of

log = structlog.get_logger("page")

_PENDING: Final = 50
_LONGEST_REASON: Final = 1_000
_STALE_SECONDS: Final = 15.0
_LONG: Final = 4_000
DAMAGED_LINK: Final = "invalid page link; start from the first page"

NAVIGATION: Final = (
    ("overview", "/", "Overview"),
    ("topics", "/topics", "Topics"),
    ("events", "/events", "Events"),
    ("dead letters", "/dead-letters", "Dead letters"),
    ("relays", "/relays", "Relays"),
    ("consumers", "/consumers", "Consumers"),
    ("system", "/system", "System"),
    ("audit", "/audit", "Audit"),
)

_VIEW_OF_COMMAND: Final = {
    "outbox dead-letters list": ("/dead-letters#relay-side", "show"),
    "outbox dead-letters list --side consumer": ("/dead-letters#consumer-side", "show"),
    "outbox external list": ("/consumers#calls", "show"),
    "outbox offsets show": ("/consumers", "show"),
    "outbox relay resume": ("/relays", "resume"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form that was sent."""

    fields: Sequence[tuple[str, str]]

    def get(self, name: str) -> str | None:
        """Return a field's value without surrounding spaces; None if it is empty or missing."""
        return (self.exact(name) or "").strip() or None

    def exact(self, name: str) -> str | None:
        """Return a field's value as it was in our own form; None if it is missing.

        Raises ConfigurationError if there are several.
        """
        found = self.all(name)
        if len(found) > 1:
            raise ConfigurationError(f"{name}: give it once")
        # Browsers send line breaks as CRLF.
        return found[0].replace("\r\n", "\n") if found else None

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.fields if field == name]

    def require(self, name: str, what: str) -> str:
        """Return a field's value. Raises ConfigurationError if it is empty."""
        found = self.get(name)
        if found is None:
            raise ConfigurationError(f"say {what}")
        if len(found) > _LONGEST_REASON:
            raise ConfigurationError(f"{name}: at most {_LONGEST_REASON:,} characters")
        return found


class Page:
    """Renders views and carries out actions."""

    def __init__(
        self,
        settings: Settings,
        outbox: Callable[[], AbstractContextManager[psycopg.Connection[Any]]],
        consumers: Consumers,
        sampler: Sampler,
    ) -> None:
        self.settings = settings
        self.schema = settings.db_schema
        self.outbox = outbox
        self.consumers = consumers
        self.sampler = sampler
        self.shows_payloads = settings.web.payloads is Payloads.SHOWN
        self._pending: OrderedDict[str, tuple[tuple[str, str], Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            show=_show,
            pretty=api.pretty,
            linked=_linked,
            state=state_word,
            number=_number,
            counted=counted,
            age=age_text,
            bytes=bytes_text,
            time=_time,
            moment=_moment,
            when=_when,
            rate=_rate,
        )

        self._templates.globals.update(
            charts=lambda minutes: charts(sampler.samples(minutes * 60)), ranges=lambda: MINUTES
        )

    def close(self) -> None:
        self.sampler.close()

    def render(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        if request.scope["outbox.api"]:
            values.pop("view", None)
            return api.answer(values, status)
        user: User = request.scope["outbox.user"]
        values.setdefault("view", template.removesuffix(".html").replace("_", " "))
        shown = self._templates.get_template(template).render(
            base=request.scope.get("root_path", ""),
            navigation=NAVIGATION,
            user=user,
            can_act=user.role is Role.ADMIN,
            form_token=request.scope["outbox.form_token"],
            note=_signed_note(request),
            taken=self.sampler.taken(),
            version=__version__,
            outbox_name=self.settings.name,
            shows_payloads=self.shows_payloads,
            **values,
        )
        return HTMLResponse(shown, status)

    def action(self, act: Callable[[Request, Form], Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that passes on the fields that were sent. ``act`` runs in a thread and may wait."""

        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(act, request, Form(request.scope["outbox.fields"]))

        return endpoint

    def confirm(
        self, request: Request, title: str, lines: Iterable[str], form: Form, button: str, chosen: Any = None
    ) -> Response:
        """Ask before an action: show what it would do, and a form with the same fields that says yes.

        chosen  what was shown. It is kept, and `chosen` returns it when the answer comes: more may match by then.
        """
        fields = [(name, value) for name, value in form.fields if name not in {"form_token", "confirmed"}]
        key = secrets.token_urlsafe(9)
        with self._lock:
            self._pending[key] = _asked(request), chosen
            while len(self._pending) > _PENDING:
                self._pending.popitem(last=False)
        # The view that the action belongs to.
        back = "/" + request.url.path.removeprefix(request.scope.get("root_path", "")).split("/")[1]
        shown: dict[str, Any] = {"title": title, "lines": list(lines), "confirmed": key}
        if request.scope["outbox.api"]:
            return api.answer(shown)
        return self.render(request, "confirm.html", **shown, fields=fields, button=button, back=back, view="")

    def chosen(self, request: Request, form: Form) -> Any:
        """Return what the answer to ``confirm`` is about: a question about the same action, to the same user.

        Raises ConfigurationError if there is none, or if it was too long ago.
        """
        key = form.get("confirmed")
        with self._lock:
            asked, chosen = self._pending.get(key or "", (None, None))
            if asked != _asked(request):
                raise ConfigurationError("this confirmation has expired: start again")
            del self._pending[key or ""]
        return chosen

    def done(self, request: Request, path: str, text: str) -> Response:
        self.sampler.refresh()
        if request.scope["outbox.api"]:
            return api.answer({"done": text})
        separator = "&" if "?" in path else "?"
        note = urlencode({"note": text, "by": request.scope["outbox.access"].sign(text)})
        return self.elsewhere(request, f"{path}{separator}{note}")

    def elsewhere(self, request: Request, path: str) -> Response:
        prefix = api.PREFIX if request.scope["outbox.api"] else ""
        return RedirectResponse(f"{request.scope.get('root_path', '')}{prefix}{path}", 303)

    def audit(self, request: Request, what: str, why: str | None, details: Mapping[str, Any]) -> None:
        """Write who is about to do what into the outbox's audit. Raises OutboxError: then nothing may be done.

        The action itself leaves a line too, with what it changed; that one names the role of the database.
        """
        user: User = request.scope["outbox.user"]
        with self.outbox() as connection, unavailable_on_error("writing the audit"):
            note(connection, names_of(self.schema), f"page: {what}", why, {"user": user.name, **details})

    def failed(self, request: Request, error: Exception) -> Response:
        """Return an error as a view. Its text comes from us; it quotes no secrets."""
        # 503: servers that are away, tables or rights that are missing: an operator has to act elsewhere.
        status = 400 if isinstance(error, ConfigurationError) else 404 if isinstance(error, NotFound) else 503
        return self.render(request, "error.html", status, error=str(error), view="")

    def broken(self, request: Request, error: Exception) -> Response:
        """Return a mistake of ours as a view. The log has the traceback; the error's text may quote data."""
        log.error("a view failed", path=request.url.path, exc_info=error)
        return self.render(request, "error.html", 500, error=f"{type(error).__name__}; see the log", view="")

    def not_found(self, request: Request, _: Exception | None = None) -> Response:
        return self.render(request, "error.html", 404, error="there is no such page", view="")

    def problems(self, overview: Overview | None) -> list[str]:
        """Return what needs an operator, first of all that the figures are old."""
        if overview is None:
            return ["the pipeline has not been read yet"]
        seconds = (dt.datetime.now(dt.UTC) - self.sampler.taken()).total_seconds()
        limit = max(_STALE_SECONDS, 3 * self.settings.web.refresh_seconds)
        old = [f"the figures below are {age_text(seconds)} old: no newer ones can be read"] if seconds > limit else []
        return old + overview.problems

    def without_hidden(self, row: Mapping[str, Any], contents: Collection[str]) -> Mapping[str, Any]:
        """Return a row; if payloads are hidden, without the columns that have ``contents``."""
        return row if self.shows_payloads else {name: value for name, value in row.items() if name not in contents}

    def read(self, reading: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return what ``reading`` returns, or None and the error's text: the rest of a view is still of use."""
        try:
            return reading(), None
        except OutboxError as error:
            return None, str(error)


def number_of(text: str | None, problem: str = DAMAGED_LINK) -> int | None:
    """Return a number that Postgres can compare with an id; None without a text. Raises ConfigurationError."""
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ConfigurationError(problem)
    return int(text) if text else None


def time_of(text: str | None) -> dt.datetime | None:
    """Return the time in a link of ours; None without a text. Raises ConfigurationError."""
    try:
        time = dt.datetime.fromisoformat(text) if text else None
    except ValueError:
        raise ConfigurationError(DAMAGED_LINK) from None
    if time is not None and time.tzinfo is None:
        raise ConfigurationError(DAMAGED_LINK)
    return time


def _asked(request: Request) -> tuple[str, str]:
    """Return the action that a question is about, and the user who is asked."""
    user: User = request.scope["outbox.user"]
    return request.url.path, user.name


def _signed_note(request: Request) -> str | None:
    """Return what an action has done, from the address that it led to; None if it is not ours."""
    note, by = request.query_params.get("note"), request.query_params.get("by", "")
    if note is None or not hmac.compare_digest(request.scope["outbox.access"].sign(note).encode(), by.encode()):
        return None
    return note


def _show(value: object, most: int = _LONG) -> str:
    """Return a value as text, control characters escaped and shortened."""
    if value is None:
        return "-"
    if isinstance(value, dict | list):
        value = api.json_of(value)
    text = str(value)
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    # Lines stay lines: a payload is shown as it is.
    return printable(cut, but="\n")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:.1f}/s"


def _time(time: dt.datetime | None) -> str:
    # The page's footer says that times are in UTC.
    return time_text(time).removesuffix(" UTC")


def _ago(time: dt.datetime) -> str:
    seconds = (dt.datetime.now(dt.UTC) - time).total_seconds()
    return f"{age_text(seconds)} ago" if seconds >= 0 else f"in {age_text(-seconds)}"


def _when(time: dt.datetime | None) -> str:
    """Return how long ago a time was, with the time itself as a title."""
    return "-" if time is None else _element(time, time_text(time), _ago(time))


def _moment(time: dt.datetime) -> str:
    """Return a time, with how long ago it was as a title."""
    return _element(time, _ago(time), _time(time))


def _element(time: dt.datetime, title: str, text: str) -> Markup:
    return Markup('<time datetime="{}" title="{}">{}</time>').format(time.isoformat(), title, text)


def _linked(text: object, base: str) -> Markup:
    """Return a text of ours: what it gives as a command is a link to the view that does the same, if there is one."""

    def link(command: re.Match[str]) -> str:
        # With whatever options; the longest name first.
        names = [name for name in _VIEW_OF_COMMAND if f"{command[1]} ".startswith(f"{name} ")]
        if not names:
            return f"<code>{command[1]}</code>"
        path, label = _VIEW_OF_COMMAND[max(names, key=len)]
        return Markup('<a href="{}{}">{}</a>').format(base, path, label)

    return Markup(re.sub("`([^`]+)`", link, str(escape(_show(text)))))  # noqa: S704  # escaped
