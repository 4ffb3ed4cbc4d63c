"""``outbox failures …`` and ``outbox replay``: operator actions on failed and on published events."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from outbox._app.console import AsJson, DatabaseUrl, failing_clearly, print_json, require_choice, require_reason, say
from outbox.errors import ConfigurationError
from relay.config import load

if TYPE_CHECKING:
    import psycopg

    from relay.operations.dead_letters import DeadLetters, Selection

app = typer.Typer(help="Events that could not be published: list, retry, discard.", no_args_is_help=True)

_Type = Annotated[str | None, typer.Option("--aggregate-type", help="Only of this aggregate type.")]
_Ids = Annotated[list[UUID] | None, typer.Argument(help="Event ids.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count.")]
_All = Annotated[bool, typer.Option("--all", help="All of them (of --aggregate-type, if given).")]


@app.command("list")
@failing_clearly
def list_failures(
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List events that wait for another attempt, and dead letters; oldest failure first."""
    from relay.operations.dead_letters import Selection

    with _dead_letters(database_url) as letters:
        failures = letters.list(Selection(aggregate_type=aggregate_type), limit)
    if as_json:
        print_json({"failures": [_plain(failure) for failure in failures]})
        return
    for failure in failures:
        event_type = failure["event_type"] or "?"
        say(
            f"{failure['event_id']}  {failure['aggregate_type']}/{failure['aggregate_id']}  {event_type}  "
            f"{failure['state']}, {failure['attempts']} attempts: {failure['last_error']}"
        )
    if not failures:
        say("no failed events")


