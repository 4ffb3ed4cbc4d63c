"""`outbox audit --follow`: compare each minute once, when it is over, and keep the result in the table ``verified``.

A topic is verified up to its first minute of which something is still under way. A minute is over when a few minutes
have passed and every transaction that was open at its end has ended. If the process is killed, the next one goes on
where the table says; a minute of which the result was not written yet is compared again.

| killed                                  | then                                                              |
|-----------------------------------------|-------------------------------------------------------------------|
| while it compares                       | nothing was written: the next process compares the same minutes   |
| after a topic was written               | the next process begins there with the next minute                |
| another process follows the same outbox | whoever writes a topic second changes nothing: it had moved       |
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from outbox.consumer.errors import ConsumerUnavailable
from relay.audit.comparison import audit
from relay.audit.findings import DIFFERENT, EXPIRED, OPEN, Audit, Difference, Scope, WindowAudit
from relay.audit.sums import minute_of, minute_start
from relay.config import Settings
from relay.core.ports import Unavailable
from relay.database import Connector, unavailable_on_error
from relay.insights import VERIFIED, Verified
from relay.settle.statements import names_of

_LATE_MINUTES: Final = 5
"""How many minutes an event's transaction may take before its first write, and how far clocks may be apart."""
_MOST_MINUTES: Final = 24 * 60
_EVERY_SECONDS: Final = 60.0
# Most of the time the servers shall have for others.
_REST: Final = 10.0
_MOST_KEPT: Final = 100

# A transaction number of our own: transactions that have one by now have a lower one, or they began later.
_BEGUN: Final = "SELECT clock_timestamp(), pg_current_xact_id()::text::bigint"
_OLDEST: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"

_SAVE: Final = """
INSERT INTO {verified} AS v (topic, verified_until, missing, repeated, other, skipped, differences)
VALUES (%(topic)s, %(until)s, %(missing)s, %(repeated)s, %(other)s, %(skipped)s, %(differences)s)
ON CONFLICT (topic) DO UPDATE
   SET verified_until = excluded.verified_until, missing = v.missing + excluded.missing,
       repeated = v.repeated + excluded.repeated, other = v.other + excluded.other,
       skipped = v.skipped + excluded.skipped, differences = excluded.differences, checked_at = clock_timestamp()
 WHERE v.verified_until = %(since)s"""

log = structlog.get_logger("audit")


@dataclass(slots=True)
class _Progress:
    """What one comparison adds to a topic. ``until``: the first minute that is not verified."""

    until: int
    counts: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    differences: list[Difference] = field(default_factory=list)


class Follower:
    """Compares minute after minute. ``scope`` says what; it begins at ``scope.since`` where the table says nothing."""

    def __init__(self, settings: Settings, scope: Scope) -> None:
        self._settings = settings
        self._scope = scope
        self._names = names_of(settings.db_schema)
        # Minutes that had begun, each with the number of a transaction then.
        self._begun: list[tuple[int, int]] = []

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set. While a server is away it tries again.

        Raises SchemaError and ConfigurationError.
        """
        while not stop.is_set():
            began = time.monotonic()
            try:
                self.advance()
            except (Unavailable, ConsumerUnavailable) as error:
                log.warning("the audit could not be made, and is tried again", error=str(error))
            stop.wait(max(_EVERY_SECONDS, _REST * (time.monotonic() - began)))

    def advance(self) -> Audit | None:
        """Compare the minutes that are over and were not compared, and keep the result. None if there are none.

        Raises Unavailable, ConsumerUnavailable, SchemaError and ConfigurationError.
        """
        with closing(Connector(self._settings.require_database(), "outbox audit")()) as connection:
            end = self._closed(connection)
            known = {one.topic: one for one in self._read(connection)}
            since = min((minute_of(one.verified_until) for one in known.values()), default=minute_of(self._scope.since))
            end = min(end, since + _MOST_MINUTES)
            if since >= end:
                return None
            scope = replace(self._scope, since=minute_start(since), until=minute_start(end))
            found = audit(self._settings, scope)
            topics = {one.window.topic for one in found.windows} | known.keys()
            for topic in sorted(topics):
                begin = minute_of(known[topic].verified_until) if topic in known else since
                self._save(connection, topic, known.get(topic), begin, _progress(found, topic, begin, end))
        log.info(
            "audited",
            since=scope.since.isoformat(),
            until=scope.until.isoformat(),
            windows=len(found.windows),
            open=sum(one.state == OPEN for one in found.windows),
            notes=found.notes,
        )
        return found

    def _closed(self, connection: psycopg.Connection[Any]) -> int:
        """Return the first minute that is not over."""
        with unavailable_on_error("looking for the minutes that are over"):
            cursor = psycopg.Cursor(connection)
            ((now, number),) = cursor.execute(_BEGUN).fetchall()
            ((oldest,),) = cursor.execute(_OLDEST).fetchall()
        self._begun.append((minute_of(now), number))
        ended = [begun for begun, number in self._begun if number <= oldest]
        if not ended:
            return 0
        self._begun = [one for one in self._begun if one[0] >= ended[-1]]
        return ended[-1] - _LATE_MINUTES

    def _read(self, connection: psycopg.Connection[Any]) -> list[Verified]:
        with (
            unavailable_on_error("reading what was verified"),
            connection.cursor(row_factory=class_row(Verified)) as cursor,
        ):
            rows = cursor.execute(sql.SQL(VERIFIED).format(**self._names)).fetchall()
        topics = self._scope.topics
        return [row for row in rows if topics is None or row.topic in topics]

    def _save(
        self, connection: psycopg.Connection[Any], topic: str, known: Verified | None, begin: int, found: _Progress
    ) -> None:
        new = [_plain(one) for one in reversed(found.differences)]
        bound = {
            "topic": topic,
            "since": minute_start(begin),
            "until": minute_start(found.until),
            "missing": found.counts.pop("missing", 0),
            "repeated": found.counts.pop("repeated", 0),
            "other": found.counts.total(),
            "skipped": found.skipped,
            "differences": Jsonb([*new, *(known.differences if known else ())][:_MOST_KEPT]),
        }
        with unavailable_on_error("writing what was verified"):
            saved = connection.execute(sql.SQL(_SAVE).format(**self._names), bound)
        if saved.rowcount == 0:
            log.warning("another process follows this outbox too", topic=topic)
            return
        for one in found.differences:
            log.warning("the audit found a difference", **_plain(one))


def _progress(found: Audit, topic: str, begin: int, end: int) -> _Progress:
    """Return what an audit of the minutes up to ``end`` says of a topic that was verified up to ``begin``."""
    progress = _Progress(end)
    for one in sorted(found.windows, key=lambda one: one.window.minute):
        if one.window.topic != topic or one.window.minute < begin:
            continue
        counts = found.counts.get(one.window, Counter[str]())
        # Different without a difference: it had no time to name them.
        if one.state == OPEN or (one.state == DIFFERENT and not counts):
            progress.until = one.window.minute
            break
        progress.counts += counts
        progress.skipped += _unknown(one)
    until = minute_start(progress.until)
    progress.differences = [
        one for one in found.differences if one.topic == topic and minute_start(begin) <= one.window < until
    ]
    return progress


def _unknown(one: WindowAudit) -> bool:
    """Return whether nothing can be said of a minute: Kafka or the archive has not what is needed."""
    return one.state == EXPIRED or one.committed is None


def _plain(one: Difference) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "event_id": one.event_id,
        "topic": one.topic,
        "window": one.window.isoformat(),
        "group": one.group,
        "text": one.text,
    }
