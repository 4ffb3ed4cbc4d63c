"""``outbox trace``: follow one event from its row in the outbox to what each consumer group did with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outbox._app.console import (
    AsJson,
    DatabaseUrl,
    failing_clearly,
    print_json,
    printable,
    table_console,
)
from outbox.errors import ConfigurationError
from relay.cli.status import SinkOption
from relay.config import Settings, load

if TYPE_CHECKING:
    from relay.pipeline.trace import Found


@failing_clearly
def trace(
    event_id: Annotated[str | None, typer.Argument(metavar="EVENT_ID", help="The event's id.")] = None,
    aggregate: Annotated[
        str | None, typer.Option("--aggregate", help="TYPE/ID: list the newest events of this key instead.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Look through this topic for it, and for repeats of it; repeatable."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long to look through topics.")] = 10.0,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="With --aggregate: so many events.")] = 20,
    sink_url: SinkOption = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show where an event is: written, waiting, published, applied by each group or dead, and the time between.

    An event that left no row (no archive) is looked for in its topic, from the time in its id on. Exit status 1 when
    nothing is known of it.
    """
    if (event_id is None) == (aggregate is None):
        raise ConfigurationError("say which: an event's id, or --aggregate TYPE/ID")
    from relay.pipeline.trace import find_event

    settings = load(database_url=database_url)
    if aggregate is not None:
        _list(settings, aggregate, limit, as_json=as_json)
        return
    assert event_id is not None
    try:
        wanted = UUID(event_id)
    except ValueError:
        raise ConfigurationError(f"{event_id!r} is not an event's id: that is a UUID") from None
    found = find_event(settings, wanted, topic or [], seconds, sink_url)
    if as_json:
        print_json(found.as_dict())
    else:
        show(found)
    if not found.known:
        raise typer.Exit(1)


def _list(settings: Settings, aggregate: str, limit: int, *, as_json: bool) -> None:
    from relay.database import Connector
    from relay.operations.trace import of_key

    kind, slash, key = aggregate.partition("/")
    if not (kind and slash and key):
        raise ConfigurationError(f"--aggregate {aggregate}: say TYPE/ID, as in Order/order-17")
    with Connector(settings.require_database(), "outbox trace")() as connection:
        rows = of_key(connection, settings.db_schema, kind, key, limit)
    if as_json:
        print_json({"events": rows})
        return
    from rich.table import Table
    from rich.text import Text

    from relay.pipeline.trace import time_text

    table = Table("event", "type", "written", "state", box=None, pad_edge=False)
    for row in rows:
        cells = (str(row["event_id"]), printable(row["event_type"]), time_text(row["created_at"]), row["state"])
        table.add_row(*map(Text, cells))
    if rows:
        table_console().print(table)
    else:
        typer.echo("no events: those that are published leave no row where relay.archive_days is 0")


def show(found: Found) -> None:
    """Print the path of an event as a tree."""
    from rich.text import Text
    from rich.tree import Tree

    event = found.event
    title = f"event {event.event_id}"
    if event.event_type is not None:
        title += f"  {event.event_type} of {event.aggregate_type} {event.aggregate_id}"
    tree = Tree(Text(printable(title), style="bold"))
    for line in [*(step.line() for step in found.steps()), *(f"! {text}" for text in found.unseen)]:
        tree.add(Text(printable(line)))
    table_console().print(tree)
