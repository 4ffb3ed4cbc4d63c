"""``outbox recover``: after a restore, compare the outbox with its topics, and let the lanes continue."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, require_reason, say
from outbox._app.text import as_utc, time_text
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError
from relay.cli.relay import SHOWN, SUPERSEDED, reconciler_settings
from relay.config import shared_source_note
from relay.operations.dead_letters import locked as error_of_locked

if TYPE_CHECKING:
    from relay.operations.recover import Comparison, EventPlace

_EVENTS: Final = ("lost", "unsure", "missing", "overtaken")


def recover(
    since: Annotated[dt.datetime, typer.Option(help="The point of the restore; UTC unless it has a zone.")],
    until: Annotated[dt.datetime | None, typer.Option(help="When writers or relays restarted (default: now).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only compare. Exit status 1 if something differs.")
    ] = False,
    resend: Annotated[
        bool, typer.Option("--resend", help="Put what Kafka has lost back from the archive, before what waits.")
    ] = False,
    topic: Annotated[
        list[str] | None, typer.Option(help="With --resend: only what was in this topic; repeatable.")
    ] = None,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """After a restore of Postgres or a loss in Kafka: show what one has and the other lacks, and let lanes continue.

    Settles what Kafka already has, so that it is not published twice. Run it before relays start, with a direct
    connection to Postgres. --json lists every event.
    """
    from relay.operations.recover import Recovered, Recovery

    why = require_reason(reason, "what was restored, and to which point", needed=not dry_run)
    if topic and not resend:
        raise ConfigurationError("--topic limits --resend, which is not given")
    start, end = as_utc("--since", since), as_utc("--until", until) or dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    settings = reconciler_settings(database_url)
    with closing(Recovery(settings)) as recovery:
        found = recovery.compare(start, end)
        done = (
            Recovered(found.found, 0, [])
            if dry_run
            else recovery.recover(found, why, resend=resend, topics=topic or ())
        )
    if as_json:
        print_json(
            {
                "records": found.records,
                **{name: [event._asdict() for event in getattr(found, name)] for name in _EVENTS},
                "archived_from": found.archived_from,
                "expired": found.expired,
                "settled": {str(lane): rows for lane, rows in done.settled.items()},
                "changed": found.changed,
                "superseded": found.superseded,
                "scheduled": [row.event_id for row in found.scheduled],
                "dead_letters": [row.event_id for row in found.dead],
                "locked": done.locked,
                "lanes": found.lanes,
                "dry_run": dry_run,
                "resend": resend,
                "resent": done.resent,
            }
        )
    else:
        _print(found, sum(map(len, done.settled.values())), dry_run=dry_run)
        if (shared := shared_source_note(settings)) and (found.lost or found.unsure):
            say(f"Note: {shared}")
        if done.resent:
            say(f"{counted(done.resent, 'event', 'was')} put back into the outbox, to be published again")
    if done.locked:
        raise error_of_locked(done.locked)
    if dry_run and found.differs:
        raise typer.Exit(1)


def _print(found: Comparison, settled: int, *, dry_run: bool) -> None:
    say(f"{counted(found.records, 'record')} read, published since {time_text(found.since)} and some before")
    if found.others:
        say(f"  {found.others} of them of another ce_source than this outbox's: Kafka has not lost them, and no more")
    if found.relays:
        running = counted(found.relays, "relay")
        say(f"  {running} running: without an archive, give --until, the time when the first one started")
    say(f"Kafka has, and Postgres has lost: {_events(found.lost)}")
    _print_unsure(found)
    say(f"Postgres has, and Kafka has lost: {_events(found.missing)}")
    if found.overtaken:
        say(f"  later events of their keys are on Kafka; see `outbox replay`: {_events(found.overtaken)}")
    for text, count in {
        "archived events are no longer on Kafka: retention or compaction has deleted them, nothing is lost": (
            found.expired
        ),
        "published already; settled, not published again": settled,
        "scheduled, and published already; deleted": len(found.scheduled),
        "dead letters that were retried and published; discarded": len(found.dead),
        f"of these {SUPERSEDED}": len(found.superseded),
        "events with the id of another event on Kafka; published, but consumers may drop them": len(found.changed),
    }.items():
        if count:
            say(f"{count} {text}")
    for event_id in (*found.superseded[:SHOWN], *found.changed[:SHOWN]):
        say(f"  {event_id}")
    for state in found.broken:
        say(f"lane {state.lane}: {state.problem}")
    if dry_run and found.differs:
        say("Nothing was changed. To let the lanes go on: the same without --dry-run, with --reason '…'")


def _print_unsure(found: Comparison) -> None:
    if found.unsure and found.archived_from is None:
        say(f"  and perhaps, from within a minute of the point: {_events(found.unsure)}")
        say("  only an archive shows whether these were settled before it")
    elif found.unsure:
        say(f"  and perhaps, from before the archive begins: {_events(found.unsure)}")
        say(f"  it begins at {time_text(found.archived_from)}, and does not show whether these were settled before")


def _events(events: Sequence[EventPlace]) -> str:
    """Return the number of events and keys, and the first events of each topic."""
    keys = len({(event.topic, event.aggregate_id) for event in events})
    lines = [f"{counted(len(events), 'event')} of {counted(keys, 'key')}" if events else "nothing"]
    for topic, count in sorted(Counter(event.topic for event in events).items()):
        lines.append(f"  {topic or 'a topic that is not known'}: {count}")
        first = [event for event in events if event.topic == topic][:SHOWN]
        lines += [f"    {event.event_id} of {event.aggregate_id}, {time_text(event.at)}" for event in first]
    return "\n".join(lines)
