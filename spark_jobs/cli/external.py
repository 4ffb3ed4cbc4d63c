"""``outbox external …``: effects outside the database: run the caller, list stuck calls, decide by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import typer

from outbox._app.console import AsJson, SinkUrl, print_json, require_choice, require_reason, say
from outbox._app.ending import obey_signals
from outbox._app.settings import Settings, load
from outbox.errors import ConfigurationError, NotFound
from outbox.stopping import Stopping

if TYPE_CHECKING:
    import psycopg

    from outbox.external.declaration import External
    from outbox.external.reservations import Chosen, ReservationAdmin

app = typer.Typer(help="Effects outside the database: call, list, retry, cancel.", no_args_is_help=True)

_Spec = Annotated[str, typer.Argument(help="MODULE:NAME of the External", metavar="MODULE:NAME")]
_Ids = Annotated[list[UUID] | None, typer.Argument(help="Ids that `outbox external list` shows.")]
_Group = Annotated[str | None, typer.Option("--group", help="Only this consumer group.")]
_Name = Annotated[str | None, typer.Option("--name", help="Only the External of this name.")]
_All = Annotated[bool, typer.Option("--all", help="All that match the filters.")]


@app.command()
def run(
    spec: _Spec,
    once: Annotated[bool, typer.Option("--once", help="Exit when only stuck calls are left.")] = False,
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make reserved calls, until SIGTERM or, with --once, until all are settled. Several may run."""
    import structlog

    from outbox._app import logs
    from outbox.consumer.postgres_errors import connect

    settings = load(database_url=database_url)
    logs.configure(settings.log_level, settings.log_format, settings.given_name)
    external = _external(spec, settings)
    url = settings.require_database()
    log = structlog.get_logger("external").bind(external=external.name)
    stop = Stopping()
    obey_signals(
        stop,
        first="stopping after the calls under way; another signal ends it at once",
        second=(
            "ended in the middle of a call, after two signals; a call without an answer is made again with the same key"
        ),
    )
    counts = external.drain(
        lambda: connect(url, f"outbox external {external.name}", pinned=False),
        stop,
        until="settled" if once else "stopped",
        report=lambda text, figures: log.info(text, **figures),
        patience=60.0 if once else None,
    )
    figures = asdict(counts)
    if as_json:
        print_json(figures)
    else:
        say(
            f"{figures['name']}: {figures['confirmed']} confirmed, {figures['cancelled']} cancelled, "
            f"{figures['stuck']} stuck, in {figures['attempts']} attempts"
        )


