"""``outbox dead-letters …``: list, retry and discard what could not be published (relay) or applied (consumer)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated
from uuid import UUID

import typer

from outbox._app.console import AsJson, DatabaseUrl, failing_clearly
from outbox.errors import ConfigurationError
from relay.cli import consumer_dead_letters as messages
from relay.cli import failed_events

app = typer.Typer(help="Events and messages that could not be published or applied.", no_args_is_help=True)


class Side(StrEnum):
    """The side that failed."""

    RELAY = "relay"
    CONSUMER = "consumer"


_Side = Annotated[Side, typer.Option("--side", help="relay: could not be published. consumer: could not be applied.")]
_Ids = Annotated[list[str] | None, typer.Argument(help="Event ids (relay) or numbers (consumer), see `list`.")]
_Type = Annotated[str | None, typer.Option("--aggregate-type", help="Relay: only of this aggregate type.")]
_Group = Annotated[str | None, typer.Option("--group", help="Consumer: only of this consumer group.")]
_Topic = Annotated[str | None, typer.Option("--topic", help="Consumer: only of this topic.")]
_Cause = Annotated[
    str | None,
    typer.Option(
        "--cause", help="Consumer: only with this cause: undecodable, no-id, too-old, failed, rejected or behind."
    ),
]
_All = Annotated[bool, typer.Option("--all", help="All that match the filters.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Relay: only count.")]
_Limit = Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")]


@app.command("list")
@failing_clearly
def list_dead_letters(
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    aggregate_type: _Type = None,
    group: _Group = None,
    topic: _Topic = None,
    cause: _Cause = None,
    limit: _Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters, and events that wait for another attempt; oldest first, without their contents."""
    if side is Side.RELAY:
        _refuse(side, {"--group": group, "--topic": topic, "--cause": cause})
        failed_events.list_failures(database_url, aggregate_type, limit, as_json=as_json)
    else:
        _refuse(side, {"--aggregate-type": aggregate_type})
        messages.list_dead_letters(database_url, group, topic, cause, limit, as_json=as_json)


@app.command()
@failing_clearly
def show(
    dead_letter: Annotated[
        str, typer.Argument(metavar="ID", help="An event id (relay) or a number (consumer), see `list`.")
    ],
    side: _Side = Side.RELAY,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one completely: JSON on several lines, or on one with --json."""
    if side is Side.RELAY:
        failed_events.show(_event_id(dead_letter), database_url, as_json=as_json)
    else:
        messages.show(_number(dead_letter), database_url, as_json=as_json)


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
    """Retry them: publish them, or apply them in the next round of their groups."""
    if side is Side.RELAY:
        _refuse(side, {"--group": group, "--topic": topic, "--cause": cause})
        failed_events.retry(
            _event_ids(ids), database_url, aggregate_type, everything=everything, dry_run=dry_run, as_json=as_json
        )
    else:
        _refuse(side, {"--aggregate-type": aggregate_type, "--dry-run": dry_run})
        messages.retry(_numbers(ids), database_url, group, topic, cause, everything=everything, as_json=as_json)


@app.command()
@failing_clearly
def discard(
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")],
    ids: _Ids = None,
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
    """Discard them for good; the audit keeps them. Events and messages that waited behind them go on."""
    if side is Side.RELAY:
        _refuse(side, {"--group": group, "--topic": topic})
        failed_events.discard(
            reason,
            _event_ids(ids),
            database_url,
            aggregate_type,
            everything=everything,
            drop_payload=drop_payload,
            dry_run=dry_run,
            as_json=as_json,
        )
    else:
        _refuse(side, {"--aggregate-type": aggregate_type, "--dry-run": dry_run})
        messages.discard(
            reason,
            _numbers(ids),
            database_url,
            group,
            topic,
            everything=everything,
            drop_payload=drop_payload,
            as_json=as_json,
        )


def _refuse(side: Side, given: dict[str, object]) -> None:
    for name, value in given.items():
        if value:
            other = Side.CONSUMER if side is Side.RELAY else Side.RELAY
            raise ConfigurationError(f"{name}: has no meaning with --side {side}; give --side {other}, or leave it out")


def _event_ids(ids: Sequence[str] | None) -> list[UUID] | None:
    return [_event_id(one) for one in ids] if ids else None


def _event_id(text: str) -> UUID:
    if _is_uuid(text):
        return UUID(text)
    hint = "; with --side consumer it is the number of a dead letter" if text.isdecimal() else ""
    raise ConfigurationError(f"{text!r} is no event id, which is a UUID{hint}")


def _numbers(ids: Sequence[str] | None) -> list[int] | None:
    return [_number(one) for one in ids] if ids else None


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    hint = "; with --side relay it is an event id" if _is_uuid(text) else ""
    raise ConfigurationError(f"{text!r} is no number of a dead letter, as `list` shows it{hint}")


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
