"""``outbox dead-letters …``: list, retry and discard what could not be published (relay) or applied (consumer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

import orjson
import typer

from outbox._app.console import (
    AsJson,
    DatabaseUrl,
    Reason,
    print_json,
    require_choice,
    require_reason,
    say,
    say_if_more,
)
from outbox._app.settings import load
from outbox._app.text import event_id_of
from outbox._clients.counting import counted
from outbox.consumer.admin import dead_letters as messages
from outbox.consumer.postgres_errors import connect
from outbox.errors import ConfigurationError, NotFound
from relay.cli.session import outbox_session
from relay.operations import dead_letters as events

app = typer.Typer(help="Events and messages that could not be published or applied.", no_args_is_help=True)


class Side(StrEnum):
    RELAY = "relay"
    CONSUMER = "consumer"


_Side = Annotated[Side, typer.Option("--side", help="Events not published (relay), or messages not applied.")]
_Ids = Annotated[list[str] | None, typer.Argument(help="Event ids (relay) or numbers (consumer).")]
_Type = Annotated[str | None, typer.Option("--aggregate-type", help="Relay: only of this aggregate type.")]
_Group = Annotated[str | None, typer.Option("--group", help="Only this consumer group.")]
_Topic = Annotated[str | None, typer.Option("--topic", help="Consumer: only of this topic.")]
_Cause = Annotated[
    str | None, typer.Option("--cause", help="Consumer: undecodable, no-id, too-old, failed, rejected or behind.")
]
_All = Annotated[bool, typer.Option("--all", help="All that match the filters.")]
_Copies = Annotated[bool, typer.Option("--copies", help="Relay: of these, only copies for dead-letter topics.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Relay: only count.")]


@app.command("list")
def list_dead_letters(
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters and retrying events, oldest first, without their contents."""
    asked = _Asked(database_url, aggregate_type, group, topic, cause, as_json=as_json)
    _of(side, asked).list(limit)


