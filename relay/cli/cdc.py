"""``outbox cdc``: the replication slot that relays with ``source=wal`` read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, require_reason, say, table_console, text_table
from outbox._app.text import age_text, bytes_text
from outbox.errors import ConfigurationError
from relay.cli.session import outbox_session
from relay.config import Settings
from relay.operations.wal_setup import Cdc, Status
from relay.wal.replication import lsn_text
from relay.wal.slot import slot_names

_LSNS: Final = ("current_lsn", "confirmed_lsn", "flushed_lsn", "settled_lsn")

app = typer.Typer(help="Set the WAL up as the source of the outbox.", no_args_is_help=True)


@app.command()
def setup(
    repair: Annotated[bool, typer.Option("--repair", help="Replace the slot; each lane reads the table once.")] = False,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Create the publication and the slot. Then start relays with OUTBOX_SOURCE=wal, and `outbox relay switch wal`.

    Needs the rights of the tables' owner, CREATE on the database, and REPLICATION.
    """
    why = require_reason(reason, "what happened; it is kept in the audit", needed=repair)
    with _cdc(database_url) as (cdc, settings):
        if repair:
            cdc.repair(why)
            typer.echo(f"Slot {settings.wal.slot!r} was replaced.")
            typer.echo("Each lane reads the table once before it streams again.")
        elif cdc.setup():
            typer.echo(f"Slot {settings.wal.slot!r} and publication {settings.wal.publication!r} were created.")
            typer.echo("The slot retains WAL from now on: run `outbox relay switch wal`, or `outbox cdc drop`.")
        else:
            typer.echo(f"Slot {settings.wal.slot!r} was already set up.")


@app.command()
def status(as_json: AsJson = False, database_url: DatabaseUrl = None) -> None:
    """Show the state of the stream. Exit status 1 when it has a gap, or keeps more WAL than the limit."""
    with _cdc(database_url) as (cdc, settings):
        found = cdc.status()
    limit = settings.wal.retained_limit_bytes
    over = found.slot.retained_bytes > limit
    if as_json:
        print_json(_summary(found, settings) | {"over_limit": over})
    else:
        _show(found, settings)
        if over:
            typer.echo(f"ALERT: over wal.retained_limit_bytes ({bytes_text(limit)}): is a relay running?")
    if found.problem is not None or over:
        raise typer.Exit(1)


@app.command()
def drop(
    slot: Annotated[
        str, typer.Option("--slot", prompt="Type the slot's name to drop it", help="The slot's name, to confirm.")
    ],
    database_url: DatabaseUrl = None,
) -> None:
    """Drop the slot and the publication."""
    with _cdc(database_url) as (cdc, settings):
        if slot != settings.wal.slot:
            raise ConfigurationError(f"the slot is {settings.wal.slot!r}, not {slot!r}: nothing was dropped")
        cdc.drop()
    typer.echo(f"Slot {slot!r} was dropped.")


@contextmanager
def _cdc(database_url: str | None) -> Iterator[tuple[Cdc, Settings]]:
    with outbox_session(database_url, "cdc") as (connection, settings):
        yield Cdc(connection, slot_names(settings)), settings


def _summary(found: Status, settings: Settings) -> dict[str, Any]:
    slot = found.slot

    def lsn(value: int | None) -> str | None:
        return None if value is None else lsn_text(value)

    return {
        "slot": settings.wal.slot,
        "publication": settings.wal.publication,
        "problem": found.problem,
        "wal_status": slot.wal_status,
        "read_by_pid": slot.active_pid,
        **{name: lsn(getattr(slot, name)) for name in _LSNS},
        "retained_bytes": slot.retained_bytes,
        "lag_bytes": slot.lag_bytes,
        "lag_seconds": round(slot.lag_seconds, 3),
        "timeline": slot.timeline,
        "lanes": [
            {
                "lane": lane.lane,
                "source": lane.source,
                "streaming": lane.streaming,
                "owner": lane.owner,
                "settled_lsn": lsn(lane.commit_lsn),
            }
            for lane in found.lanes
        ],
    }


def _show(found: Status, settings: Settings) -> None:
    values = _summary(found, settings)
    reader = values["read_by_pid"]
    facts = [
        ("slot", f"{values['slot']} ({values['wal_status'] or 'does not exist'})"),
        ("read by", "-" if reader is None else f"server process {reader}"),
        ("retained", bytes_text(values["retained_bytes"])),
        ("lag", f"{bytes_text(values['lag_bytes'])}, {age_text(values['lag_seconds'])}"),
    ]
    facts += [(name.replace("_lsn", " LSN"), values[name] or "-") for name in _LSNS]
    console = table_console()
    console.print(text_table(("", ""), facts))
    lanes = (
        (
            str(lane["lane"]),
            lane["source"],
            "the stream" if lane["source"] == "wal" and lane["streaming"] else "the table",
            lane["owner"] or "-",
            lane["settled_lsn"] or "-",
        )
        for lane in values["lanes"]
    )
    console.print(text_table(("lane", "source", "reads", "owner", "settled LSN"), lanes))
    say(f"PROBLEM: {found.problem}" if found.problem else "The stream has no gap.")
