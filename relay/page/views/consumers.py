"""Consumers: groups, their partitions with lag, and calls to other systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from outbox.consumer.admin.offsets import Group
from outbox.consumer.admin.status import GroupState
from outbox.errors import ConfigurationError
from outbox.external.reservations import Chosen, ReservationAdmin
from relay.page.api import CONFIRMED, Rows, view
from relay.page.page import Form, Page

_CONTENTS = frozenset({"request", "response"})
_CALL = {
    "message_id": "the call's message",
    "group": "the call's group",
    "name": "the other system",
    "reason": "why; needed to cancel",
}


@view(
    "/consumers",
    "the groups, and calls to other systems that are stuck",
    shows={
        "groups": Sequence[GroupState],
        "unseen": Mapping[str, str],
        "calls": tuple[Mapping[str, int], Rows],
        "calls_unseen": str | None,
    },
)
def show(page: Page, request: Request) -> Response:
    overview = page.sampler.latest()
    calls, unseen = page.read(page.consumers.stuck_calls)
    counts, stuck = calls or ({}, [])
    return page.render(
        request,
        "consumers.html",
        groups=[] if overview is None else overview.groups,
        unseen={} if overview is None else overview.unseen,
        calls=(counts, [page.without_hidden(call, _CONTENTS) for call in stuck]),
        calls_unseen=unseen,
    )


@view("/consumers/calls/retry", "retry a stuck call", fields=_CALL)
def retry(page: Page, request: Request, form: Form) -> Response:
    return _change(page, "retry", request, form)


@view("/consumers/calls/cancel", "cancel a stuck call, for good", fields=_CALL | CONFIRMED)
def cancel(page: Page, request: Request, form: Form) -> Response:
    return _change(page, "cancel", request, form)


@view(
    "/consumers/groups/{group:path}",
    "a group's partitions, their offsets, lags and losses",
    shows={"group": Group, "away": str | None},
)
def group(page: Page, request: Request) -> Response:
    found, away = page.consumers.positions(request.path_params["group"])
    return page.render(request, "consumer_group.html", view="consumers", group=found, away=away)


def _change(page: Page, what: str, request: Request, form: Form) -> Response:
    try:
        message_id = UUID(form.require("message_id", "which call"))
    except ValueError:
        raise ConfigurationError("that is not a message id (a UUID)") from None
    group, name = form.require("group", "of which group"), form.require("name", "to which system")
    reason = form.require("reason", "why: the audit keeps it") if what == "cancel" else form.get("reason")
    if what == "cancel" and form.get("confirmed") is None:
        lines = [f"The call {name} for message {message_id} would be cancelled", f"The reason: {reason}"]
        return page.confirm(request, "Cancel a call", lines, form, "Cancel the call", (group, name, message_id))
    if what == "cancel":
        group, name, message_id = page.chosen(request, form)
    page.audit(request, f"{what} external call", reason, {"which": f"{group}/{name} {message_id}"})
    chosen = Chosen(group, name, [message_id])
    with page.consumers.opened(ReservationAdmin) as calls:
        done = calls.cancel(chosen, reason or "") if what == "cancel" else calls.retry(chosen, why=reason)
    word = "cancelled" if what == "cancel" else "retried"
    return page.done(request, "/consumers", f"the call will be {word}" if done else "the call is no longer stuck")


VIEWS = (show, retry, cancel, group)
