"""``outbox dead-letters …``: list, retry and discard what could not be published (relay) or applied (consumer)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, failing_clearly, require_reason
from outbox.errors import ConfigurationError
from relay.cli.consumer_dead_letters import FailedMessages
from relay.cli.failed_events import FailedEvents

app = typer.Typer(help="Events and messages that could not be published or applied.", no_args_is_help=True)


class Side(StrEnum):
    RELAY = "relay"
    CONSUMER = "consumer"


_Side = Annotated[Side, typer.Option("--side", help="Events not published (relay), or messages not applied.")]
_Ids = Annotated[list[str] | None, typer.Argument(help="Event ids (relay) or numbers (consumer).")]
_Type = Annotated[str | None, typer.Option("--aggregate-type", help="Relay: only of this aggregate type.")]
_Group = Annotated[str | None, typer.Option("--group", help="Only this consumer group.")]
_Topic = Annotated[str | None, typer.Option("--topic", help="Consumer: only of this topic.")]
_Cause = Annotated[
    str | None,
    typer.Option("--cause", help="Consumer: undecodable, no-id, too-old, failed, rejected or behind."),
]
_All = Annotated[bool, typer.Option("--all", help="All that match the filters.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Relay: only count.")]


@app.command("list")
@failing_clearly
def list_dead_letters(
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters and retrying events, oldest first, without their contents."""
    _opened(side, database_url, aggregate_type, group, topic, cause).list(limit, as_json=as_json)


@app.command()
@failing_clearly
def show(
    dead_letter: Annotated[str, typer.Argument(metavar="ID", help="An event id (relay) or a number (consumer).")],
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one with its contents, as indented JSON; with --json on one line."""
    _opened(side, database_url).show(dead_letter, as_json=as_json)


@app.command()
@failing_clearly
def retry(
    ids: _Ids = None,
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    everything: _All = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Retry them: publish the events now, or apply the messages in their groups' next round."""
    chosen = _opened(side, database_url, aggregate_type, group, topic, cause, dry_run=dry_run)
    chosen.retry(ids, everything=everything, dry_run=dry_run, as_json=as_json)


@app.command()
@failing_clearly
def discard(
    ids: _Ids = None,
    reason: Reason = None,
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    everything: _All = False,
    drop_payload: Annotated[bool, typer.Option("--drop-payload", help="Keep no contents in the audit.")] = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Discard them for good; the audit keeps them. Events and messages behind them continue."""
    why = require_reason(reason, "why they may be lost", needed=not dry_run)
    chosen = _opened(side, database_url, aggregate_type, group, topic, dry_run=dry_run)
    chosen.discard(ids, why, everything=everything, drop_payload=drop_payload, dry_run=dry_run, as_json=as_json)


def _opened(
    side: Side,
    database_url: str | None,
    aggregate_type: str | None = None,
    group: str | None = None,
    topic: str | None = None,
    cause: str | None = None,
    *,
    dry_run: bool = False,
) -> FailedEvents | FailedMessages:
    """Return the dead letters of one side that match. Raises ConfigurationError for an option of the other side."""
    of_relay = {"--aggregate-type": aggregate_type, "--dry-run": dry_run}
    of_consumer = {"--group": group, "--topic": topic, "--cause": cause}
    for name, value in (of_consumer if side is Side.RELAY else of_relay).items():
        if value:
            other = Side.CONSUMER if side is Side.RELAY else Side.RELAY
            raise ConfigurationError(f"{name} has no meaning with --side {side}; give --side {other}, or leave it out")
    if side is Side.RELAY:
        return FailedEvents(database_url, aggregate_type)
    return FailedMessages(database_url, group, topic, cause)
