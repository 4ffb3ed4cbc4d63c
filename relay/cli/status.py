"""``outbox status``: the backlog, lanes, relays and consumer groups, and the problems that need an operator."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox._app.console import (
    AsJson,
    DatabaseUrl,
    failing_clearly,
    print_json,
    printable,
    table_console,
)
from relay.config import load
from relay.insights import COUNTED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outbox.consumer.admin.status import GroupState
    from relay.insights import OutboxState
    from relay.pipeline.overview import Overview

_FEW_LANES: Final = 16
"""How many lanes are shown with a row each: if there are more, those without a holder or with the oldest events."""


SinkOption = Annotated[
    str | None, typer.Option("--sink-url", help="The consumers' database; without it, the same one.")
]


@failing_clearly
def status(
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    watch: Annotated[
        float | None, typer.Option("--watch", min=0.2, help="Look again after so many seconds, until Ctrl-C.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the backlog and its age, lanes and relays, the slot, and each consumer group's lag and dead letters.

    What a person should look at is named below it; the exit status is 1 then. With --watch that comes first, and there
    are rates.
    """
    from relay.pipeline.overview import looking

    with looking(load(database_url=database_url), sink_url) as look:
        sight = look(None)
        if watch is None:
            _print(sight, as_json=as_json)
            if sight.problems:
                raise typer.Exit(1)
        elif as_json:
            while True:
                _print(sight, as_json=True)
                time.sleep(watch)
                sight = look(sight)
        else:
            _watch(look, sight, watch)


@failing_clearly
def top(
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, help="Look again after so many seconds.")] = 1.0,
) -> None:
    """Show what `outbox status` shows on the whole terminal, with rates, until Ctrl-C. Problems come first."""
    from relay.pipeline.overview import looking

    with looking(load(database_url=database_url), sink_url) as look:
        _watch(look, look(None), seconds)


def _watch(look: Callable[[Overview | None], Overview], sight: Overview, seconds: float) -> None:
    from rich.live import Live

    console = table_console()
    if not console.is_terminal:
        # Live would print what it shows at the end alone.
        while True:
            console.print(_rendered(sight, problems_first=True))
            time.sleep(seconds)
            sight = look(sight)
    # A terminal may be too small for everything: what needs a person comes first.
    with Live(_rendered(sight, problems_first=True), console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(seconds)
                sight = look(sight)
                live.update(_rendered(sight, problems_first=True), refresh=True)
        except KeyboardInterrupt:
            return


def _print(sight: Overview, *, as_json: bool) -> None:
    if as_json:
        print_json(sight.as_dict())
    else:
        table_console().print(_rendered(sight, problems_first=False))


def _rendered(sight: Overview, *, problems_first: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if sight.outbox is not None:
        parts.append(_backlog(sight.outbox, sight))
        tables = {"relays": _relays, "lanes": _lanes}
        parts += [show(sight.outbox) for table, show in tables.items() if table not in sight.outbox.hidden]
        if (slot := sight.outbox.slot) is not None:
            parts.append(
                Text(
                    f"slot {slot.slot}: {_bytes(slot.retained_bytes)} of WAL kept, {_bytes(slot.lag_bytes)} behind "
                    f"({_age(slot.lag_seconds)}), {'read' if slot.active else 'nobody reads it'}"
                )
            )
        if sight.outbox.pauses:
            parts.append(_pauses(sight.outbox))
    if sight.groups:
        parts.append(_groups(sight.groups))
    problems = [Text(f"! {printable(problem)}", style="bold yellow") for problem in sight.problems]
    problems = problems or [Text("nothing needs attention", style="green")]
    return Group(*problems, *parts) if problems_first else Group(*parts, *problems)


def _backlog(outbox: OutboxState, sight: Overview) -> RenderableType:
    from rich.text import Text

    about = "" if outbox.exact else "about "
    text = "backlog ? events" if outbox.backlog is None else f"backlog {about}{outbox.backlog:,} events"
    if outbox.oldest_seconds is not None:
        text += f", the oldest {_age(outbox.oldest_seconds)} old"
    if sight.written is not None and sight.published is not None:
        text += f"   written {sight.written:,.0f}/s, published {sight.published:,.0f}/s"
    if outbox.scheduled and outbox.next_due_seconds is not None:
        count = f"{outbox.scheduled:,}" + ("" if outbox.scheduled < COUNTED else " or more")
        text += f"   scheduled {count}, the next in {_age(outbox.next_due_seconds)}"
    return Text(text, style="bold")


def _relays(outbox: OutboxState) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table("relay", "state", "source", "version", "lanes", "heartbeat", box=None, pad_edge=False)
    for relay in outbox.relays:
        state = "running" if relay.alive else "gone"
        lanes = f"{len(relay.lanes)}" if len(relay.lanes) > _FEW_LANES else ", ".join(map(str, relay.lanes)) or "-"
        cells = (relay.instance, state, relay.source, relay.version, lanes, f"{_age(relay.heartbeat_seconds)} ago")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table if outbox.relays else Text("no relay has run here lately")


def _lanes(outbox: OutboxState) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shown = outbox.lanes
    if len(shown) > _FEW_LANES:
        # Lanes without a holder come first, then those with the oldest events.
        by_age = sorted(shown, key=lambda one: (one.held, -(one.oldest_seconds or 0.0)))
        shown = sorted(by_age[:_FEW_LANES], key=lambda one: one.lane)
    table = Table("lane", "events", "oldest", "held by", "source", "state", box=None, pad_edge=False)
    for lane in shown:
        events = f"{lane.events:,}" + ("" if lane.events < COUNTED else " or more")
        oldest = "-" if lane.oldest_seconds is None else _age(lane.oldest_seconds)
        source = f"{lane.source}, streaming" if lane.streaming else lane.source
        owner = lane.owner if lane.owner and lane.held else "-"
        state = "paused" if lane.paused else "-"
        table.add_row(*map(Text, (str(lane.lane), events, oldest, printable(owner), source, state)))
    table.columns[1].justify = table.columns[2].justify = "right"
    left = len(outbox.lanes) - len(shown)
    if not left:
        return table
    from rich.console import Group

    held = sum(lane.held for lane in outbox.lanes)
    return Group(table, Text(f"{left} more lanes; {held} of {len(outbox.lanes)} are held"))


def _pauses(outbox: OutboxState) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table("paused", "since", "by", "reason", box=None, pad_edge=False)
    for one in outbox.pauses:
        since = f"{one.requested_at.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        cells = (str(one.scope), since, one.requested_by, one.reason or "-")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _groups(groups: Sequence[GroupState]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    heads = ("group", "partitions", "lag", "behind open", "applied", "duplicates", "dead letters", "moved at")
    table = Table(*heads, box=None, pad_edge=False)
    for column in table.columns[1:7]:
        column.justify = "right"
    for group in groups:
        counts = (group.partitions, group.lag, group.pinned, group.applied, group.duplicates, group.dead_letters)
        moved = "-" if group.moved_at is None else f"{group.moved_at.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        cells = (printable(group.group), *("?" if count is None else f"{count:,}" for count in counts), moved)
        table.add_row(*map(Text, cells))
    return table


def _age(seconds: float) -> str:
    """Return a time span as text, with a decimal below ten seconds."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def _bytes(count: int) -> str:
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} bytes"
