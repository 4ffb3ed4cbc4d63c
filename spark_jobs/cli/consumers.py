"""``outbox consumers …``: the progress of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outbox._app.console import AsJson, SinkUrl, print_json, printable, say, table_console
from outbox._app.settings import load

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
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "group", "partition", "next", "log end", "lag", "applied", "duplicates", "dead letters", "last progress"
    )
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
