"""The work of ``outbox relay pause``, ``resume`` and ``drain``, whose options are in relay.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from outbox._app.console import print_json, printable
from relay.config import load

if TYPE_CHECKING:
    import psycopg

    from relay.core.pauses import Paused, Scope
    from relay.kafka.routing import Router
    from relay.operations.drain import Drain, DrainProgress
    from relay.operations.pauses import PauseChange


_LOOK_SECONDS: Final = 0.5
_SAY_SECONDS: Final = 5.0
_LOOKING: Final = 1 / 5
"""The part of the time that looks may take: those at a topic read all events."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An outbox, and where its events go."""

    connection: psycopg.Connection[Any]
    schema: str
    router: Router


def pause(
    lanes: Sequence[int],
    topics: Sequence[str],
    reason: str | None,
    *,
    wait: bool,
    timeout: float,
    database_url: str | None,
    as_json: bool,
) -> None:
    """Pause, and wait until it is in effect."""
    from relay.core.pauses import scopes_of
    from relay.operations import pauses

    scopes = scopes_of(lanes, topics)
    with _place(database_url) as place:
        changes = pauses.pause(place.connection, place.schema, scopes, reason, may_write=place.router.may_write)
        _print_changes(changes, as_json=as_json)
        numbers = [change.after.number for change in changes if change.after is not None]
        missing = pauses.unconfirmed(place.connection, place.schema, numbers, timeout) if wait else []
    if as_json:
        print_json({"pauses": [_plain(change) for change in changes], "unconfirmed": missing})
    elif wait and not missing:
        typer.echo("In effect: every running relay has confirmed.")
    _fail_unconfirmed(missing, timeout)


def resume(
    lanes: Sequence[int], topics: Sequence[str], reason: str | None, *, database_url: str | None, as_json: bool
) -> None:
    """End pauses."""
    from relay.core.pauses import scopes_of
    from relay.operations import pauses

    scopes = scopes_of(lanes, topics)
    with _place(database_url) as place:
        changes = pauses.resume(place.connection, place.schema, scopes, reason)
        left = pauses.read(place.connection, place.schema)
    if as_json:
        print_json({"ended": [_plain(change) for change in changes if change.changed], "left": list(map(_shown, left))})
        return
    for change in changes:
        if change.before is None:
            typer.echo(f"{printable(str(change.scope)).capitalize()}: not paused, so nothing was changed.")
        else:
            typer.echo(f"Resumed: {printable(str(change.scope))}.")
    for one in left:
        typer.echo(f"Still in force: {printable(str(one))}.")


def drain(
    lanes: Sequence[int],
    topics: Sequence[str],
    reason: str | None,
    *,
    timeout: float,
    database_url: str | None,
    as_json: bool,
) -> None:
    """Wait until all is published that is written by now, then pause."""
    from relay.core.pauses import scopes_of
    from relay.operations import pauses
    from relay.operations.drain import Drain

    scopes = scopes_of(lanes, topics)
    changes: Sequence[PauseChange] = ()
    missing: Sequence[str] = ()
    with _place(database_url) as place:
        deadline = time.monotonic() + timeout
        pauses.require_scopes(place.connection, place.schema, scopes, place.router.may_write)
        left = _await_drained(Drain(place.connection, place.schema, place.router), scopes, deadline, quiet=as_json)
        open_now = {scope: one for scope, one in left.items() if not one.drained}
        if not open_now:
            changes = pauses.pause(
                place.connection, place.schema, scopes, reason, may_write=place.router.may_write, what="drain"
            )
            _print_changes(changes, as_json=as_json)
            numbers = [change.after.number for change in changes if change.after is not None]
            missing = pauses.unconfirmed(place.connection, place.schema, numbers, max(deadline - time.monotonic(), 5.0))
    if as_json:
        shown = [
            {"scope": str(scope), "events": one.events, "causes": list(one.causes)} for scope, one in open_now.items()
        ]
        print_json({"pauses": [_plain(change) for change in changes], "left": shown, "unconfirmed": list(missing)})
    elif not open_now and not missing:
        typer.echo("Drained: nothing is published any more.")
    for scope, one in open_now.items():
        text = f"{scope} not drained after {timeout:g} s, and not paused: {_explained(one)}"
        typer.echo(f"outbox: {printable(text)}", err=True)
    if open_now:
        raise typer.Exit(1)
    _fail_unconfirmed(missing, timeout)


def _await_drained(
    drain: Drain, scopes: Sequence[Scope], deadline: float, *, quiet: bool
) -> dict[Scope, DrainProgress]:
    """Wait until these are drained, showing what is left from time to time. Returns what is left of each."""
    said_at, said = time.monotonic(), ""
    while True:
        began = time.monotonic()
        left = drain.look(scopes)
        now = time.monotonic()
        if all(one.drained for one in left.values()) or now >= deadline:
            return left
        if not quiet and now - said_at >= _SAY_SECONDS:
            shown = "; ".join(f"{scope}: {_explained(one)}" for scope, one in left.items() if not one.drained)
            if shown != said:
                sys.stderr.write(printable(shown) + "\n")
            said_at, said = now, shown
        time.sleep(min(max(_LOOK_SECONDS, (now - began) * (1 / _LOOKING - 1)), max(deadline - now, 0.0)))


def _explained(left: DrainProgress) -> str:
    events = "an unknown number of events" if left.events is None else f"{left.events:,} events"
    return printable("; ".join([f"{events} left", *left.causes]))


def _print_changes(changes: Sequence[PauseChange], *, as_json: bool) -> None:
    for change in () if as_json else changes:
        assert change.after is not None
        if not change.changed:
            typer.echo(f"Nothing was changed: {printable(str(change.after))}.")
        else:
            typer.echo(f"{printable(str(change.after))}.")


def _fail_unconfirmed(missing: Sequence[str], seconds: float) -> None:
    if missing:
        typer.echo(
            f"outbox: {', '.join(map(printable, missing))} did not confirm within {seconds:g} s and may still publish: "
            "is it of a version without pauses, asleep, or cut off from Postgres?",
            err=True,
        )
        raise typer.Exit(1)


def _plain(change: PauseChange) -> dict[str, Any]:
    one = change.after or change.before
    assert one is not None
    return _shown(one) | {"changed": change.changed}


def _shown(one: Paused) -> dict[str, Any]:
    return {
        "scope": str(one.scope.kind),
        "name": one.scope.name,
        "requested_by": one.requested_by,
        "requested_at": one.requested_at,
        "reason": one.reason,
    }


@contextmanager
def _place(database_url: str | None) -> Iterator[_Place]:
    from relay.database import Connector
    from relay.parts import build_router

    settings = load(database_url=database_url)
    with closing(Connector(settings.require_database(), "outbox relay pause")()) as connection:
        yield _Place(connection, settings.db_schema, build_router(settings))
