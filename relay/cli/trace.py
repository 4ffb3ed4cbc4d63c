"""``outbox trace``: follow one event from its row in the outbox to what each consumer group did with it."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outbox._app.console import AsJson, DatabaseUrl, print_json, printable, say_if_more, table_console, text_table
from outbox._app.text import as_utc, time_text
from outbox.errors import ConfigurationError
from relay.cli.session import SinkOption, load_with_sink, outbox_session

if TYPE_CHECKING:
    from relay.pipeline.trace import Found


def trace(
    event_id: Annotated[UUID | None, typer.Argument(metavar="EVENT_ID", help="The event's id.")] = None,
    aggregate: Annotated[
        str | None, typer.Option("--aggregate", help="TYPE/ID: list the newest events of this key.")
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Search this topic for it and its repeats; repeatable.")
    ] = None,
    since: Annotated[
        dt.datetime | None,
        typer.Option(help="Where to begin in topics (default: the time in the id); UTC unless it has a zone."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long to search topics.")] = 10.0,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="With --aggregate: show at most this many.")] = 20,
    sink_url: SinkOption = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show an event's path from its writing to each consumer group, with times.

    Without an archive, searches the topics of relays with these settings. Exit status 1 if the event is unknown.
    """
    if (event_id is None) == (aggregate is None):
        raise ConfigurationError("give an event's id, or --aggregate TYPE/ID")
    if aggregate is not None:
        _list(database_url, aggregate, limit, as_json=as_json)
        return
    assert event_id is not None
    from relay.pipeline.trace import find_event

    begin = as_utc("--since", since)
    found = find_event(load_with_sink(database_url, sink_url), event_id, topic or [], seconds, begin)
    if as_json:
        print_json(found.as_dict())
    else:
        show(found)
    if not found.known:
        raise typer.Exit(1)


def _list(database_url: str | None, aggregate: str, limit: int, *, as_json: bool) -> None:
    from relay.operations.trace import of_key

    kind, slash, key = aggregate.partition("/")
    if not (kind and slash and key):
        raise ConfigurationError(f"--aggregate {aggregate}: must be TYPE/ID, such as Order/order-17")
    with outbox_session(database_url, "trace") as (connection, settings):
        found = of_key(connection, settings.db_schema, kind, key, limit + 1)
    rows = found[:limit]
    if as_json:
        print_json({"events": rows})
        return
    if not rows:
        typer.echo("no events: published events leave no row if relay.archive_days is 0")
        return
    cells = ((str(row["event_id"]), row["event_type"], time_text(row["created_at"]), row["state"]) for row in rows)
    table_console().print(text_table(("event", "type", "written", "state"), cells))
    say_if_more(len(found), limit)


def show(found: Found) -> None:
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
