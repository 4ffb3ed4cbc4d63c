"""Relays: instances, lanes, leases, pauses, and the replication slot; pause and resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from outbox.errors import ConfigurationError
from relay.core.pauses import ALL, Scope, ScopeKind
from relay.insights import OutboxState
from relay.operations import pauses
from relay.page.api import CONFIRMED, REASON, view
from relay.page.page import Form, Page
from relay.parts import build_router

_CONFIRM_SECONDS: Final = 5.0
_PAUSE: Final = {
    "scope": "all, lane or topic",
    "lanes": "with lane: their numbers, separated by commas",
    "topic": "with topic: its name",
    **REASON,
}
_RESUME: Final = {"scope": "all, lane or topic", "name": "the lane's number, or the topic's name", **REASON}


@view(
    "/relays",
    "relays, lanes, pauses and the replication slot",
    shows={
        "outbox": OutboxState | None,
        "unseen": Mapping[str, str],
        "retained_limit_bytes": int,
        "pause": Mapping[str, str],
    },
)
def show(page: Page, request: Request) -> Response:
    overview = page.sampler.latest()
    outbox = None if overview is None else overview.outbox
    unseen = {} if overview is None else overview.unseen
    lanes, topic = (request.query_params.get(name, "") for name in ("lanes", "topic"))
    pause = {"scope": "lane" if lanes else "topic" if topic else "", "lanes": lanes, "topic": topic}
    return page.render(
        request,
        "relays.html",
        outbox=outbox,
        unseen=unseen,
        retained_limit_bytes=page.settings.wal.retained_limit_bytes,
        pause=pause,
    )


@view("/relays/change", "pause lanes, a topic, or everything", fields=_PAUSE | CONFIRMED)
def change(page: Page, request: Request, form: Form) -> Response:
    scopes = _scopes(form)
    reason = form.require("reason", "why: the audit keeps it")
    what = ", ".join(map(str, scopes))
    if form.get("confirmed") is None:
        lines = ["Nothing of it is published until an operator resumes it.", f"The reason: {reason}"]
        return page.confirm(request, f"Pause {what}", lines, form, "Pause", scopes)
    scopes = page.chosen(request, form)
    page.audit(request, "pause", reason, {"which": ", ".join(map(str, scopes))})
    with page.outbox() as connection:
        may_write = build_router(page.settings).may_write
        changes = pauses.pause(connection, page.schema, scopes, reason, may_write=may_write)
        missing = pauses.unconfirmed(connection, page.schema, changes, _CONFIRM_SECONDS)
    done = "; ".join(f"{one.scope} {'is' if one.changed else 'was already'} paused" for one in changes)
    return page.done(request, "/relays", done + (f". Not confirmed yet by {', '.join(missing)}" if missing else ""))


@view("/relays/resume", "resume what is paused", fields=_RESUME)
def resume(page: Page, request: Request, form: Form) -> Response:
    scope = _scope(form.require("scope", "what to resume"), form.get("name") or "")
    page.audit(request, "resume", form.get("reason"), {"which": str(scope)})
    with page.outbox() as connection:
        (done,) = pauses.resume(connection, page.schema, [scope], form.get("reason"))
    return page.done(request, "/relays", f"{scope}: {'resumed' if done.changed else 'was not paused'}")


def _scopes(form: Form) -> list[Scope]:
    """Return the scopes that a form names: lanes as numbers separated by commas, a topic, or everything."""
    match form.require("scope", "what to pause: everything, lanes or a topic"):
        case "all":
            if form.get("lanes") or form.get("topic"):
                raise ConfigurationError("everything, or these lanes, or this topic: say which one")
            return [ALL]
        case "lane":
            lanes = form.require("lanes", "which lanes, as numbers separated by commas").replace(",", " ").split()
            return [_scope("lane", lane) for lane in dict.fromkeys(lanes)]
        case "topic":
            return [_scope("topic", form.require("topic", "which topic"))]
        case other:
            raise ConfigurationError(f"{other!r} is not a scope: all, lane or topic")


def _scope(kind: str, name: str) -> Scope:
    if kind not in set(ScopeKind):
        raise ConfigurationError(f"{kind!r} is not a scope: {', '.join(ScopeKind)}")
    if kind == ScopeKind.LANE and not (name.isascii() and name.isdecimal() and len(name) <= 5 and int(name) < 32_768):
        raise ConfigurationError(f"{name[:80]!r} is not the number of a lane")
    return Scope(ScopeKind(kind), "" if kind == ScopeKind.ALL else str(int(name)) if kind == ScopeKind.LANE else name)


VIEWS = (show, change, resume)
