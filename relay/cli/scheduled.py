"""``outbox scheduled``: the events that wait for their time."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from outbox._app.console import (
    AsJson,
    DatabaseUrl,
    failing_clearly,
    print_json,
    printable,
    require_reason,
    table_console,
)
from relay.config import load

app = typer.Typer(no_args_is_help=True, help="Events that are not to be published before a time.")


@app.command("list")
@failing_clearly
def list_events(
    aggregate_type: Annotated[str | None, typer.Option("--type", help="Only those of this aggregate type.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="So many events.")] = 50,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List scheduled events, those that are due next first."""
    from rich.table import Table
    from rich.text import Text

    from relay.database import Connector
    from relay.operations.scheduled import list_scheduled
    from relay.pipeline.trace import time_text

    settings = load(database_url=database_url)
    with Connector(settings.require_database(), "outbox scheduled")() as connection:
        rows = list_scheduled(connection, settings.db_schema, aggregate_type, limit)
    if as_json:
        print_json({"scheduled": [dict(row) for row in rows]})
        return
    if not rows:
        typer.echo("nothing is scheduled")
        return
    table = Table("not before", "event", "aggregate", "type", box=None, pad_edge=False)
    for row in rows:
        cells = (
            time_text(row["not_before"]),
            str(row["event_id"]),
            f"{row['aggregate_type']}/{row['aggregate_id']}",
            row["event_type"],
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    table_console().print(table)


@app.command()
@failing_clearly
def cancel(
    event_id: Annotated[UUID, typer.Argument(help="The event's id.")],
    reason: Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the audit.")] = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Delete a scheduled event, so that it is never published. The audit keeps all of it."""
    from relay.database import Connector
    from relay.operations import scheduled

    require_reason(reason, "why it is cancelled; it is kept in the audit")
    settings = load(database_url=database_url)
    with Connector(settings.require_database(), "outbox scheduled")() as connection:
        scheduled.cancel(connection, settings.db_schema, event_id, reason or "")
    typer.echo(f"Cancelled: {event_id} will not be published.")
