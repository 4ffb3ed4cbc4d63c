"""``outbox transactions``: what is open on Kafka under the outbox's ids and in its topics."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outbox._app.console import AsJson, DatabaseUrl, failing_clearly, print_json, printable, require_reason
from relay.config import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.operations.transactions import OpenTransaction


@failing_clearly
def transactions(
    abort: Annotated[
        str | None, typer.Option("--abort", metavar="ID", help="Abort the transaction of this id, if that is safe.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why it is aborted; it is kept in the audit.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show open, undecided and hanging transactions of the outbox's ids and in its topics, and whether to abort them.

    --abort fences the id: the coordinator aborts its transaction, and its producer can do nothing any more. No event is
    lost, because the outbox still has its rows. Refused unless no live relay has the id. Exit status 1 if a transaction
    hangs, or if nothing was aborted.
    """
    from outbox._app.settings import client_options
    from relay.config import producer_options, state_topic_name
    from relay.database import Connector
    from relay.operations.transactions import HANGING, Transactions
    from relay.parts import build_router

    if abort is not None:
        require_reason(reason, "why it is aborted; it is kept in the audit")
    settings = load(database_url=database_url)
    with closing(Connector(settings.require_database(), "outbox transactions")()) as connection:
        found = Transactions(
            connection,
            settings.db_schema,
            settings.name,
            build_router(settings).may_write,
            state_topic_name(settings),
            client_options(settings),
            producer_options(settings),
        )
        if abort is not None:
            one = found.require_safe(abort)
            if not yes:
                _print([one])
                typer.confirm("Fence this id, which aborts its transaction?", abort=True)
            one = found.abort(abort, reason or "")
            if as_json:
                print_json({"aborted": asdict(one)})
            else:
                typer.echo("Aborted: its producer is fenced, and readers go on. Its events are published again.")
            return
        sight = found.look()
    if as_json:
        print_json({"transactions": [asdict(one) for one in sight.transactions], "unseen": list(sight.unseen)})
    else:
        _print(sight.transactions)
        for text in sight.unseen:
            typer.echo(f"not seen: {printable(text)}")
        if not sight.transactions and not sight.unseen:
            typer.echo("no transaction is open")
    if any(one.state == HANGING for one in sight.transactions):
        raise typer.Exit(1)


def _print(found: Sequence[OpenTransaction]) -> None:
    for one in found:
        head = f"{one.transactional_id or 'unknown id'}: {one.state}"
        if one.age_seconds is not None:
            head += f", open for {one.age_seconds:.0f} s"
        if one.timeout_seconds is not None:
            head += f" of at most {one.timeout_seconds:.0f} s"
        if one.producer_id is not None:
            head += f", producer {one.producer_id} epoch {one.epoch}"
        if one.lanes:
            head += f", lanes {', '.join(map(str, one.lanes))}"
        typer.echo(printable(head))
        for part in one.partitions:
            line = f"  {part.topic}-{part.partition}"
            if part.first_offset is not None:
                line += f" from offset {part.first_offset}"
            if part.lag is not None:
                line += f", readers wait at {part.stable} with {part.lag} records behind"
            typer.echo(printable(line))
        typer.echo(printable(f"  {'safe to abort' if one.safe_to_abort else 'do not abort'}: {one.verdict}"))
        if one.command is not None:
            typer.echo(printable(f"  {one.command}"))
