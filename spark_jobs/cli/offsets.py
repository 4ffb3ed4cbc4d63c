"""``outbox offsets …``: show the offsets of consumer groups with those of Kafka, and move them by hand."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outbox._app.console import (
    AsJson,
    Reason,
    SinkUrl,
    print_json,
    printable,
    require_reason,
    say,
    table_console,
    text_table,
)
from outbox._app.settings import client_options, load
from outbox._app.text import as_utc, time_text
from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox.consumer.admin.moves import Move, Wanted
    from outbox.consumer.admin.offsets import Group, MoveResult, Offsets, PartitionOffsets

app = typer.Typer(help="Show the offsets of consumer groups, and move them by hand.", no_args_is_help=True)

_Group = Annotated[str, typer.Argument(help="The consumer group.")]
_Topic = Annotated[str, typer.Option("--topic", help="The topic.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
_Skip = Annotated[bool, typer.Option("--skip", help="Skip messages permanently; the audit records which.")]
_New = Annotated[bool, typer.Option("--new", help="Allow a group that has never run.")]
_Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait for a task that commits.")]


@app.command()
def show(
    group: Annotated[str | None, typer.Option("--group", help="Only this consumer group.")] = None,
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show each partition's next offset, Kafka's first and last, and losses that were not accepted yet.

    Exit status 1 when Kafka does not answer; the stored offsets are shown anyway.
    """
    with _offsets(database_url) as offsets:
        groups, away = offsets.show(group)
    if as_json:
        print_json({"groups": [asdict(one) for one in groups], "kafka_error": away})
    else:
        for one in groups:
            _show(one)
        if not groups:
            say("no groups")
    if away is not None:
        say(f"outbox: {away}", err=True)
        raise typer.Exit(1)