@app.command("list")
def list_reservations(
    database_url: SinkUrl = None,
    group: _Group = None,
    name: _Name = None,
    unsettled: Annotated[bool, typer.Option("--open", help="Also unsettled calls.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List stuck calls, and settled ones that the provider has contradicted; the oldest first."""
    from orjson import Fragment

    from outbox.external import exact_json
    from outbox.external.reservations import OPEN, Chosen

    states = ("stuck", *OPEN) if unsettled else ("stuck",)
    with _reservations(database_url) as reservations:
        rows = reservations.find(Chosen(group, name), states, limit)
        counts = reservations.counts(Chosen(group, name))
    if as_json:
        # As JSON text: orjson takes no number that is too large or too precise for its types.
        stored = ("request", "response")
        exact = [row | {name: Fragment(exact_json.dumps(row[name], default=str)) for name in stored} for row in rows]
        print_json({"counts": counts, "reservations": exact})
        return
    for row in rows:
        doubt = ", may have happened" if row["unsure"] else ""
        behind = f", {row['waiting_behind']} wait behind it" if row["waiting_behind"] else ""
        say(
            f"{row['message_id']}  {row['grp']}/{row['name']}  {row['topic']}-{row['part']} offset "
            f"{row['message_offset']}  {row['state']}{doubt}, {row['attempts']} attempts{behind}: "
            f"{row['conflict'] or row['last_error'] or ''}"
        )
    say(", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no reservations")


@app.command()
def retry(
    message_ids: _Ids = None,
    database_url: SinkUrl = None,
    group: _Group = None,
    name: _Name = None,
    everything: _All = False,
    not_done: Annotated[
        bool, typer.Option("--not-done", help="You asked the provider: it has nothing under these keys.")
    ] = False,
    why: Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the audit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Retry stuck calls with the same idempotency keys. Calls queued behind them follow."""
    if not_done and not message_ids:
        raise ConfigurationError("--not-done: name the message ids that the provider was asked about")
    with _reservations(database_url) as reservations:
        ids = reservations.retry(_chosen(message_ids, group, name, everything), not_done=not_done, why=why)
    _print_result("retried", ids, "will be retried", message_ids, as_json)


@app.command()
def cancel(
    why: Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")],
    message_ids: _Ids = None,
    database_url: SinkUrl = None,
    group: _Group = None,
    name: _Name = None,
    everything: _All = False,
    as_json: AsJson = False,
) -> None:
    """Cancel stuck calls, and those that wait for a call. They are never called again."""
    require_reason(why, "why it is not to happen")
    with _reservations(database_url) as reservations:
        ids = reservations.cancel(_chosen(message_ids, group, name, everything), why)
    _print_result("cancelling", ids, "will be cancelled", message_ids, as_json)


@app.command()
def settle(
    spec: _Spec,
    message_id: Annotated[UUID, typer.Argument(help="The message's id.")],
    outcome: Annotated[Literal["confirmed", "cancelled"], typer.Option("--as", help="What the provider says.")],
    why: Annotated[str, typer.Option("--reason", help="How you know; it is kept in the audit.")],
    database_url: SinkUrl = None,
    as_json: AsJson = False,
) -> None:
    """Record the outcome of a stuck or conflicting call."""
    from outbox.consumer.postgres_errors import connect
    from outbox.external.caller import Caller

    require_reason(why, "how you know")
    settings = load(database_url=database_url)
    external = _external(spec, settings)
    url = settings.require_database()
    caller = Caller(external, lambda: connect(url, f"outbox external {external.name}", pinned=False))
    caller.settle_by_hand(message_id, confirmed=outcome == "confirmed", why=why)
    if as_json:
        print_json({"message_id": str(message_id), "state": outcome})
    else:
        say(f"{message_id} is {outcome}")


@app.command()
def forget(
    days: Annotated[int, typer.Option(min=0, max=36_500, help="Settled more than this many days ago.")],
    database_url: SinkUrl = None,
    group: _Group = None,
    name: _Name = None,
    as_json: AsJson = False,
) -> None:
    """Delete settled calls that are older than any message that may still be repeated."""
    from outbox.external.reservations import Chosen

    with _reservations(database_url) as reservations:
        count = reservations.forget(Chosen(group, name), days)
    if as_json:
        print_json({"forgotten": count})
    else:
        say(f"{count} reservations were deleted")


def _external(spec: str, settings: Settings) -> External:
    from outbox.external.declaration import find_external

    # It may be in the working directory, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    external = find_external(spec)
    if external.schema != settings.consumer_schema:
        raise ConfigurationError(
            f"{spec} is declared with schema={external.schema!r}, and consumer_schema is {settings.consumer_schema!r}"
        )
    return external


@contextmanager
def _reservations(database_url: str | None) -> Iterator[ReservationAdmin]:
    from outbox.consumer.postgres_errors import clear_errors, connect
    from outbox.external.reservations import ReservationAdmin

    settings = load(database_url=database_url)
    connection: psycopg.Connection[Any]
    with (
        connect(settings.require_database(), "outbox external") as connection,
        clear_errors("looking at reservations"),
    ):
        yield ReservationAdmin(connection, settings.consumer_schema)


def _chosen(ids: Sequence[UUID] | None, group: str | None, name: str | None, everything: bool) -> Chosen:
    from outbox.external.reservations import Chosen

    require_choice(ids, everything, "message ids", "--group, --name for some of them")
    return Chosen(group, name, ids or None)


def _print_result(word: str, ids: Sequence[str], what: str, asked: Sequence[UUID] | None, as_json: bool) -> None:
    if as_json:
        print_json({word: ids})
    else:
        say(f"{len(ids)} {what}")
    missing = {str(one) for one in asked or ()} - set(ids)
    if missing:
        raise NotFound(f"no reservations that this can be done with: {', '.join(sorted(missing))}")
