"""`outbox dead-letters --side consumer`: what its commands do to messages that could not be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox._app.console import print_json, printable, require_choice, require_reason, say
from outbox._app.settings import load
from outbox.errors import NotFound

if TYPE_CHECKING:
    from outbox.consumer.admin.dead_letters import DeadLetters, Selection


def list_dead_letters(
    database_url: str | None, group: str | None, topic: str | None, cause: str | None, limit: int, *, as_json: bool
) -> None:
    """List dead letters, the oldest first; without their contents."""
    from outbox.consumer.admin.dead_letters import Selection, readable

    with _dead_letters(database_url) as letters:
        rows = [readable(row) for row in letters.list(Selection(None, group, topic, cause), limit)]
    if as_json:
        print_json({"dead_letters": rows})
        return
    for row in rows:
        key = "" if row["key"] is None else f"  key {printable(row['key'])}"
        attempts = f"{row['attempts']} attempt{'s' if row['attempts'] > 1 else ''}"
        say(
            f"{row['id']}  {row['group']}  {_at(row)}{key}  {row['reason']}, {row['state']}, {attempts}: "
            f"{printable(row['error'])}"
        )
    if len(rows) == limit:
        say(f"no more than {limit} are shown; see --limit")
    if not rows:
        say("no dead letters")


def show(dead_letter: int, database_url: str | None, *, as_json: bool) -> None:
    """Show one dead letter with key, value and headers decoded: as JSON on several lines, or on one with --json."""
    from outbox.consumer.admin.dead_letters import readable

    with _dead_letters(database_url) as letters:
        shown = readable(letters.show(dead_letter))
    print_json(shown, indented=not as_json)


def retry(
    ids: Sequence[int] | None,
    database_url: str | None,
    group: str | None,
    topic: str | None,
    cause: str | None,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    """Retry dead letters in the next round of their groups: through decoding, dedup and effect.

    Where later messages of the same key wait behind one, all of the key are tried, in their order.
    """
    with _dead_letters(database_url) as letters:
        rows = letters.retry(_selection(ids, group, topic, cause, everything=everything))
    found = [row["id"] for row in rows]
    if as_json:
        print_json({"retried": found})
    elif not rows:
        say("no dead letters match")
    else:
        groups = sorted({row["grp"] for row in rows})
        by = groups[0] if len(groups) == 1 else f"each of the {len(groups)} groups"
        say(f"{_messages(len(rows))} will be retried in the next round of {by}")
        more = len(set(found) - set(ids)) if ids else 0
        if more:
            say(f"{more} of them because they are of the same keys, whose order is kept")
    _all_found(ids, found)


def discard(
    reason: str,
    ids: Sequence[int] | None,
    database_url: str | None,
    group: str | None,
    topic: str | None,
    *,
    everything: bool,
    drop_payload: bool,
    as_json: bool,
) -> None:
    """Discard dead letters for good. The audit keeps them; messages that waited behind them are retried."""
    require_reason(reason, "why the message may be lost")
    with _dead_letters(database_url) as letters:
        done = letters.discard(
            _selection(ids, group, topic, None, everything=everything), reason, keep_message=not drop_payload
        )
    gone = [row["id"] for row in done.gone]
    if as_json:
        print_json({"discarded": gone, "retried": list(done.freed)})
    else:
        say(f"{_messages(len(gone))} {'was' if len(gone) == 1 else 'were'} discarded")
        if done.freed:
            say(f"{_messages(len(done.freed))} that waited behind will be retried in the next round")
    _all_found(ids, gone)


@contextmanager
def _dead_letters(database_url: str | None) -> Iterator[DeadLetters]:
    from outbox.consumer.admin.dead_letters import DeadLetters
    from outbox.consumer.postgres_errors import connect

    settings = load(database_url=database_url)
    with connect(settings.require_database(), "outbox dead-letters") as connection:
        yield DeadLetters(connection, settings.consumer_schema)


def _selection(
    ids: Sequence[int] | None, group: str | None, topic: str | None, cause: str | None, *, everything: bool
) -> Selection:
    from outbox.consumer.admin.dead_letters import Selection

    require_choice(ids, everything, "ids of dead letters", "--group, --topic … for some of them")
    return Selection(list(ids) if ids else None, group, topic, cause)


def _all_found(asked: Sequence[int] | None, found: Sequence[int]) -> None:
    missing = sorted(set(asked or ()) - set(found))
    if missing:
        raise NotFound(f"not among the dead letters that were asked for: {', '.join(map(str, missing))}")


def _at(row: dict[str, Any]) -> str:
    return f"{row['topic']}-{row['part']} offset {row['offset']}"


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