@app.command()
def show(
    dead_letter: Annotated[str, typer.Argument(metavar="ID", help="An event id (relay) or a number (consumer).")],
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one with its contents, as indented JSON; with --json on one line."""
    _of(side, _Asked(database_url, as_json=as_json)).show(dead_letter)


@app.command()
def retry(
    ids: _Ids = None,
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    everything: _All = False,
    copies: _Copies = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Retry them: publish the events now, or apply the messages in their groups' next round."""
    asked = _Asked(database_url, aggregate_type, group, topic, cause, ids, everything, dry_run, as_json, copies)
    _of(side, asked).retry()


@app.command()
def discard(
    ids: _Ids = None,
    reason: Reason = None,
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    everything: _All = False,
    copies: _Copies = False,
    drop_payload: Annotated[bool, typer.Option("--drop-payload", help="Keep no contents in the audit.")] = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Discard them for good; the audit keeps them. Events and messages behind them continue."""
    why = require_reason(reason, "why they may be lost", needed=not dry_run)
    asked = _Asked(database_url, aggregate_type, group, topic, cause, ids, everything, dry_run, as_json, copies)
    _of(side, asked).discard(why, keep_payload=not drop_payload)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a command was given."""

    database_url: str | None
    aggregate_type: str | None = None
    group: str | None = None
    topic: str | None = None
    cause: str | None = None
    ids: Sequence[str] | None = None
    everything: bool = False
    dry_run: bool = False
    as_json: bool = False
    copies: bool = False


def _of(side: Side, asked: _Asked) -> _Events | _Messages:
    """Return the dead letters of one side. Raises ConfigurationError for an option of the other side."""
    of_relay = {"--aggregate-type": asked.aggregate_type, "--dry-run": asked.dry_run, "--copies": asked.copies}
    of_consumer = {"--group": asked.group, "--topic": asked.topic, "--cause": asked.cause}
    for name, value in (of_consumer if side is Side.RELAY else of_relay).items():
        if value:
            other = Side.CONSUMER if side is Side.RELAY else Side.RELAY
            raise ConfigurationError(f"{name} has no meaning with --side {side}; give --side {other}, or leave it out")
    return _Events(asked) if side is Side.RELAY else _Messages(asked)


class _Events:
    """Events that could not be published."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked

    def list(self, limit: int) -> None:
        with self._opened() as letters:
            found = letters.list(events.Selection(aggregate_type=self._asked.aggregate_type), limit + 1)
        failures = found[:limit]
        if self._asked.as_json:
            print_json({"failures": [_plain(failure) for failure in failures]})
            return
        for failure in failures:
            say(
                f"{failure['event_id']}  {failure['aggregate_type']}/{failure['aggregate_id']}  "
                f"{failure['event_type'] or '?'}  {failure['state']}, {counted(failure['attempts'], 'attempt')}: "
                f"{failure['last_error']}"
            )
        say_if_more(len(found), limit)
        if not failures:
            say("no failed events")

    def show(self, event_id: str) -> None:
        with self._opened() as letters:
            shown = _plain(letters.show(_event_id(event_id)))
        if shown.get("payload") is not None:
            # Unparsed: numbers that Python would round stay exact.
            shown["payload"] = orjson.Fragment(shown["payload"])
        print_json(shown, indented=not self._asked.as_json)

    def retry(self) -> None:
        selection = self._selection()
        with self._opened() as letters:
            progress = self._progress(letters, selection, "retried", discard=False)
            if progress is None:
                return
            done = letters.retry(selection, progress=progress)
        self._print_done("retried", list(dict.fromkeys(done)), done.locked)

    def discard(self, reason: str, *, keep_payload: bool) -> None:
        selection = self._selection()
        with self._opened() as letters:
            progress = self._progress(letters, selection, "discarded", discard=True)
            if progress is None:
                return
            done = letters.discard(selection, reason, keep_payload=keep_payload, progress=progress)
        self._print_done("discarded", [event["event_id"] for event in done], done.locked)

    @contextmanager
    def _opened(self) -> Iterator[events.DeadLetters]:
        with outbox_session(self._asked.database_url, "dead-letters") as (connection, settings):
            yield events.DeadLetters(connection, settings.db_schema)

    def _selection(self) -> events.Selection:
        found = [_event_id(one) for one in self._asked.ids or ()]
        require_choice(found, self._asked.everything, "event ids", "--aggregate-type for those of one type")
        return events.Selection(found or None, self._asked.aggregate_type, copies=self._asked.copies)

    def _progress(
        self, letters: events.DeadLetters, selection: events.Selection, done_word: str, *, discard: bool
    ) -> Callable[[int], None] | None:
        """Return a function that prints the progress of a long run to stderr, after each batch but the last.

        With --dry-run it prints only what would be done, and returns None.
        """
        counts = letters.count(selection, discard=discard)
        if self._asked.dry_run:
            if self._asked.as_json:
                print_json({"dry_run": True, **counts})
            else:
                named = (counted(count, events.COUNTS[name]) for name, count in counts.items())
                say(f"would be {done_word}: {', '.join(named)}")
            return None
        total = sum(counts.values())

        def show(done: int) -> None:
            if done < total:
                say(f"{done:,} of {total:,} {done_word}", err=True)

        return show

    def _print_done(self, key: str, ids: Sequence[str], locked: Sequence[str]) -> None:
        """Print what was done. Raises OperationRefused for locked events, and NotFound for missing ones."""
        if self._asked.as_json:
            print_json({key: ids, "locked": locked})
        else:
            say(_done(len(ids), "event", key))
        if locked:
            raise events.locked(locked)
        if missing := sorted(set(map(_event_id, self._asked.ids or ())) - set(ids)):
            raise NotFound(
                f"not among the failed events, or due within seconds: {', '.join(missing)}; a failure whose event was "
                "deleted can only be discarded; --copies names copies for dead-letter topics"
            )


class _Messages:
    """Messages that could not be applied."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked

    def list(self, limit: int) -> None:
        with self._opened() as letters:
            found = letters.list(self._filtered(None), limit + 1)
        rows = [messages.readable(row) for row in found[:limit]]
        if self._asked.as_json:
            print_json({"dead_letters": rows})
            return
        for row in rows:
            key = "" if row["key"] is None else f"  key {row['key']}"
            say(
                f"{row['id']}  {row['group']}  {row['topic']}-{row['part']} offset {row['offset']}{key}  "
                f"{row['reason']}, {row['state']}, {counted(row['attempts'], 'attempt')}: "
                f"{row['error']}"
            )
        say_if_more(len(found), limit)
        if not rows:
            say("no dead letters")

    def show(self, dead_letter: str) -> None:
        with self._opened() as letters:
            print_json(messages.readable(letters.show(_number(dead_letter))), indented=not self._asked.as_json)

    def retry(self) -> None:
        selection = self._selection()
        with self._opened() as letters:
            rows = letters.retry(selection)
        found = [row["id"] for row in rows]
        if self._asked.as_json:
            print_json({"retried": found})
        elif not rows:
            say("no dead letters match")
        else:
            groups = sorted({row["grp"] for row in rows})
            by = groups[0] if len(groups) == 1 else f"each of the {len(groups)} groups"
            say(f"{_done(len(rows), 'message', 'retried')} in the next round of {by}")
            more = len(set(found) - set(selection.ids)) if selection.ids else 0
            if more:
                say(f"{more} of them because the order of their keys is kept")
        _require_found(selection, found)

    def discard(self, reason: str, *, keep_payload: bool) -> None:
        selection = self._selection()
        with self._opened() as letters:
            done = letters.discard(selection, reason, keep_message=keep_payload)
        gone = [row["id"] for row in done.gone]
        if self._asked.as_json:
            print_json({"discarded": gone, "retried": list(done.freed)})
        else:
            say(_done(len(gone), "message", "discarded"))
            if done.freed:
                say(f"{counted(len(done.freed), 'message')} that waited behind will be retried in the next round")
        _require_found(selection, gone)

    @contextmanager
    def _opened(self) -> Iterator[messages.DeadLetters]:
        settings = load(database_url=self._asked.database_url)
        with connect(settings.require_database(), "outbox dead-letters") as connection:
            yield messages.DeadLetters(connection, settings.consumer_schema)

    def _selection(self) -> messages.Selection:
        found = [_number(one) for one in self._asked.ids or ()]
        require_choice(found, self._asked.everything, "ids of dead letters", "--group, --topic … for some of them")
        return self._filtered(found or None)

    def _filtered(self, ids: Sequence[int] | None) -> messages.Selection:
        cause = self._asked.cause
        if cause is not None and cause not in messages.REASONS:
            raise ConfigurationError(f"--cause {cause}: must be one of {', '.join(messages.REASONS)}")
        return messages.Selection(ids, self._asked.group, self._asked.topic, cause)


def _done(count: int, noun: str, done: str) -> str:
    """Return what was done with them: ``retried`` or ``discarded``."""
    return f"{counted(count, noun)} will be {done}" if done == "retried" else f"{counted(count, noun, 'was')} {done}"


def _require_found(selection: messages.Selection, found: Sequence[int]) -> None:
    missing = sorted(set(selection.ids or ()) - set(found))
    if missing:
        raise NotFound(f"not among the selected dead letters: {', '.join(map(str, missing))}")


def _event_id(text: str) -> str:
    hint = "; with --side consumer it is the number of a dead letter" if text.isdecimal() else ""
    return str(event_id_of(text, hint))


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        UUID(text)
        hint = "; with --side relay it is an event id"
    except ValueError:
        hint = ""
    raise ConfigurationError(f"{text!r} is not the number of a dead letter{hint}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: bytes(value).hex() if isinstance(value, bytes | memoryview) else value for name, value in values.items()
    }
