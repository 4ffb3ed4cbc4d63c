"""``outbox audit``: compare what was committed, what is on Kafka and what each consumer group has applied."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, print_json, say, table_console, text_table
from outbox._app.text import as_utc
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError
from relay.audit import certificate as certificates
from relay.audit.findings import EQUAL, Audit, Scope, WindowAudit
from relay.cli.session import SinkOption, load_with_sink
from relay.config import Settings

app = typer.Typer(
    invoke_without_command=True,
    help="Compare the events that were committed, are on Kafka, and were applied by each consumer group.\n\n"
    "Names each event that is missing, repeated, unknown, out of order, in a wrong partition or changed; exit status 1 "
    "if there are any. Needs the archive (OUTBOX_RELAY__ARCHIVE_DAYS) or the ledger (`outbox db ledger on`).",
)

_HOUR: Final = dt.timedelta(hours=1)
_MOST_SHOWN: Final = 20
_COUNTS: Final = ("committed", "kafka", "repeated", "waiting", "dead", "discarded", "scheduled")


@app.callback()
def audit(
    context: typer.Context,
    since: Annotated[
        dt.datetime | None,
        typer.Option(help="Events written at or after (default: an hour ago); UTC unless it has a zone."),
    ] = None,
    until: Annotated[dt.datetime | None, typer.Option(help="Events written before (default: now).")] = None,
    topic: Annotated[list[str] | None, typer.Option("--topic", help="Only this topic; repeatable.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only this consumer group.")] = None,
    partial: Annotated[
        list[str] | None, typer.Option("--partial", help="A group that leaves events out on purpose; repeatable.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Compare each minute once it is over, until SIGTERM or SIGINT.")
    ] = False,
    certificate: Annotated[Path | None, typer.Option(help="Write the sums to this file, if all is equal.")] = None,
    sink_url: SinkOption = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from relay.audit.comparison import audit

    now = dt.datetime.now(dt.UTC)
    begin, end = as_utc("--since", since) or now - _HOUR, as_utc("--until", until) or now
    if begin >= end:
        raise ConfigurationError(f"--since {begin} is not before --until {end}")
    settings = load_with_sink(database_url, sink_url)
    scope = Scope(begin, end, topic or None, group, partial or ())
    if follow:
        if until or certificate or as_json or topic or group:
            raise ConfigurationError("--follow goes with --since and --partial only")
        _follow(settings, scope)
        return
    if certificate is not None:
        certificates.require_writable(certificate)
    found = audit(settings, scope)
    known = {one.window.topic for one in found.windows} | {one.topic for one in (settings.routes or {}).values()}
    if strange := [one for one in topic or () if one in found.absent and one not in known]:
        raise ConfigurationError(
            f"--topic {strange[0]}: it does not exist, or these credentials may not DESCRIBE it, and no event of these "
            "minutes is known that goes there"
        )
    if as_json:
        print_json(_as_dict(found))
    else:
        _show(found)
    if certificate is not None:
        digest = certificates.write(certificate, found, scope, settings)
        say(f"{certificate}: written; the SHA-256 of its last line is {digest}", err=as_json)
    if found.differs:
        raise typer.Exit(1)


def _follow(settings: Settings, scope: Scope) -> None:
    from outbox._app import logs
    from outbox._app.ending import obey_signals
    from outbox.stopping import Stopping
    from relay.audit.follow import Follower

    logs.configure(settings.log_level, settings.log_format, settings.given_name)
    stop = Stopping()
    obey_signals(stop, first="stopping after this comparison; another signal ends it at once", second="ended")
    Follower(settings, scope).run(stop)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate of `outbox audit --certificate`.")],
    sha256: Annotated[str | None, typer.Option("--sha256", help="The hash that was printed with it.")] = None,
    sink_url: SinkOption = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Check that a certificate was not changed, and repeat its sums. Exit status 1 if they differ now.

    Dead letters that were retried since are counted, and are no difference.
    Skips minutes of which Kafka or the archive has deleted something since, and those that a group has forgotten; exit
    status 1 too if nothing is left, of the topics or of one of the groups.
    """
    from relay.audit.comparison import audit

    certificate = certificates.read(file, sha256)
    windows = counted(len(certificate.windows), "window")
    found = audit(load_with_sink(database_url, sink_url), certificate.scope)
    repeated = certificates.differences(certificate, found)
    for text in (*repeated.retried, *repeated.texts):
        say(text)
    if repeated.texts:
        raise typer.Exit(1)
    if not repeated.compared:
        say(f"{file}: of its {windows} none can be compared: Kafka, the archive or the ledger has nothing of them")
        raise typer.Exit(1)
    for name, (compared, count) in repeated.groups.items():
        if compared < count:
            what = f"{count - compared} of its {counted(count, 'window')} can't be compared"
            say(f"group {name}: {what}: it has forgotten them, or its tables are elsewhere (--sink-url)")
    gone = [name for name, (compared, _) in repeated.groups.items() if not compared]
    without = f", without group {', '.join(gone)}" if gone else ""
    found_equal = f"{repeated.compared} of {windows} can be compared{without}, all as they were"
    say(f"{file}: {found_equal}; SHA-256 {certificate.digest}")
    if gone:
        raise typer.Exit(1)


