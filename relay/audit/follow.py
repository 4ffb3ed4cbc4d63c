"""`outbox audit --follow`: compare each minute once, when it is over, and keep the result in the table ``verified``.

All topics move on together, from minute to minute. One that has a minute of which something is still under way stays
there, and is compared by itself until it has caught up. A minute is over when a few minutes have passed and every
transaction that was open at its end has ended. A scheduled event, which may be due in a month, is not waited for. If
the process is killed, the next one continues where the table says.

| killed                                  | then                                                              |
|-----------------------------------------|-------------------------------------------------------------------|
| while it compares                       | nothing was written: the next process compares the same minutes   |
| after a topic was written               | the topic is ahead of the others until they have caught up: its   |
|                                         | minutes are not counted again                                     |
| another process follows the same outbox | whoever writes a topic second changes nothing: it had moved       |
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox.consumer.errors import ConsumerUnavailable
from outbox.errors import OutboxError
from relay.audit.comparison import audit
from relay.audit.findings import DIFFERENT, EXPIRED, OPEN, Audit, Difference, Scope
from relay.audit.sessions import Sessions, sessions
from relay.audit.sums import minute_of, minute_start
from relay.audit.transactions import Transactions
from relay.config import Settings
from relay.core.ports import Unavailable
from relay.database import unavailable_on_error
from relay.insights import ALL_TOPICS, Verified, read_verified
from relay.settle.statements import names_of

_ORDER_MINUTES: Final = 10
_MOST_MINUTES: Final = 60
_EVERY_SECONDS: Final = 60.0
# Most of the time the servers shall have for others.
_REST: Final = 10.0
_MOST_KEPT: Final = 100

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
    """Compares minute after minute. ``scope`` says from when on, and which groups are partial."""

    def __init__(self, settings: Settings, scope: Scope) -> None:
        self._settings = settings
        self._scope = replace(scope, order_minutes=_ORDER_MINUTES, closed=True)
        self._names = names_of(settings.db_schema)
        # By topic: how many minutes to compare at once, and until when to rest.
        self._minutes: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._transactions = Transactions()
        # What was said since the last round without an error.
        self._said: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set. While a server is away, or does not answer in time, it tries again.

        Raises SchemaError and ConfigurationError.
        """
        while not stop.is_set():
            try:
                self.advance(stop)
                self._said.clear()
            except (Unavailable, ConsumerUnavailable) as error:
                self._say(error, ALL_TOPICS)
            stop.wait(max(_EVERY_SECONDS, self._not_before.get(ALL_TOPICS, 0.0) - time.monotonic()))

    def advance(self, stop: threading.Event | None = None) -> list[Audit]:
        """Compare the minutes that are over and were not compared, and keep the result. Returns what was compared.

        A topic that is behind the others neither delays them nor another one; none begins once ``stop`` is set. Raises
        Unavailable, ConsumerUnavailable, SchemaError and ConfigurationError: after all topics, if it was one of them.
        """
        with sessions(self._settings) as opened:
            end = self._transactions.closed(opened.outbox)
            known = {one.topic: one for one in read_verified(opened.outbox, self._settings.db_schema)}
            whole = known.pop(ALL_TOPICS, None)
            begin = minute_of(self._scope.since if whole is None else whole.verified_until)
            done: list[Audit] = []
            failed: OutboxError | None = None

            def follow(topic: str, since: int) -> None:
                nonlocal failed
                began = time.monotonic()
                if topic != ALL_TOPICS and began < self._not_before.get(topic, 0.0):
                    return
                if stop is not None and stop.is_set():
                    return
                minutes = self._minutes.get(topic, _MOST_MINUTES)
                try:
                    done.append(self._follow(opened, topic, since, min(end, since + minutes), known))
                    self._minutes[topic] = min(2 * minutes, _MOST_MINUTES)
                except (Unavailable, ConsumerUnavailable) as error:
                    self._say(error, topic)
                    self._minutes[topic] = max(minutes // 2, 1)
                    failed = error
                self._not_before[topic] = time.monotonic() + (_REST - 1) * (time.monotonic() - began)

            if begin < end:
                follow(ALL_TOPICS, begin)
            for topic, one in sorted(known.items()):
                # What is over may be less than before: a transaction is open, or the database's clock went back.
                if (behind := minute_of(one.verified_until)) < min(begin, end):
                    follow(topic, behind)
            if failed is not None:
                raise failed
            return done

    def _say(self, error: OutboxError, topic: str) -> None:
        if str(error) not in self._said:
            log.warning("the audit could not be made, and is tried again", topic=topic or "all", error=str(error))
            self._said.add(str(error))

    def _follow(self, opened: Sessions, topic: str, begin: int, end: int, known: Mapping[str, Verified]) -> Audit:
        """Compare the minutes of a topic, or of all that are not behind, and keep the result."""
        found = self._audit(opened, begin, end, topic)
        if topic != ALL_TOPICS:
            self._save(opened.outbox, topic, known[topic], begin, _progress(found, topic, begin, end))
            return found
        together = {name for name, one in known.items() if minute_of(one.verified_until) == begin}
        for name in sorted(together | {one.window.topic for one in found.windows} - known.keys()):
            self._save(opened.outbox, name, known.get(name), begin, _progress(found, name, begin, end))
        self._save(opened.outbox, ALL_TOPICS, None, begin, _Progress(end))
        return found

    def _audit(self, opened: Sessions, begin: int, end: int, topic: str) -> Audit:
        since, until = minute_start(begin), minute_start(end)
        topics = None if topic == ALL_TOPICS else [topic]
        scope = replace(self._scope, since=since, until=until, topics=topics)
        found = audit(self._settings, scope, opened)
        if topics is not None and any(one.event_id is None and one.group is None for one in found.differences):
            # The ledger has no topics: before a change of routes, what it counts for another one may be in this one.
            found = audit(self._settings, replace(scope, topics=None, more=topics), opened)
        log.info(
            "audited",
            topic=topic or "all",
            since=since.isoformat(),
            until=until.isoformat(),
            windows=len(found.windows),
            open=sum(one.state == OPEN for one in found.windows),
            notes=found.notes,
        )
        return found

    def _save(
        self, connection: psycopg.Connection[Any], topic: str, known: Verified | None, begin: int, found: _Progress
    ) -> None:
        if known is not None and found.until == begin:
            return
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
        waits = one.waiting > 0 or any(group.waiting for group in one.groups.values())
        # Different without a difference: there were too many to name them.
        if waits or one.state == OPEN or (one.state == DIFFERENT and not counts):
            progress.until = one.window.minute
            break
        progress.counts += counts
        # Nothing can be said of it: Kafka or the archive has not what is needed.
        progress.skipped += one.state == EXPIRED or one.committed is None
    until = minute_start(progress.until)
    progress.differences = [
        one for one in found.differences if one.topic == topic and minute_start(begin) <= one.window < until
    ]
    return progress


def _plain(one: Difference) -> dict[str, Any]:
    return {**asdict(one), "window": one.window.isoformat()}
