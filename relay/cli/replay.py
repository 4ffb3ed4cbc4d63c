"""``outbox replay``: sends archived events again."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Annotated
from uuid import UUID

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, say
from outbox._app.text import as_utc
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError
from relay.cli.session import outbox_session
from relay.operations.replay import Replay


def replay(
    since: Annotated[dt.datetime | None, typer.Option(help="Published at or after; UTC unless it has a zone.")] = None,
    until: Annotated[dt.datetime | None, typer.Option(help="Published before.")] = None,
    aggregate: Annotated[str | None, typer.Option(help="TYPE or TYPE/ID.")] = None,
    event_id: Annotated[list[UUID] | None, typer.Option(help="Only this event; repeatable.")] = None,
    topic: Annotated[str | None, typer.Option(help="Published to this topic.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole archive.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Send archived events again: same event ids, marked by the header outbox-replay. Counts them and asks first."""
    kind, slash, key = (aggregate or "").partition("/")
    if aggregate is not None and not (kind and (key or not slash)):
        raise ConfigurationError(f"--aggregate {aggregate}: must be TYPE or TYPE/ID, such as Order/order-17")
    chosen = {
        "since": as_utc("--since", since),
        "until": as_utc("--until", until),
        "type": kind or None,
        "key": key or None,
        "ids": [str(one) for one in event_id or ()] or None,
        "topic": topic,
    }
    if all(value is None for value in chosen.values()) and not everything:
        raise ConfigurationError(
            "say what to replay: --since, --until, --aggregate, --event-id, --topic, or --all for the whole archive"
        )
    with outbox_session(database_url, "replay") as (connection, settings):
        archive = Replay(connection, settings.db_schema, chosen)
        found = archive.count()
        if not as_json and not (found["events"] or found["too_large"]):
            say("no archived events match")
        elif not as_json:
            say(
                f"{counted(found['events'], 'event')} of {counted(found['keys'], 'key')}, "
                f"published {found['first']} to {found['last']}, "
                f"to {', '.join(filter(None, found['topics'] or [])) or 'no known topic'}"
            )
            if too_large := found["too_large"]:
                say(f"{too_large} more {'is' if too_large == 1 else 'are'} too large to be marked and will not be sent")
        if dry_run or not found["events"]:
            sent = 0
        else:
            if not yes and (not sys.stdin.isatty() or not typer.confirm("Send them again?")):
                raise ConfigurationError("nothing was sent: answer yes, or give --yes")
            sent = archive.send(reason)
    if as_json:
        print_json({**found, "dry_run": dry_run, "sent": sent})
    elif sent:
        say(f"{counted(sent, 'event', 'is')} in the outbox again")