@app.command("set")
def set_offset(
    group: _Group,
    topic: Annotated[str, typer.Argument(help="The topic of the partition.")],
    partition: Annotated[int, typer.Argument(min=0, help="The partition.")],
    offset: Annotated[int, typer.Argument(min=0, help="The next one to apply.")],
    reason: Reason = None,
    dry_run: _DryRun = False,
    skip: _Skip = False,
    new: _New = False,
    wait: _Wait = 60.0,
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Move a group to an offset of one partition. A running consumer is fenced: start it again.

    Going back is safe for jobs that remember ids, the default. With OffsetsOnly messages are applied again. Going
    forward needs --skip.
    """
    why = require_reason(reason, "why; it is kept in the audit", needed=not dry_run)
    with _offsets(database_url) as offsets:
        moved = offsets.reset(
            group, topic, offset, why, part=partition, skip=skip, dry_run=dry_run, new=new, wait_seconds=wait
        )
    _print_result(moved, as_json=as_json)


@app.command()
def reset(
    group: _Group,
    topic: _Topic,
    to: Annotated[
        str,
        typer.Option(help="earliest, latest, a time such as 2026-01-31T12:00:00Z, or loss: accept what Kafka lost."),
    ],
    reason: Reason = None,
    dry_run: _DryRun = False,
    skip: _Skip = False,
    new: _New = False,
    wait: _Wait = 60.0,
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Move a group in all partitions of a topic, and accept its losses there.

    ``--to loss`` goes to the nearest offset from which the group can continue. See also ``outbox offsets set``.
    """
    why = require_reason(reason, "why; it is kept in the audit", needed=not dry_run)
    wanted = _wanted(to)
    with _offsets(database_url) as offsets:
        moved = offsets.reset(group, topic, wanted, why, skip=skip, dry_run=dry_run, new=new, wait_seconds=wait)
    _print_result(moved, as_json=as_json)


@app.command()
def forget(
    group: _Group,
    topic: _Topic,
    reason: Reason = None,
    dry_run: _DryRun = False,
    wait: _Wait = 60.0,
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove a topic that a group's job no longer reads: offsets and losses. Ids stay remembered."""
    why = require_reason(reason, "why; it is kept in the audit", needed=not dry_run)
    with _offsets(database_url) as offsets:
        moved = offsets.forget(group, topic, why, dry_run=dry_run, wait_seconds=wait)
    _print_result(moved, as_json=as_json)


def _wanted(to: str) -> Wanted:
    named: dict[str, Wanted] = {"earliest": "earliest", "latest": "latest", "loss": "loss"}
    if to in named:
        return named[to]
    try:
        time = dt.datetime.fromisoformat(to)
    except ValueError:
        raise ConfigurationError(
            f"--to {to}: must be earliest, latest, loss, or a time such as 2026-01-31T12:00:00Z"
        ) from None
    return as_utc("--to", time)


@contextmanager
def _offsets(database_url: str | None) -> Iterator[Offsets]:
    from outbox.consumer.admin.offsets import Offsets
    from outbox.consumer.kafka_admin import KafkaAdmin
    from outbox.consumer.postgres_errors import connect

    settings = load(database_url=database_url)
    kafka = KafkaAdmin(client_options(settings))
    with connect(settings.require_database(), "outbox offsets") as connection:
        yield Offsets(connection, settings.consumer_schema, kafka)


def _print_result(moved: MoveResult, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(moved))
        return
    changing = [one for one in moved.moves if one.changes]
    for one in changing:
        say(f"{moved.topic}-{one.part}: {_line(one)}")
    if any(one.again for one in changing):
        say(
            "what was applied is known by its id and dropped, as long as ids are remembered; a job with OffsetsOnly "
            "remembers none, and applies it again"
        )
        if moved.forgotten_before is not None:
            say(
                f"messages of days before {moved.forgotten_before} whose ids are not known any more become dead "
                "letters (too-old)"
            )
    if moved.dry_run:
        if any(one.skipped for one in changing):
            say("this needs --skip")
        say("nothing was changed: --dry-run" if changing else "nothing would change")
    elif moved.generation is None:
        say("nothing to change")
    else:
        losses = f", {len(moved.accepted)} losses accepted" if moved.accepted else ""
        say(
            f"{moved.group} is in generation {moved.generation} now{losses}; a consumer that was running is fenced: "
            "start it again"
        )
    if moved.unshown is not None:
        say(f"outbox: Kafka's own tools show it only after the next round: {moved.unshown}", err=True)


def _line(one: Move) -> str:
    before, after = ("-" if at is None else f"{at:,}" for at in (one.before, one.after))
    notes = []
    if one.again:
        notes.append(f"{one.again:,} come again")
    if one.skipped is not None:
        notes.append(f"skips {one.skipped[0]:,} to {one.skipped[1] - 1:,}")
    if one.after is None:
        notes.append("forgotten")
    elif one.topic_id_before not in {None, one.topic_id}:
        notes.append("the topic is another")
    return f"{before} → {after}" + (f"  ({', '.join(notes)})" if notes else "")


def _show(group: Group) -> None:
    heads = ("partition", "next", "lag", "uncommitted", "first", "end", "high watermark", "last progress", "")
    table = text_table(heads, map(_cells, group.positions))
    for column in table.columns[1:7]:
        column.justify = "right"
    console = table_console()
    taken = f"generation {group.generation}, taken over by {group.owner} at {time_text(group.taken_at)}"
    console.print(printable(f"{group.group}: {taken}"), markup=False, highlight=False)
    if group.forgotten_before is not None:
        console.print(f"ids of days before {group.forgotten_before} are no longer all remembered", highlight=False)
    if group.positions:
        console.print(table)
    for loss in group.losses:
        number = loss["id"] or "not recorded yet"
        found = f"loss {number}, {loss['kind']}, found at {time_text(loss['found_at'])}: {loss['detail']}"
        console.print(printable(found), markup=False, highlight=False)
    if (more := (group.open_losses or 0) - len(group.losses)) > 0:
        console.print(f"and {more:,} losses more; consumer.losses has all", markup=False, highlight=False)
    for topic in group.lost_topics:
        command = f"outbox offsets reset {group.group} --topic {topic} --to loss --reason …"
        console.print(printable(f"accept: {command}"), markup=False, highlight=False)


def _cells(one: PartitionOffsets) -> list[str]:
    counts = [one.next_offset, one.lag, one.uncommitted, one.first, one.end, one.high_watermark]
    moved = "not read yet" if one.updated_at is None else time_text(one.updated_at)
    return [
        f"{one.topic}-{one.part}",
        *("-" if count is None else f"{count:,}" for count in counts),
        moved,
        one.trouble or "",
    ]
