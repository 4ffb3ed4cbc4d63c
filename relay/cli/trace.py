"""``outbox trace``: follow one event from its row in the outbox to what each consumer group did with it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
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
from outbox.errors import ConfigurationError, OutboxError
from relay.config import Settings, load

if TYPE_CHECKING:
    from relay.operations.trace import Event, Place
    from spark_jobs.admin.trace import GroupTrace


@failing_clearly
def trace(
    event_id: Annotated[str | None, typer.Argument(metavar="EVENT_ID", help="The event's id.")] = None,
    aggregate: Annotated[
        str | None, typer.Option("--aggregate", help="TYPE/ID: list the newest events of this key instead.")
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Look through this topic for it; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long to look through topics.")] = 10.0,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="With --aggregate: so many events.")] = 20,
    sink_url: Annotated[
        str | None, typer.Option("--sink-url", help="The consumers' database; without it, the same one.")
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show where an event is: written, waiting, published, applied by each group or dead, and the time between.

    An event that left no row (no archive, or transport="message") is looked for in its topic, from the time in its id
    on. Exit status 1 when nothing is known of it.
    """
    if (event_id is None) == (aggregate is None):
        raise ConfigurationError("say which: an event's id, or --aggregate TYPE/ID")
    settings = load(database_url=database_url)
    if aggregate is not None:
        _list(settings, aggregate, limit, as_json=as_json)
        return
    assert event_id is not None
    try:
        wanted = UUID(event_id)
    except ValueError:
        raise ConfigurationError(f"{event_id!r} is not an event's id: that is a UUID") from None
    found = _find(settings, wanted, topic or [], seconds, sink_url)
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

    table = Table("event", "type", "written", "state", box=None, pad_edge=False)
    for row in rows:
        cells = (str(row["event_id"]), printable(row["event_type"]), _time(row["created_at"]), row["state"])
        table.add_row(*map(Text, cells))
    if rows:
        table_console().print(table)
    else:
        typer.echo("no events: those that are published leave no row where relay.archive_days is 0")


