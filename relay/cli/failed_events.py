"""`outbox dead-letters --side relay`: what its commands do to events that could not be published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox._app.console import print_json, require_choice, require_reason, say
from outbox.errors import NotFound
from relay.config import load

if TYPE_CHECKING:
    from relay.operations.dead_letters import DeadLetters, Selection


def list_failures(database_url: str | None, aggregate_type: str | None, limit: int, *, as_json: bool) -> None:
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


def show(event_id: UUID, database_url: str | None, *, as_json: bool) -> None:
    """Show one failed event with its payload: JSON on several lines, or on one with --json."""
    import orjson

    with _dead_letters(database_url) as letters:
        failure = letters.show(str(event_id))
    shown = _plain(failure)
    if shown.get("payload") is not None:
        # Unparsed: numbers that Python would round stay exact.
        shown["payload"] = orjson.Fragment(shown["payload"])
    print_json(shown, indented=not as_json)


def retry(
    event_ids: Sequence[UUID] | None,
    database_url: str | None,
    aggregate_type: str | None,
    *,
    everything: bool,
    dry_run: bool,
    as_json: bool,
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
        say(f"{len(ids)} events will be retried")
    _all_found(event_ids, ids, done.locked)


def discard(
    reason: str,
    event_ids: Sequence[UUID] | None,
    database_url: str | None,
    aggregate_type: str | None,
    *,
    everything: bool,
    drop_payload: bool,
    dry_run: bool,
    as_json: bool,
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


@contextmanager
def _dead_letters(database_url: str | None) -> Iterator[DeadLetters]:
    from relay.database import Connector
    from relay.operations.dead_letters import DeadLetters

    settings = load(database_url=database_url)
    with Connector(settings.require_database(), "outbox dead-letters")() as connection:
        yield DeadLetters(connection, settings.db_schema)


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
    names = {"dead": "dead letters", "retrying": "retrying events", "without_event": "rows whose event was deleted"}
    say(f"would be {done_word}: " + ", ".join(f"{count:,} {names[name]}" for name, count in counts.items()))


def _all_found(asked: Sequence[UUID] | None, found: Sequence[str], locked: Sequence[str]) -> None:
    from relay.operations import dead_letters

    if locked:
        raise dead_letters.locked(locked)
    missing = {str(event_id) for event_id in asked or ()} - set(found)
    if missing:
        raise NotFound(
            f"not among the failed events, or due within seconds: {', '.join(sorted(missing))}; one whose event was "
            "deleted can only be discarded"
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for JSON, with bytes as hexadecimal digits."""
    return {
        name: bytes(value).hex() if isinstance(value, bytes | memoryview) else value for name, value in values.items()
    }
