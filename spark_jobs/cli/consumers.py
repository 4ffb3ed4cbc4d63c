"""``outbox consumers …``: the progress of groups, and operators' actions on messages that could not be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox._app.console import (
    AsJson,
    SinkUrl,
    failing_clearly,
    print_json,
    printable,
    require_choice,
    require_reason,
    say,
    table_console,
)
from spark_jobs.cli.names import load

if TYPE_CHECKING:
    import psycopg

    from spark_jobs.admin.dead_letters import DeadLetters, Selection

app = typer.Typer(help="Consumer groups: how far they are.", no_args_is_help=True)
# The commands for dead letters are now `outbox dead-letters --side consumer`; these are their old names.

_Group = Annotated[str | None, typer.Option("--group", help="Only of this consumer group.")]
_Topic = Annotated[str | None, typer.Option("--topic", help="Only of this topic.")]
_Ids = Annotated[list[int] | None, typer.Argument(help="Ids of dead letters, as `list` shows them.")]
_All = Annotated[bool, typer.Option("--all", help="All of them (of --group, --topic …, if given).")]
_DeadBy = Annotated[
    str | None,
    typer.Option("--reason", help="Only dead for this: undecodable, no-id, too-old, failed, rejected or behind."),
]


@app.command()
@failing_clearly
def groups(database_url: SinkUrl = None, group: _Group = None, as_json: AsJson = False) -> None:
    """Show the progress of each group in each partition. The lag is as old as the time of the last move."""
    from spark_jobs.postgres.progress import progress

    with _connection(database_url) as (connection, schema):
        rows = progress(connection, schema, group)
    if as_json:
        print_json({"groups": [{"group": row.pop("grp"), **row} for row in rows]})
    elif not rows:
        say("no groups")
    else:
        _show_groups(rows)


@app.command("list", hidden=True)
@failing_clearly
def list_dead_letters(
    database_url: SinkUrl = None,
    group: _Group = None,
    topic: _Topic = None,
    reason: _DeadBy = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the oldest first; without their contents."""
    from spark_jobs.admin.dead_letters import Selection, readable

    with _dead_letters(database_url) as letters:
        rows = [readable(row) for row in letters.list(Selection(None, group, topic, reason), limit)]
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


@app.command(hidden=True)
@failing_clearly
def show(
    dead_letter: Annotated[int, typer.Argument(metavar="ID", help="As `list` shows it.")],
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with key, value and headers decoded: as JSON on several lines, or on one with --json."""
    from spark_jobs.admin.dead_letters import readable

    with _dead_letters(database_url) as letters:
        shown = readable(letters.show(dead_letter))
    print_json(shown, indented=not as_json)


@app.command(hidden=True)
@failing_clearly
def retry(
    ids: _Ids = None,
    database_url: SinkUrl = None,
    group: _Group = None,
    topic: _Topic = None,
    reason: _DeadBy = None,
    everything: _All = False,
    as_json: AsJson = False,
) -> None:
    """Retry dead letters in the next round of their groups: through decoding, dedup and effect.

    Where later messages of the same key wait behind one, all of the key are tried, in their order.
    """
    with _dead_letters(database_url) as letters:
        rows = letters.retry(_selection(ids, group, topic, reason, everything))
    found = [row["id"] for row in rows]
    if as_json:
        print_json({"retried": found})
    elif not rows:
        say("no dead letters are to be tried again")
    else:
        groups = sorted({row["grp"] for row in rows})
        by = groups[0] if len(groups) == 1 else f"each of the {len(groups)} groups"
        say(f"{_messages(len(rows))} will be tried again by the next round of {by}")
        more = len(set(found) - set(ids)) if ids else 0
        if more:
            say(f"{more} of them because they are of the same keys, whose order is kept")
    _all_found(ids, found)


@app.command(hidden=True)
@failing_clearly
def discard(
    why: Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")],
    ids: _Ids = None,
    database_url: SinkUrl = None,
    group: _Group = None,
    topic: _Topic = None,
    everything: _All = False,
    drop_payload: Annotated[
        bool, typer.Option("--drop-payload", help="Keep place and id in the audit, but not the message itself.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters for good. The audit keeps them; messages that waited behind them are tried again."""
    require_reason(why, "why the message may be lost")
    with _dead_letters(database_url) as letters:
        done = letters.discard(_selection(ids, group, topic, None, everything), why, keep_message=not drop_payload)
    gone = [row["id"] for row in done.gone]
    if as_json:
        print_json({"discarded": gone, "retried": list(done.freed)})
    else:
        say(f"{_messages(len(gone))} {'was' if len(gone) == 1 else 'were'} discarded")
        if done.freed:
            say(f"{_messages(len(done.freed))} that waited behind will be tried by the next round")
    _all_found(ids, gone)


@contextmanager
def _connection(database_url: str | None) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    from spark_jobs.postgres.errors import connect

    settings = load(database_url=database_url)
    with connect(settings.require_database(), "outbox consumers") as connection:
        yield connection, settings.consumer_schema


@contextmanager
def _dead_letters(database_url: str | None) -> Iterator[DeadLetters]:
    from spark_jobs.admin.dead_letters import DeadLetters

    with _connection(database_url) as (connection, schema):
        yield DeadLetters(connection, schema)


def _selection(
    ids: Sequence[int] | None, group: str | None, topic: str | None, reason: str | None, everything: bool
) -> Selection:
    from spark_jobs.admin.dead_letters import Selection

    require_choice(ids, everything, "ids of dead letters", "--group, --topic … for some of them")
    return Selection(list(ids) if ids else None, group, topic, reason)


def _all_found(asked: Sequence[int] | None, found: Sequence[int]) -> None:
    missing = sorted(set(asked or ()) - set(found))
    if missing:
        from spark_jobs.admin.dead_letters import NoSuchDeadLetter

        raise NoSuchDeadLetter(f"not among the dead letters that were asked for: {', '.join(map(str, missing))}")


def _show_groups(rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("group", "partition", "next", "log end", "lag", "applied", "duplicates", "dead letters", "moved at")
    for column in table.columns[2:8]:
        column.justify = "right"
    for row in rows:
        place = "-" if row["topic"] is None else f"{row['topic']}-{row['part']}"
        counts = [row[name] for name in ("next_offset", "log_end", "lag", "applied", "duplicates")]
        dead = f"{row['dead_letters']:,}" + (f" + {row['retrying']:,} to retry" if row["retrying"] else "")
        moved = "-" if row["updated_at"] is None else f"{row['updated_at']:%Y-%m-%d %H:%M:%S %Z}"
        shown = ["-" if count is None else f"{count:,}" for count in counts]
        table.add_row(*(Text(printable(cell)) for cell in (row["grp"], place, *shown, dead, moved)))
    console = table_console()
    console.print(table)
    for row in {row["grp"]: row for row in rows}.values():
        taken = (
            f"generation {row['generation']}, taken over by {row['owner']} at {row['taken_at']:%Y-%m-%d %H:%M:%S %Z}"
        )
        console.print(printable(f"{row['grp']}: {taken}"), markup=False)


def _at(row: dict[str, Any]) -> str:
    return f"{row['topic']}-{row['part']} offset {row['offset']}"


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