def _show(found: Audit) -> None:
    names = sorted({name for one in found.windows for name in one.groups})
    heads = ("topic", "from", "to", "committed", "on Kafka", "waiting", "dead", *names, "state")
    rows = [
        _row(topic, state, list(windows), names)
        for (topic, state), windows in groupby(
            sorted(found.windows, key=lambda one: (one.window.topic, one.window.minute)),
            key=lambda one: (one.window.topic, _state(one)),
        )
    ]
    if rows:
        table_console().print(text_table(heads, rows))
    else:
        say(f"no events were written from {found.since:%Y-%m-%d %H:%M} to {found.until:%Y-%m-%d %H:%M} UTC")
    for one in found.differences[:_MOST_SHOWN]:
        where = one.topic if one.group is None else f"{one.topic}, group {one.group}"
        what = "events" if one.event_id is None else f"event {one.event_id}"
        say(f"! {one.kind}: {what} of {one.window:%Y-%m-%d %H:%M}, {where}: {one.text}")
    if (left := found.count - _MOST_SHOWN) > 0:
        named = "them" if len(found.differences) == found.count else f"the first {len(found.differences):,} of all"
        say(f"! {counted(left, 'more difference')}; --json names {named}")
    for note in found.notes:
        say(f"  {note}")


def _state(one: WindowAudit) -> str:
    return f"{one.state}, without what was committed" if one.committed is None and one.state == EQUAL else one.state


def _row(topic: str, state: str, windows: list[WindowAudit], names: Iterable[str]) -> list[str]:
    first, last = windows[0].window.start, windows[-1].window.start + dt.timedelta(minutes=1)
    committed = [one.committed for one in windows if one.committed is not None]
    return [
        *(
            topic,
            f"{first:%Y-%m-%d %H:%M}",
            f"{last:%H:%M}" if last.date() == first.date() else f"{last:%Y-%m-%d %H:%M}",
        ),
        f"{sum(committed):,}" if len(committed) == len(windows) else "?",
        *(f"{sum(getattr(one, name) for one in windows):,}" for name in ("kafka", "waiting", "dead")),
        *(_applied(windows, name) for name in names),
        state,
    ]


def _applied(windows: list[WindowAudit], name: str) -> str:
    windows = [one for one in windows if name in one.groups]
    counts = [one.groups[name] for one in windows]
    if not counts:
        return ""
    waiting = sum(count.waiting for count in counts)
    applied = [count.applied for count in counts if count.applied is not None]
    text = f"{sum(applied):,}" if applied else f"{sum(one.passed(name) for one in windows):,} passed"
    return text if not waiting else f"{text}, {waiting:,} wait"


def _as_dict(found: Audit) -> dict[str, Any]:
    return {
        "since": found.since,
        "until": found.until,
        "windows": [
            {
                "topic": one.window.topic,
                "start": one.window.start,
                "state": one.state,
                **{name: getattr(one, name) for name in _COUNTS},
                "groups": {
                    name: {"applied": count.applied, "passed": one.passed(name), "waiting": count.waiting}
                    for name, count in one.groups.items()
                },
            }
            for one in found.windows
        ],
        "differences": found.differences,
        "differences_count": found.count,
        "notes": found.notes,
    }