@app.command()
@failing_clearly
def show(
    event_id: Annotated[UUID, typer.Argument(help="Event id.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one failed event with its payload: JSON on several lines, or on one with --json."""
    import orjson

    with _dead_letters(database_url) as letters:
        failure = letters.show(str(event_id))
    shown = _plain(failure)
    if shown.get("payload") is not None:
        # Unparsed: numbers that Python would round stay exact.
        shown["payload"] = orjson.Fragment(shown["payload"])
    print_json(shown, indented=not as_json)


@app.command()
@failing_clearly
def retry(
    event_ids: _Ids = None,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    everything: _All = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Retry failed events now. Dead letters return to the outbox, before the later events of their key."""
    selection = _selection(event_ids, aggregate_type, everything)
    with _dead_letters(database_url) as letters:
        if dry_run:
            _print_counts(letters.count(selection, discard=False), "retried", as_json)
            return
        done = letters.retry(selection, progress=_progress("retried", letters, selection, discard=False))
    ids = list(dict.fromkeys(done))
    if as_json:
        print_json({"retried": ids, "locked": done.locked})
    else:
        say(f"{len(ids)} events will be tried again")
    _all_found(event_ids, ids, done.locked)


@app.command()
@failing_clearly
def discard(
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")],
    event_ids: _Ids = None,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    everything: _All = False,
    drop_payload: Annotated[
        bool, typer.Option("--drop-payload", help="Keep no payload and no headers in the audit.")
    ] = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete failed events for good. The later events of their keys go on. The audit keeps the deleted events."""
    require_reason(reason, "why the event may be lost")
    selection = _selection(event_ids, aggregate_type, everything)
    with _dead_letters(database_url) as letters:
        if dry_run:
            _print_counts(letters.count(selection, discard=True), "discarded", as_json)
            return
        progress = _progress("discarded", letters, selection, discard=True)
        gone = letters.discard(selection, reason, keep_payload=not drop_payload, progress=progress)
    ids = [event["event_id"] for event in gone]
    if as_json:
        print_json({"discarded": ids, "locked": gone.locked})
    else:
        say(f"{len(ids)} events were discarded")
    _all_found(event_ids, ids, gone.locked)


@failing_clearly
def replay(
    since: Annotated[dt.datetime | None, typer.Option(help="Published at or after; UTC unless it has a zone.")] = None,
    until: Annotated[dt.datetime | None, typer.Option(help="Published before.")] = None,
    aggregate: Annotated[str | None, typer.Option(help="TYPE or TYPE/ID.")] = None,
    event_id: Annotated[list[UUID] | None, typer.Option(help="May be repeated.")] = None,
    topic: Annotated[str | None, typer.Option(help="Published to this topic.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole archive.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Annotated[str | None, typer.Option(help="Why; it is kept in the audit.")] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Send archived events again: same event ids, marked by the header outbox-replay. Counts them and asks first."""
    from relay.operations.replay import Replay, ReplaySelection

    kind, _, key = (aggregate or "").partition("/")
    chosen = ReplaySelection(
        _utc(since), _utc(until), kind or None, key or None, [str(one) for one in event_id or ()] or None, topic
    )
    if chosen == ReplaySelection() and not everything:
        raise ConfigurationError(
            "say what to replay: --since, --until, --aggregate, --event-id, --topic, or --all for the whole archive"
        )
    with _connection(database_url) as (connection, schema):
        archive = Replay(connection, schema)
        found = archive.count(chosen)
        if not as_json and not (found["events"] or found["too_large"]):
            say("no archived events match")
        elif not as_json:
            say(
                f"{found['events']} events of {found['keys']} keys, published {found['first']} to {found['last']}, "
                f"to {', '.join(filter(None, found['topics'] or [])) or 'no known topic'}"
            )
            if found["too_large"]:
                say(f"{found['too_large']} more are too large to be marked and will not be sent")
        if dry_run or not found["events"]:
            sent = 0
        else:
            if not yes and (not sys.stdin.isatty() or not typer.confirm("Send them once more?")):
                raise ConfigurationError("nothing was sent: answer yes, or give --yes")
            sent = archive.send(chosen, reason)
    if as_json:
        print_json(_plain(found) | {"dry_run": dry_run, "sent": sent})
    elif sent:
        say(f"{sent} events are in the outbox again")


def _utc(time: dt.datetime | None) -> dt.datetime | None:
    return time.replace(tzinfo=dt.UTC) if time is not None and time.tzinfo is None else time


@contextmanager
def _connection(database_url: str | None) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    from relay.database import Connector

    settings = load(database_url=database_url)
    with Connector(settings.require_database(), "outbox failures")() as connection:
        yield connection, settings.db_schema


@contextmanager
def _dead_letters(database_url: str | None) -> Iterator[DeadLetters]:
    from relay.operations.dead_letters import DeadLetters

    with _connection(database_url) as (connection, schema):
        yield DeadLetters(connection, schema)


def _selection(event_ids: Sequence[UUID] | None, aggregate_type: str | None, everything: bool) -> Selection:
    from relay.operations.dead_letters import Selection

    require_choice(event_ids, everything, "event ids", "--aggregate-type for those of one type")
    return Selection([str(event_id) for event_id in event_ids] if event_ids else None, aggregate_type)


def _progress(done_word: str, letters: DeadLetters, selection: Selection, *, discard: bool) -> Callable[[int], None]:
    """Return a function that prints the progress of a long run to stderr, after each batch but the last."""
    total = sum(letters.count(selection, discard=discard).values())

    def show(done: int) -> None:
        if done < total:
            say(f"{done:,} of {total:,} {done_word}", err=True)

    return show


def _print_counts(counts: Mapping[str, int], done_word: str, as_json: bool) -> None:
    if as_json:
        print_json({"dry_run": True, **counts})
        return
    names = {"dead": "dead letters", "waiting": "waiting events", "without_event": "rows whose event was deleted"}
    say(f"would be {done_word}: " + ", ".join(f"{count:,} {names[name]}" for name, count in counts.items()))


def _all_found(asked: Sequence[UUID] | None, found: Sequence[str], locked: Sequence[str]) -> None:
    from relay.operations.dead_letters import FailuresLocked, NoSuchFailure

    if locked:
        raise FailuresLocked(locked)
    missing = {str(event_id) for event_id in asked or ()} - set(found)
    if missing:
        raise NoSuchFailure(
            f"not among the failed events, or due within seconds: {', '.join(sorted(missing))}; one whose event was "
            "deleted can only be discarded"
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for JSON, with bytes as hexadecimal digits."""
    return {
        name: bytes(value).hex() if isinstance(value, bytes | memoryview) else value for name, value in values.items()
    }