class Found:
    """Everything that is known about an event.

    whole   whether all topics were read to their ends, if a search was needed.
    unseen  the errors of what could not be read.
    """

    def __init__(self, event: Event) -> None:
        self.event = event
        self.places: Sequence[Place] = [] if event.place is None else [event.place]
        self.groups: Sequence[GroupTrace] = ()
        self.whole = True
        self.searched = False
        self.unseen: list[str] = []

    @property
    def known(self) -> bool:
        """Return whether there is any trace of the event."""
        return self.event.state != "unknown" or bool(self.places) or any(_met(group) for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """Return the same data for ``--json``."""
        event = {name: value for name, value in asdict(self.event).items() if name != "place"}
        return {
            "event": event,
            "places": [asdict(place) for place in self.places],
            "groups": [asdict(group) for group in self.groups],
            "searched_to_the_end": self.whole,
            "unseen": self.unseen,
        }


def _met(group: GroupTrace) -> bool:
    return group.state in {"applied", "dead"} or bool(group.external)


def _find(settings: Settings, event_id: UUID, named: Sequence[str], seconds: float, sink_url: str | None) -> Found:
    from relay.database import Connector
    from relay.operations.trace import find
    from spark_jobs.admin import trace as consumers
    from spark_jobs.admin.status import has_tables
    from spark_jobs.postgres.errors import connect

    with Connector(settings.require_database(), "outbox trace")() as connection:
        found = Found(find(connection, settings.db_schema, event_id))
    event = found.event
    topics = list(named) or _topics(settings, event)
    try:
        with connect(sink_url or settings.require_database(), "outbox trace") as connection:
            schema = settings.consumer_schema
            if sink_url is None and not has_tables(connection, schema):
                _search(found, settings, topics, seconds, from_the_beginning=bool(named))
                return found
            # The topic of an event without a row is unknown, so the topics that groups read are searched.
            topics = topics or (consumers.topics(connection, schema) if event.aggregate_type is None else [])
            _search(found, settings, topics, seconds, from_the_beginning=bool(named))
            places = [(place.topic, place.partition, place.offset) for place in found.places]
            found.groups = consumers.find(connection, schema, event_id, places, topics)
    except OutboxError as error:
        found.unseen.append(str(error))
        if not found.searched:
            _search(found, settings, topics, seconds, from_the_beginning=bool(named))
    return found


def _search(
    found: Found, settings: Settings, topics: Sequence[str], seconds: float, *, from_the_beginning: bool
) -> None:
    """Look for the event on Kafka where no table says where it is.

    from_the_beginning   also of topics whose messages are of any time, as nothing says when the event was written.
    """
    from outbox._app.settings import client_options
    from relay.operations.trace import search, written_at

    found.searched = True
    event = found.event
    since = event.created_at or written_at(event.event_id)
    if found.places or event.state not in {"published", "unknown"}:
        return
    if since is None and from_the_beginning:
        since = dt.datetime.fromtimestamp(0, dt.UTC)
    if not topics or since is None:
        found.whole = False
        why = "there is no time in its id" if topics else "nothing says which topic it belongs to"
        found.unseen.append(f"no topic was looked through, as {why}: name one with --topic")
        return
    try:
        found.places, found.whole = search(client_options(settings), topics, event.event_id, since, seconds)
    except OutboxError as error:
        found.whole = False
        found.unseen.append(str(error))


def _topics(settings: Settings, event: Event) -> list[str]:
    """Return the event's topic; for an event without a row, all topics that the routes name."""
    from relay.kafka.routing import NoRoute
    from relay.parts import build_router

    router = build_router(settings)
    if event.aggregate_type is None:
        return sorted({route.topic for route in (settings.routes or {}).values()})
    try:
        return [router.route(event.aggregate_type).topic]
    except NoRoute:
        return []


def show(found: Found) -> None:
    """Print the path of an event as a tree."""
    from rich.text import Text
    from rich.tree import Tree

    event = found.event
    title = f"event {event.event_id}"
    if event.event_type is not None:
        title += f"  {event.event_type} of {event.aggregate_type} {event.aggregate_id}"
    tree = Tree(Text(printable(title), style="bold"))
    for line in [*_relay_side(found), *_consumers_side(found), *(f"! {text}" for text in found.unseen)]:
        tree.add(Text(printable(line)))
    table_console().print(tree)


def _relay_side(found: Found) -> list[str]:
    event = found.event
    lines = []
    if event.created_at is not None:
        lines.append(f"written {_time(event.created_at)}, lane {event.lane}")
    match event.state:
        case "waiting":
            before = "10,000 or more" if event.before == 10_000 else f"{event.before:,}"
            lines.append(f"waits to be published: {before} rows before it, {_holder(event)}")
        case "refused":
            again = "by itself no more" if event.next_attempt_at is None else f"again at {_time(event.next_attempt_at)}"
            lines.append(f"refused by Kafka {event.attempts} times, {again}: {event.last_error}")
        case "dead":
            lines.append(
                f"a dead letter since {_time(event.dead_at)}, after {event.attempts} attempts: {event.last_error}"
            )
        case "published":
            lines.append(f"published {_time(event.published_at)}{_later(event.created_at, event.published_at)}")
    for place in found.places:
        at = "" if place.at is None else f", {_time(place.at)}{_later(event.created_at, place.at)}"
        lines.append(f"on Kafka: {place.topic}-{place.partition} offset {place.offset}{at}")
    if event.state == "unknown" and not found.places:
        lines.append(
            "the outbox has no row of it"
            + ("" if found.whole or found.unseen else "; the topics were not read to their ends: --seconds")
        )
    return lines


def _holder(event: Event) -> str:
    return "and no relay holds the lane" if event.owner is None else f"relay {event.owner} holds the lane"


def _consumers_side(found: Found) -> list[str]:
    event = found.event
    published = event.published_at or next((place.at for place in found.places if place.at), None)
    lines = []
    for group in found.groups:
        if group.state == "unknown" and event.state == "unknown":
            continue
        match group.state:
            case "applied":
                text = f"applied {_time(group.applied_at)}{_later(published, group.applied_at)}"
            case "dead":
                assert group.letter is not None
                letter = group.letter
                text = (
                    f"dead letter {letter.id} since {_time(letter.died_at)}, {letter.reason}, {letter.state}, "
                    f"{letter.attempts} attempts: {letter.error}"
                )
            case "waiting":
                text = "waits" if group.behind is None else f"waits, {group.behind:,} offsets before it"
            case "passed":
                text = (
                    "is beyond it, and remembers no id of it: a transform or `types` left it out, or ids are not kept"
                )
            case _:
                text = "not seen yet"
        lines.append(f"group {group.group}: {text}")
        lines += [
            f"group {group.group}: external {one.name}: {one.state}, {one.attempts} attempts"
            + (f": {one.last_error}" if one.last_error else "")
            for one in group.external
        ]
    return lines


def _time(time: dt.datetime | None) -> str:
    return "?" if time is None else f"{time.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S}.{time.microsecond // 1000:03} UTC"


def _later(before: dt.datetime | None, after: dt.datetime | None) -> str:
    if before is None or after is None:
        return ""
    return f", {(after - before).total_seconds() * 1000:,.0f} ms later"
