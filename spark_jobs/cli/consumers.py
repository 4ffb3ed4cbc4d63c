"""``outbox consumers …``: the progress of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outbox._app.console import AsJson, SinkUrl, print_json, printable, say, table_console, text_table
from outbox._app.settings import load
from outbox._app.text import time_text

app = typer.Typer(help="The progress of consumer groups.", no_args_is_help=True)


@app.command()
def groups(
    database_url: SinkUrl = None,
    group: Annotated[str | None, typer.Option("--group", help="Only this consumer group.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show each group's progress by partition. The lag is that of the last move."""
    from outbox.consumer.postgres_errors import connect
    from outbox.consumer.progress import progress

    settings = load(database_url=database_url)
    with connect(settings.require_database(), "outbox consumers") as connection:
        rows = progress(connection, settings.consumer_schema, group)
    if as_json:
        print_json({"groups": [{"group": row.pop("grp"), **row} for row in rows]})
    elif not rows:
        say("no groups")
    else:
        _show_groups(rows)


def _show_groups(rows: Sequence[dict[str, Any]]) -> None:
    heads = ("group", "partition", "next", "log end", "lag", "applied", "duplicates", "dead letters", "last progress")
    table = text_table(heads, map(_cells, rows))
    for column in table.columns[2:8]:
        column.justify = "right"
    console = table_console()
    console.print(table)
    for row in {row["grp"]: row for row in rows}.values():
        taken = f"generation {row['generation']}, taken over by {row['owner']} at {time_text(row['taken_at'])}"
        console.print(printable(f"{row['grp']}: {taken}"), markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    place = "-" if row["topic"] is None else f"{row['topic']}-{row['part']}"
    counts = [row[name] for name in ("next_offset", "log_end", "lag", "applied", "duplicates")]
    dead = f"{row['dead_letters']:,}" + (f" + {row['retrying']:,} to retry" if row["retrying"] else "")
    shown = ["-" if count is None else f"{count:,}" for count in counts]
    return [row["grp"], place, *shown, dead, time_text(row["updated_at"])]
