"""``outbox db …``: create, change and check the tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Annotated

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, say
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, OperationRefused
from relay.audit.ledger import LEAST_DAYS, turn_off, turn_on
from relay.audit.ledger import prune as prune_ledger
from relay.config import Settings, SourceKind, load
from relay.database import Connector
from relay.operations.roles import USUAL, RoleKind, grants, limits
from relay.tasks.archive import PrunePlan, Retention, raise_failure

app = typer.Typer(help="Create, change and check the tables.", no_args_is_help=True)

_Schema = Annotated[str | None, typer.Option("--schema", help="OUTBOX_SCHEMA; with --consumer OUTBOX_CONSUMER_SCHEMA")]
# Text, so that what is not a number gets a one-line error like any other invalid number.
_Lanes = Annotated[str | None, typer.Option("--lanes", metavar="NUMBER", help="Number of lanes, at the first upgrade.")]
_Consumer = Annotated[bool, typer.Option("--consumer", help="The consumers' tables instead of the outbox's.")]


@app.command()
def upgrade(
    database_url: DatabaseUrl = None, schema: _Schema = None, consumer: _Consumer = False, lanes: _Lanes = None
) -> None:
    """Upgrade the tables to this version. Safe to repeat, and to run concurrently."""
    from outbox._app import migrate as db

    url, name = _target(database_url, schema, consumer)
    count = _lane_count(lanes, consumer)
    done = db.repeated(_say_why, lambda: db.upgrade_consumer(url, name) if consumer else db.upgrade(url, name, count))
    typer.echo(f"schema {name}: {done}")


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help="A revision, or base to drop all tables.")],
    database_url: DatabaseUrl = None,
    schema: _Schema = None,
    consumer: _Consumer = False,
    drop_rows: Annotated[bool, typer.Option("--drop-rows", help="Downgrade even if rows are lost.")] = False,
) -> None:
    """Downgrade to a revision."""
    from outbox._app import migrate as db

    url, name = _target(database_url, schema, consumer)
    history = db.CONSUMER if consumer else db.OUTBOX
    db.repeated(_say_why, lambda: db.downgrade(url, name, revision, history=history, drop_rows=drop_rows))
    typer.echo(f"schema {name} is at {revision}")


@app.command()
def check(
    database_url: DatabaseUrl = None, schema: _Schema = None, consumer: _Consumer = False, as_json: AsJson = False
) -> None:
    """Compare the tables with this version's. Exit status 1 if they differ."""
    from outbox._app import schema_drift as schema_check

    url, name = _target(database_url, schema, consumer)
    differences = (schema_check.check_consumer if consumer else schema_check.check)(url, name)
    if as_json:
        print_json({"schema": name, "differences": differences})
    else:
        for line in differences:
            typer.echo(line)
        if not differences:
            typer.echo(f"schema {name} is as this version expects")
    if differences:
        raise typer.Exit(1)


@app.command()
def sql(
    schema: _Schema = None,
    consumer: _Consumer = False,
    lanes: _Lanes = None,
    start: Annotated[str | None, typer.Option("--from", help="Only the revisions after this one.")] = None,
    end: Annotated[str, typer.Option("--to", help="Up to this revision.")] = "head",
) -> None:
    """Print the SQL of the upgrade, for Flyway, psql or a review. Needs no database."""
    from outbox._app import migrate as db
    from outbox.tables import DEFAULT_LANES

    name, count = _schema_of(load(), schema, consumer), _lane_count(lanes, consumer)
    history = db.CONSUMER if consumer else db.OUTBOX
    typer.echo(db.sql(name, DEFAULT_LANES if count is None else count, start, end, history=history))


@app.command()
def lanes(
    number: Annotated[str, typer.Argument(help="The new number of lanes: 1 to 256.")],
    database_url: DatabaseUrl = None,
    schema: _Schema = None,
) -> None:
    """Change the number of lanes. Stop the relays first; writers wait while it runs.

    If relays have ever published exactly-once, it first compares the markers on Kafka, as `outbox relay reconcile`
    does, and needs the relays' Kafka settings.
    """
    from outbox._app import migrate as db

    url, name = _target(database_url, schema, consumer=False)
    wanted = _number(number)
    former = _former_markers(database_url, schema, wanted) if db.has_markers(url, name) else {}
    db.repeated(_say_why, lambda: db.change_lanes(url, wanted, name, former))
    typer.echo(f"schema {name} has {counted(wanted, 'lane')}")


