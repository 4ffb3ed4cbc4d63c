"""`outbox dead-letters --side consumer`: messages that could not be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from outbox._app.console import print_json, require_choice, say
from outbox._app.settings import load
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from outbox.consumer.admin.dead_letters import DeadLetters, Selection


class FailedMessages:
    """The dead letters of consumers, or only those of a group, of a topic, or with a cause."""

    def __init__(self, database_url: str | None, group: str | None, topic: str | None, cause: str | None) -> None:
        self._database_url = database_url
        self._filters = group, topic, cause

    def list(self, limit: int, *, as_json: bool) -> None:
        from outbox.consumer.admin.dead_letters import Selection, readable

        with self._opened() as letters:
            rows = [readable(row) for row in letters.list(Selection(None, *self._filters), limit)]
        if as_json:
            print_json({"dead_letters": rows})
            return
        for row in rows:
            key = "" if row["key"] is None else f"  key {row['key']}"
            say(
                f"{row['id']}  {row['group']}  {row['topic']}-{row['part']} offset {row['offset']}{key}  "
                f"{row['reason']}, {row['state']}, {row['attempts']} attempt{'s' if row['attempts'] > 1 else ''}: "
                f"{row['error']}"
            )
        if len(rows) == limit:
            say(f"no more than {limit} are shown; see --limit")
        if not rows:
            say("no dead letters")

    def show(self, dead_letter: str, *, as_json: bool) -> None:
        from outbox.consumer.admin.dead_letters import readable

        with self._opened() as letters:
            print_json(readable(letters.show(_number(dead_letter))), indented=not as_json)

    def retry(self, ids: Sequence[str] | None, *, everything: bool, dry_run: bool, as_json: bool) -> None:
        """Retry them in the next round of their groups: through decoding, dedup and effect.

        Where later messages of the same key wait behind one, all of the key are retried, in their order.
        """
        assert not dry_run
        selection = self._selection(ids, everything)
        with self._opened() as letters:
            rows = letters.retry(selection)
        found = [row["id"] for row in rows]
        if as_json:
            print_json({"retried": found})
        elif not rows:
            say("no dead letters match")
        else:
            groups = sorted({row["grp"] for row in rows})
            by = groups[0] if len(groups) == 1 else f"each of the {len(groups)} groups"
            say(f"{counted(len(rows), 'message')} will be retried in the next round of {by}")
            more = len(set(found) - set(selection.ids)) if selection.ids else 0
            if more:
                say(f"{more} of them because they have the same keys, whose order is kept")
        _require_found(selection, found)

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
        """Discard them for good. The audit keeps them; messages that waited behind them are retried."""
        assert not dry_run
        selection = self._selection(ids, everything)
        with self._opened() as letters:
            done = letters.discard(selection, reason, keep_message=not drop_payload)
        gone = [row["id"] for row in done.gone]
        if as_json:
            print_json({"discarded": gone, "retried": list(done.freed)})
        else:
            say(f"{counted(len(gone), 'message')} {'was' if len(gone) == 1 else 'were'} discarded")
            if done.freed:
                say(f"{counted(len(done.freed), 'message')} that waited behind will be retried in the next round")
        _require_found(selection, gone)

    @contextmanager
    def _opened(self) -> Iterator[DeadLetters]:
        from outbox.consumer.admin.dead_letters import DeadLetters
        from outbox.consumer.postgres_errors import connect

        settings = load(database_url=self._database_url)
        with connect(settings.require_database(), "outbox dead-letters") as connection:
            yield DeadLetters(connection, settings.consumer_schema)

    def _selection(self, ids: Sequence[str] | None, everything: bool) -> Selection:
        from outbox.consumer.admin.dead_letters import Selection

        found = [_number(one) for one in ids or ()]
        require_choice(found, everything, "ids of dead letters", "--group, --topic … for some of them")
        return Selection(found or None, *self._filters)


def _require_found(selection: Selection, found: Sequence[int]) -> None:
    missing = sorted(set(selection.ids or ()) - set(found))
    if missing:
        raise NotFound(f"not among the selected dead letters: {', '.join(map(str, missing))}")


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        UUID(text)
        hint = "; with --side relay it is an event id"
    except ValueError:
        hint = ""
    raise ConfigurationError(f"{text!r} is not the number of a dead letter{hint}")
