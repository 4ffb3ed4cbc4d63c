"""`outbox dead-letters --side relay`: events that could not be published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox._app.console import print_json, require_choice, say
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, NotFound
from relay.cli.session import outbox_session

if TYPE_CHECKING:
    from relay.operations.dead_letters import DeadLetters, Selection


class FailedEvents:
    def __init__(self, database_url: str | None, aggregate_type: str | None) -> None:
        self._database_url = database_url
        self._type = aggregate_type

    def list(self, limit: int, *, as_json: bool) -> None:
        from relay.operations.dead_letters import Selection

        with self._opened() as letters:
            failures = letters.list(Selection(aggregate_type=self._type), limit)
        if as_json:
            print_json({"failures": [_plain(failure) for failure in failures]})
            return
        for failure in failures:
            say(
                f"{failure['event_id']}  {failure['aggregate_type']}/{failure['aggregate_id']}  "
                f"{failure['event_type'] or '?'}  {failure['state']}, {failure['attempts']} attempts: "
                f"{failure['last_error']}"
            )
        if not failures:
            say("no failed events")

    def show(self, event_id: str, *, as_json: bool) -> None:
        import orjson

        with self._opened() as letters:
            shown = _plain(letters.show(_event_id(event_id)))
        if shown.get("payload") is not None:
            # Unparsed: numbers that Python would round stay exact.
            shown["payload"] = orjson.Fragment(shown["payload"])
        print_json(shown, indented=not as_json)

    def retry(self, ids: Sequence[str] | None, *, everything: bool, dry_run: bool, as_json: bool) -> None:
        """Retry them now. Dead letters return to the outbox, before the later events of their key."""
        selection = self._selection(ids, everything)
        with self._opened() as letters:
            if dry_run:
                _print_counts(letters.count(selection, discard=False), "retried", as_json)
                return
            done = letters.retry(selection, progress=_progress("retried", letters, selection, discard=False))
        _print_done("retried", "will be retried", selection, list(dict.fromkeys(done)), done.locked, as_json)

    def discard(
        self,
        ids: Sequence[str] | None,
        reason: str,
        *,
        everything: bool,
        drop_payload: bool,
        dry_run: bool,
        as_json: bool,
    ) -> None:
        """Delete them for good. The audit keeps them; the later events of their keys continue."""
        selection = self._selection(ids, everything)
        with self._opened() as letters:
            if dry_run:
                _print_counts(letters.count(selection, discard=True), "discarded", as_json)
                return
            progress = _progress("discarded", letters, selection, discard=True)
            done = letters.discard(selection, reason, keep_payload=not drop_payload, progress=progress)
        gone = [event["event_id"] for event in done]
        _print_done("discarded", "were discarded", selection, gone, done.locked, as_json)

    @contextmanager
    def _opened(self) -> Iterator[DeadLetters]:
        from relay.operations.dead_letters import DeadLetters

        with outbox_session(self._database_url, "dead-letters") as (connection, settings):
            yield DeadLetters(connection, settings.db_schema)

    def _selection(self, ids: Sequence[str] | None, everything: bool) -> Selection:
        from relay.operations.dead_letters import Selection

        found = [_event_id(one) for one in ids or ()]
        require_choice(found, everything, "event ids", "--aggregate-type for those of one type")
        return Selection(found or None, self._type)


def _event_id(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        hint = "; with --side consumer it is the number of a dead letter" if text.isdecimal() else ""
        raise ConfigurationError(f"{text!r} is not an event id (a UUID){hint}") from None


def _progress(done_word: str, letters: DeadLetters, selection: Selection, *, discard: bool) -> Callable[[int], None]:
    """Return a function that prints the progress of a long run to stderr, after each batch but the last."""
    total = sum(letters.count(selection, discard=discard).values())

    def show(done: int) -> None:
        if done < total:
            say(f"{done:,} of {total:,} {done_word}", err=True)

    return show


def _print_counts(counts: Mapping[str, int], done_word: str, as_json: bool) -> None:
    from relay.operations.dead_letters import COUNTS

    if as_json:
        print_json({"dry_run": True, **counts})
    else:
        say(f"would be {done_word}: " + ", ".join(counted(count, COUNTS[name]) for name, count in counts.items()))


def _print_done(
    key: str, text: str, selection: Selection, ids: Sequence[str], locked: Sequence[str], as_json: bool
) -> None:
    """Print what was done. Raises OperationRefused for locked events, and NotFound for missing ones."""
    from relay.operations import dead_letters

    if as_json:
        print_json({key: ids, "locked": locked})
    else:
        say(f"{len(ids)} events {text}")
    if locked:
        raise dead_letters.locked(locked)
    if missing := sorted(set(selection.event_ids or ()) - set(ids)):
        raise NotFound(
            f"not among the failed events, or due within seconds: {', '.join(missing)}; a failure whose event was "
            "deleted can only be discarded"
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: bytes(value).hex() if isinstance(value, bytes | memoryview) else value for name, value in values.items()
    }
