"""``outbox status``: the backlog, lanes, relays and consumer groups, and the problems that need an operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, print_json, printable, table_console, text_table
from outbox._app.text import age_text, bytes_text, time_text
from outbox._clients.counting import counted
from relay.cli.session import SinkOption, load_with_sink
from relay.insights import COUNTED, LaneState, OutboxState, RelayState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outbox.consumer.admin.status import GroupState
    from relay.pipeline.overview import Overview, Reader

_FEW_LANES: Final = 16
"""The number of lanes that have a row of their own: those without a holder or with the oldest events."""


def status(
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    watch: Annotated[
        float | None, typer.Option("--watch", min=0.2, help="Seconds between refreshes, with rates, until Ctrl-C.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the backlog, relays, lanes, the slot, and the lag and dead letters of each consumer group.

    Lists problems that need attention; exit status 1 if there are any.
    """
    from relay.pipeline.overview import Reader

    with closing(Reader(load_with_sink(database_url, sink_url))) as reader:
        overview = reader.read(None)
        if watch is None:
            _print(overview, as_json=as_json)
            if overview.problems:
                raise typer.Exit(1)
        elif as_json or not table_console().is_terminal:
            # Live would print only the last view.
            while True:
                _print(overview, as_json=as_json)
                time.sleep(watch)
                overview = reader.read(overview)
        else:
            _watch(reader, overview, watch)


def _watch(reader: Reader, overview: Overview, seconds: float) -> None:
    from rich.live import Live

    # A terminal may be too small for everything: problems come first.
    shown = _rendered(overview, problems_first=True)
    with Live(shown, console=table_console(), auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(seconds)
                overview = reader.read(overview)
                live.update(_rendered(overview, problems_first=True), refresh=True)
        except KeyboardInterrupt:
            return


def _print(overview: Overview, *, as_json: bool) -> None:
    if as_json:
        print_json(overview.as_dict())
    else:
        table_console().print(_rendered(overview, problems_first=False))


def _rendered(overview: Overview, *, problems_first: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if overview.outbox is not None:
        parts.append(_backlog(overview.outbox, overview))
        tables = {"relays": _relays, "lanes": _lanes}
        parts += [show(overview.outbox) for table, show in tables.items() if table not in overview.outbox.hidden]
        if (slot := overview.outbox.slot) is not None:
            parts.append(
                Text(
                    f"slot {slot.slot}: {bytes_text(slot.retained_bytes)} of WAL retained, "
                    f"{bytes_text(slot.lag_bytes)} behind ({age_text(slot.lag_seconds)}), "
                    f"{'read' if slot.active else 'not read'}"
                )
            )
        if overview.outbox.pauses:
            parts.append(_pauses(overview.outbox))
    if overview.groups:
        parts.append(_groups(overview.groups))
    problems = [Text(f"! {printable(problem)}", style="bold yellow") for problem in overview.problems]
    problems = problems or [Text("nothing needs attention", style="green")]
    return Group(*problems, *parts) if problems_first else Group(*parts, *problems)


def _backlog(outbox: OutboxState, overview: Overview) -> RenderableType:
    from rich.text import Text

    about = "" if outbox.exact else "about "
    text = "backlog ? events" if outbox.backlog is None else f"backlog {about}{counted(outbox.backlog, 'event')}"
    if outbox.oldest_seconds is not None:
        text += f", the oldest {age_text(outbox.oldest_seconds)} old"
    if overview.written is not None and overview.published is not None:
        text += f"   written {overview.written:,.0f}/s, published {overview.published:,.0f}/s"
    if outbox.scheduled and outbox.next_due_seconds is not None:
        text += f"   scheduled {_counted(outbox.scheduled)}, the next in {age_text(max(outbox.next_due_seconds, 0.0))}"
    return Text(text, style="bold")


def _relays(outbox: OutboxState) -> RenderableType:
    def cells(relay: RelayState) -> tuple[str, ...]:
        state = "running" if relay.alive else "gone"
        lanes = f"{len(relay.lanes)}" if len(relay.lanes) > _FEW_LANES else ", ".join(map(str, relay.lanes)) or "-"
        return relay.instance, state, relay.source, relay.version, lanes, f"{age_text(relay.heartbeat_seconds)} ago"

    heads = ("relay", "state", "source", "version", "lanes", "heartbeat")
    return text_table(heads, map(cells, outbox.relays)) if outbox.relays else "no relay has run here recently"


def _lanes(outbox: OutboxState) -> RenderableType:
    def cells(lane: LaneState) -> tuple[str, ...]:
        source = f"{lane.source}, streaming" if lane.streaming else lane.source
        owner = lane.owner if lane.owner and lane.held else "-"
        paused = "paused" if lane.paused else "-"
        return str(lane.lane), _counted(lane.events), age_text(lane.oldest_seconds), owner, source, paused

    shown = outbox.lanes
    if len(shown) > _FEW_LANES:
        # Lanes without a holder come first, then those with the oldest events.
        by_age = sorted(shown, key=lambda one: (one.held, -(one.oldest_seconds or 0.0)))
        shown = sorted(by_age[:_FEW_LANES], key=lambda one: one.lane)
    table = text_table(("lane", "events", "oldest", "held by", "source", "state"), map(cells, shown))
    table.columns[1].justify = table.columns[2].justify = "right"
    left = len(outbox.lanes) - len(shown)
    if not left:
        return table
    from rich.console import Group

    held = sum(lane.held for lane in outbox.lanes)
    return Group(table, f"{counted(left, 'more lane')}; {held} of {len(outbox.lanes)} are held")


def _pauses(outbox: OutboxState) -> RenderableType:
    return text_table(
        ("paused", "since", "by", "reason"),
        ((str(one.scope), time_text(one.requested_at), one.requested_by, one.reason or "-") for one in outbox.pauses),
    )


def _groups(groups: Sequence[GroupState]) -> RenderableType:
    def cells(group: GroupState) -> tuple[str, ...]:
        counts = (group.partitions, group.lag, group.uncommitted, group.applied, group.duplicates, group.dead_letters)
        shown = ("?" if count is None else f"{count:,}" for count in counts)
        return group.group, *shown, time_text(group.last_progress_at)

    heads = ("group", "partitions", "lag", "uncommitted", "applied", "duplicates", "dead letters", "last progress")
    table = text_table(heads, map(cells, groups))
    for column in table.columns[1:7]:
        column.justify = "right"
    return table


def _counted(events: int) -> str:
    return f"{events:,}" + ("" if events < COUNTED else " or more")