def _former_markers(database_url: str | None, schema: str | None, lanes: int) -> dict[int, tuple[int, int]]:
    """Return batch and epoch of the last markers of numbers that the outbox had before, for ``change_lanes``.

    Raises OperationRefused if Kafka has what the table does not know: its marker names events of the old lanes.
    """
    from relay.cli.relay import reconciler_settings
    from relay.operations.reconcile import Reconciler

    with closing(Reconciler(reconciler_settings(database_url, schema))) as reconciler:
        found = reconciler.look(search=False)
        former = reconciler.former_markers(lanes)
    for one in found.lanes:
        if one.problem is not None:
            raise OperationRefused(
                f"lane {one.lane}: {one.problem}; if OUTBOX_NAME is the relays', repair it first: `outbox relay "
                "reconcile --apply`"
            )
        if one.marker_batch not in {None, one.last_batch}:
            raise OperationRefused(
                f"lane {one.lane}: Kafka has batch {one.marker_batch}, and the table knows of {one.last_batch}; start "
                "a relay, wait until `outbox status` shows that it holds the lanes, and stop it with SIGTERM"
            )
    return {lane: (marker.batch, marker.epoch) for lane, marker in former.items()}


@app.command()
def prune(
    database_url: DatabaseUrl = None,
    schema: _Schema = None,
    consumer: Annotated[
        bool, typer.Option("--consumer", help="The ids that consumers remember instead of the archive.")
    ] = False,
    days: Annotated[
        int | None,
        typer.Option(
            min=0, max=3650, help="Days to keep; OUTBOX_RELAY__ARCHIVE_DAYS, with --consumer OUTBOX_CONSUMER__KEEP_DAYS"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also drop what expired more than 3 days ago, if the clock is right.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Drop expired partitions, and create those of the coming days. Run it as the tables' owner.

    Relays do it for the archive, and consumers for remembered ids, if they have the rights.
    """
    if consumer:
        if force:
            raise ConfigurationError("--force is for the archive; it makes no difference with --consumer")
        _prune_ids(database_url, schema, days, dry_run=dry_run, as_json=as_json)
        return
    url, name = _target(database_url, schema, consumer=False)
    connect = Connector(url, "outbox db prune")
    keep = load().relay.archive_days if days is None else days

    def keep_ledger() -> bool:
        with closing(connect()) as connection:
            return prune_ledger(connection, name, keep, force=force, dry_run=dry_run)

    if days is None and keep == 0:
        if not keep_ledger():
            raise ConfigurationError("no number of days to keep: set OUTBOX_RELAY__ARCHIVE_DAYS, or give --days")
        if as_json:
            print_json({"dry_run": dry_run, "ledger_days": LEAST_DAYS})
        else:
            was = "would be" if dry_run else "was"
            typer.echo(
                f"the ledger {was} added up, without its rows from more than {LEAST_DAYS} days ago; there is no "
                "archive to keep"
            )
        return
    plan = Retention(connect, name, keep).prune(dry_run=dry_run, force=force)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "oldest_kept": plan.oldest,
                "created": plan.create,
                "dropped": plan.drop,
                "stray_rows": plan.stray_rows,
                "overdue_days": plan.overdue_days,
            }
        )
    else:
        _print_plan(plan, dry_run=dry_run, force=force)
    # Only now, as a clock that is wrong is found out by the archive too.
    try:
        if not dry_run:
            keep_ledger()
    finally:
        raise_failure(plan)


def _print_plan(plan: PrunePlan, *, dry_run: bool, force: bool) -> None:
    would = "would be " if dry_run else ""
    for day in plan.create:
        typer.echo(f"partition for {day}: {would}created")
    for partition in plan.drop:
        typer.echo(f"partition {partition}: {would}dropped")
    if plan.stray_rows:
        typer.echo(
            f"{counted(plan.stray_rows, 'row')} of the default partition from before {plan.oldest}: {would}deleted"
        )
    if plan.held_back and not force:
        typer.echo(
            f"the first of these should have been dropped {counted(plan.overdue_days, 'day')} ago: "
            "nothing is dropped without --force"
        )
    if plan.empty and plan.failure is None:
        typer.echo("nothing to do")


@app.command()
def roles(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND=ROLE...",
            help=(
                "A kind and an existing role; a kind may be repeated. Kinds: writer, relay, operator, page, monitor, "
                "canceller, migrator; in the consumers' schema consumer, consumer-operator, consumer-monitor, "
                "consumer-page, consumer-migrator, external."
            ),
        ),
    ] = None,
    database_url: DatabaseUrl = None,
    schema: Annotated[
        str | None, typer.Option(help="OUTBOX_SCHEMA; for kinds in the consumers' schema OUTBOX_CONSUMER_SCHEMA")
    ] = None,
    wal: Annotated[
        bool | None, typer.Option("--wal/--no-wal", help="For a relay with source=wal; OUTBOX_SOURCE")
    ] = None,
    aggregate_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=TYPE", help="Let this writer insert events of this aggregate type only. May be repeated."
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Execute the grants in one transaction, as the tables' owner.")
    ] = False,
) -> None:
    """Print the minimal grants for each kind of role: by default for outbox_writer, outbox_relay, …"""
    from outbox._app import migrate as db

    settings = load(database_url=database_url)
    chosen = [_role(item) for item in which or ()] or [(kind, kind.default_role) for kind in USUAL]
    if schema is not None and len({kind.of_sink for kind, _ in chosen}) > 1:
        raise ConfigurationError(
            f"--schema {schema}: these kinds have rights in two schemas; run it for each, or set OUTBOX_SCHEMA and "
            "OUTBOX_CONSUMER_SCHEMA"
        )
    outbox_schema, consumer_schema = (_schema_of(settings, schema, consumer) for consumer in (False, True))
    wal = settings.source is SourceKind.WAL if wal is None else wal
    statements = list(grants(chosen, outbox_schema, consumer_schema, wal=wal))
    limited = list(limits(chosen, outbox_schema, _limits(aggregate_type or ())))
    # Whoever executes them has a search path of its own. A running service never sees a REVOKE without its GRANT.
    in_one = ("BEGIN", *statements, "COMMIT")
    for statement in ("SET search_path = pg_catalog", *limited, *in_one, "RESET search_path"):
        typer.echo(f"{statement};")
    if apply:
        for part in (*([one] for one in limited), statements):
            db.repeated(_say_why, partial(db.grant, settings.require_database(), part))
        typer.echo("-- granted")


@app.command()
def ledger(
    switch: Annotated[str, typer.Argument(metavar="on|off", help="Whether to keep it; off drops it.")],
    database_url: DatabaseUrl = None,
    schema: _Schema = None,
    reason: Reason = None,
) -> None:
    """Let the database count events as they are written, for `outbox audit`. Run it as the tables' owner."""
    from outbox._app import migrate as db

    if switch not in {"on", "off"}:
        raise ConfigurationError(f"{switch!r} must be on or off")
    url, name = _target(database_url, schema, consumer=False)
    connect = Connector(url, "outbox db ledger")

    def change() -> None:
        with closing(connect()) as connection:
            (turn_on if switch == "on" else turn_off)(connection, name, reason)

    db.repeated(_say_why, change)
    typer.echo(f"schema {name}: the ledger is {switch}")


def _prune_ids(database_url: str | None, schema: str | None, days: int | None, *, dry_run: bool, as_json: bool) -> None:
    from outbox.consumer.retention import IdRetention

    url, name = _target(database_url, schema, consumer=True)
    keep = load().consumer.keep_days if days is None else days
    if keep < 1:
        raise ConfigurationError("--days: with --consumer at least 1, so that a message that is sent twice is known")
    memory = IdRetention(url, name, keep, "outbox db prune")
    made: list[str] = []
    dropped: list[str] = []
    rows = 0
    would = "would be " if dry_run else ""
    # Each is shown before the next begins: it stays done if the next one fails.
    for done in [memory.due()] if dry_run else memory.prune():
        made += done.made
        dropped += done.dropped
        rows += done.deleted_rows
        if as_json:
            continue
        for partition in done.made:
            typer.echo(f"partition {partition}: {would}created")
        for partition in done.dropped:
            typer.echo(f"partition {partition}: {would}dropped")
        if done.deleted_rows:
            typer.echo(f"{counted(done.deleted_rows, 'id')} of the default partition: {would}forgotten")
    if as_json:
        print_json({"dry_run": dry_run, "keep_days": keep, "created": made, "dropped": dropped, "stray_rows": rows})
    elif not (made or dropped or rows):
        typer.echo("nothing to do")


def _role(item: str) -> tuple[RoleKind, str]:
    kind, equals, name = item.partition("=")
    if not equals or kind not in list(RoleKind):
        raise ConfigurationError(f"{item!r} must be KIND=ROLE, with a kind of {', '.join(RoleKind)}")
    return RoleKind(kind), name


def _say_why(text: str) -> None:
    say(f"outbox: {text}", err=True)


def _limits(items: Sequence[str]) -> dict[str, list[str]]:
    limits: dict[str, list[str]] = {}
    for item in items:
        role, _, name = item.partition("=")
        if not role or not name:
            raise ConfigurationError(f"--aggregate-type {item!r} must be ROLE=TYPE, such as shop=Order")
        limits.setdefault(role, []).append(name)
    return limits


def _target(database_url: str | None, schema: str | None, consumer: bool) -> tuple[str, str]:
    settings = load(database_url=database_url)
    return settings.require_database(), _schema_of(settings, schema, consumer)


def _schema_of(settings: Settings, schema: str | None, consumer: bool) -> str:
    if schema is not None:
        return schema
    return settings.consumer_schema if consumer else settings.db_schema


def _number(lanes: str) -> int:
    try:
        return int(lanes)
    except ValueError:
        from outbox.tables import MAX_LANES

        raise ConfigurationError(f"lanes must be a number from 1 to {MAX_LANES}, not {lanes!r}") from None


def _lane_count(lanes: str | None, consumer: bool) -> int | None:
    """Return --lanes. Raises ConfigurationError with --consumer."""
    if lanes is None:
        return None
    if consumer:
        raise ConfigurationError("--lanes is for the outbox; the consumers' tables have none")
    return _number(lanes)
