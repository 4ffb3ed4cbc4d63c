"""``outbox relay pause``, ``resume``, ``drain`` and ``wait``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import psycopg
import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, say
from relay.cli.session import outbox_session
from relay.core.pauses import ALL, Scope, scopes_of
from relay.kafka.routing import Router

if TYPE_CHECKING:
    from relay.operations.drain import Drain, DrainProgress
    from relay.operations.pauses import PauseChange

_LOOK_SECONDS: Final = 0.2
_PROGRESS_SECONDS: Final = 5.0
_REST: Final = 4
"""How many times as long as its queries took it rests: for a topic they read all events."""

_Lanes = Annotated[list[int] | None, typer.Option("--lane", min=0, help="Only this lane; repeatable.")]
_Topics = Annotated[list[str] | None, typer.Option("--topic", help="Only this topic; repeatable.")]
_Timeout = typer.Option(min=0, help="Longest wait, in seconds.")


def pause(
    lane: _Lanes = None,
    topic: _Topics = None,
    reason: Reason = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the pause is in effect.")] = True,
    timeout: Annotated[float, _Timeout] = 30.0,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop publishing these lanes or topics, or everything, until `outbox relay resume`. No event is lost.

    With --wait, nothing more is published once the command ends. Exit status 1 if a relay does not confirm in time;
    the pause stays.
    """
    from relay.operations import pauses

    with _opened(database_url, "pause") as (connection, schema, router):
        changes = pauses.pause(
            connection, schema, scopes_of(lane or (), topic or ()), reason, may_write=router.may_write
        )
        _print_changes(changes, as_json=as_json)
        missing = pauses.unconfirmed(connection, schema, changes, timeout) if wait else []
    if as_json:
        print_json({"pauses": [_plain(change) for change in changes], "unconfirmed": missing})
    elif wait and not missing:
        say("In effect: every running relay has confirmed.")
    _fail_unconfirmed(missing, timeout)


def resume(
    lane: _Lanes = None,
    topic: _Topics = None,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """End the pauses of exactly these lanes and topics; without any, the pause of everything.

    Waiting events are published in order. Other pauses stay, and are listed.
    """
    from relay.insights import read_pauses
    from relay.operations import pauses

    with _opened(database_url, "resume") as (connection, schema, _):
        changes = pauses.resume(connection, schema, scopes_of(lane or (), topic or ()), reason)
        left = read_pauses(connection, schema)
    if as_json:
        ended = [_plain(change) for change in changes if change.changed]
        print_json({"ended": ended, "left": list(map(pauses.details, left))})
        return
    for change in changes:
        if not change.changed:
            say(f"{str(change.scope).capitalize()}: not paused, so nothing was changed.")
        else:
            say(f"Resumed: {change.scope}.")
    for one in left:
        say(f"Still in force: {one}.")


def drain(
    lane: _Lanes = None,
    topic: _Topics = None,
    reason: Reason = None,
    timeout: Annotated[float, _Timeout] = 300.0,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Wait until all events written so far in these lanes or topics, or in all, are published; then pause them.

    Includes open transactions that have a transaction id. Shows what is left and why. Exit status 1 on timeout,
    without a pause.
    """
    from relay.operations import pauses
    from relay.operations.drain import Drain

    scopes = scopes_of(lane or (), topic or ())
    changes: Sequence[PauseChange] = ()
    missing: Sequence[str] = ()
    confirm_seconds = 0.0
    with _opened(database_url, "drain") as (connection, schema, router):
        deadline = time.monotonic() + timeout
        pauses.require_scopes(connection, schema, scopes, router.may_write)
        left = _await_drained(Drain(connection, schema, router), scopes, deadline, quiet=as_json)
        if not left:
            changes = pauses.pause(connection, schema, scopes, reason, may_write=router.may_write, what="drain")
            _print_changes(changes, as_json=as_json)
            confirm_seconds = max(round(deadline - time.monotonic(), 1), 5.0)
            missing = pauses.unconfirmed(connection, schema, changes, confirm_seconds)
    if as_json:
        shown = [{"scope": str(scope), "events": one.events, "causes": list(one.causes)} for scope, one in left.items()]
        print_json({"pauses": [_plain(change) for change in changes], "left": shown, "unconfirmed": list(missing)})
    elif not left and not missing:
        say("Drained and paused: nothing more is published.")
    for scope, one in left.items():
        say(f"outbox: {scope} not drained after {timeout:g} s, and not paused: {one}", err=True)
    if left:
        raise typer.Exit(1)
    _fail_unconfirmed(missing, confirm_seconds)


def wait(seconds: Annotated[float, _Timeout] = 60.0, database_url: DatabaseUrl = None) -> None:
    """Wait until all events committed so far are published or dead letters. Exit status 1 if some are left."""
    from relay.operations.drain import Drain

    with _opened(database_url, "wait") as (connection, schema, router):
        drain = Drain(connection, schema, router, committed=True)
        left = _await_drained(drain, [ALL], time.monotonic() + seconds, quiet=True)
    for one in left.values():
        say(
            f"outbox: not everything is published after {seconds:g} s: {one}. See `outbox status` for relays and "
            "pauses, `outbox dead-letters list` for failed events, `outbox doctor` for Kafka, and the relay's log",
            err=True,
        )
        raise typer.Exit(1)
    say("Every event is published.")


def _await_drained(
    drain: Drain, scopes: Sequence[Scope], deadline: float, *, quiet: bool
) -> Mapping[Scope, DrainProgress]:
    """Wait until these are drained, printing what is left from time to time. Return what is left at the deadline."""
    printed_at, printed = time.monotonic(), ""
    while True:
        began = time.monotonic()
        left = {scope: one for scope, one in drain.look(scopes).items() if not one.drained}
        now = time.monotonic()
        if not left or now >= deadline:
            return left
        if not quiet and now - printed_at >= _PROGRESS_SECONDS:
            text = "; ".join(f"{scope}: {one}" for scope, one in left.items())
            if text != printed:
                say(text, err=True)
            printed_at, printed = now, text
        time.sleep(min(max(_LOOK_SECONDS, (now - began) * _REST), max(deadline - now, 0.0)))


def _print_changes(changes: Sequence[PauseChange], *, as_json: bool) -> None:
    for change in () if as_json else changes:
        say(f"{change.paused}." if change.changed else f"Nothing was changed: {change.paused}.")


def _fail_unconfirmed(missing: Sequence[str], seconds: float) -> None:
    if missing:
        say(
            f"outbox: {', '.join(missing)} did not confirm within {seconds:g} s and may still publish: a relay "
            "may be suspended, cut off from Postgres, or of a version without pauses",
            err=True,
        )
        raise typer.Exit(1)


def _plain(change: PauseChange) -> dict[str, Any]:
    from relay.operations import pauses

    assert change.paused is not None
    return pauses.details(change.paused) | {"changed": change.changed}


@contextmanager
def _opened(database_url: str | None, command: str) -> Iterator[tuple[psycopg.Connection[Any], str, Router]]:
    from relay.parts import build_router

    with outbox_session(database_url, f"relay {command}") as (connection, settings):
        yield connection, settings.db_schema, build_router(settings)
