"""``outbox scheduled``: list and cancel scheduled events."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from outbox._app.console import (
    AsJson,
    DatabaseUrl,
    Reason,
    print_json,
    require_reason,
    say_if_more,
    table_console,
    text_table,
)
from outbox._app.text import time_text
from relay.cli.session import outbox_session
from relay.operations.scheduled import cancel as cancel_scheduled
from relay.operations.scheduled import list_scheduled

app = typer.Typer(no_args_is_help=True, help="Events to be published at a later time.")


@app.command("list")
def list_events(
    aggregate_type: Annotated[str | None, typer.Option("--type", help="Only of this aggregate type.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many.")] = 50,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List scheduled events in the order of their time."""
    with outbox_session(database_url, "scheduled") as (connection, settings):
        found = list_scheduled(connection, settings.db_schema, aggregate_type, limit + 1)
    rows = found[:limit]
    if as_json:
        print_json({"scheduled": [dict(row) for row in rows]})
        return
    if not rows:
        typer.echo("nothing is scheduled")
        return
    cells = (
        (
            time_text(row["not_before"]),
            str(row["event_id"]),
            f"{row['aggregate_type']}/{row['aggregate_id']}",
            row["event_type"],
        )
        for row in rows
    )
    table_console().print(text_table(("not before", "event", "aggregate", "type"), cells))
    say_if_more(len(found), limit)


@app.command()
def cancel(
    event_id: Annotated[UUID, typer.Argument(help="The event's id.")],
    reason: Reason = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Delete a scheduled event, so that it is never published. The audit keeps it."""
    why = require_reason(reason, "why it is cancelled")
    with outbox_session(database_url, "scheduled") as (connection, settings):
        cancel_scheduled(connection, settings.db_schema, event_id, why)
    typer.echo(f"Cancelled: {event_id} will not be published.")
