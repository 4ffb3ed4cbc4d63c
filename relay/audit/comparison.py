"""Compares the three readings of an audit: sums first, and where they differ, the events one by one."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from outbox._app.choices import HeaderSet
from outbox._app.settings import client_options
from outbox.consumer.admin.status import has_tables
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.errors import ConfigurationError
from relay.audit import ledger
from relay.audit.chosen import choose, left_out
from relay.audit.coverage import Coverage
from relay.audit.findings import (
    DIFFERENT,
    EQUAL,
    EXPIRED,
    OPEN,
    Audit,
    Difference,
    GroupCount,
    Scope,
    WindowAudit,
    parts,
)
from relay.audit.groups import Group, Groups, expected_of, given_up, with_applied
from relay.audit.readings import Readings
from relay.audit.records import superfluous, unlike_archived, unlike_ledger
from relay.audit.sessions import Sessions, sessions
from relay.audit.sums import (
    MODULUS,
    NOTHING,
    WINDOW_SECONDS,
    Sum,
    Window,
    by_minute,
    hash_of,
    minute_of,
    minute_of_id,
    minute_start,
    unlike,
)
from relay.audit.tables import MOST_MISPLACED, UNPUBLISHED, Archived, Committed, Misplaced, Tables, out_of_order
from relay.audit.topics import OnKafka, Topics, window_sums
from relay.audit.transactions import closed_now
from relay.config import Delivery, Settings
from relay.core.ports import Unavailable
from relay.kafka.offsets import Partition
from relay.parts import build_router

_MOST_COMPARED: Final = 1_000_000


def audit(settings: Settings, scope: Scope, opened: Sessions | None = None) -> Audit:
    """Compare what was committed, what is on Kafka and what the groups have applied.

    Raises Unavailable, ConsumerUnavailable, SchemaError and ConfigurationError.
    """
    with sessions(settings) if opened is None else nullcontext(opened) as used:
        comparison = _Comparison(settings, scope, used)
        found = comparison.run()
        if settings.delivery is Delivery.AT_MOST_ONCE and "missing" in comparison.ledger_differences.values():
            # Rows are deleted before they are sent: by then the last one is acknowledged, or lost.
            time.sleep(settings.relay.lease_seconds)
            comparison = _Comparison(settings, scope, used)
            found = comparison.run()
        if (differ := comparison.ledger_differences) and comparison.skipped_topics:
            # Before a change of routes, what the ledger counts may have gone there.
            minutes = sorted(one.minute for one in differ)
            since, until = minute_start(minutes[0]), minute_start(minutes[-1] + 1)
            with suppress(Unavailable):
                scope = replace(scope, since=since, until=until, former=comparison.skipped_topics)
                again = _Comparison(settings, scope, used)
                more = again.run()
                found.explain(differ, again.explained, more, scope.former)
    return found


class _Comparison:
    """One audit, to be run once."""

    def __init__(self, settings: Settings, scope: Scope, opened: Sessions) -> None:
        self._settings = settings
        self._scope = scope
        # The last minute is included if ``until`` is within it.
        stop = math.ceil(scope.until.timestamp() / WINDOW_SECONDS)
        self._minutes = range(minute_of(scope.since), max(stop, minute_of(scope.since) + 1))
        self._router = build_router(settings)
        self._options = client_options(settings)
        self._connection = opened.outbox
        state = ledger.state(self._connection, settings.db_schema)
        kept = state if isinstance(state, ledger.LedgerState) else None
        self._key = scope.key or (secrets.token_bytes(32) if kept is None else kept.key)
        self._ledger = kept is not None and kept.key == self._key
        self._coverage = Coverage(self._minutes)
        self._coverage.of_ledger(state, self._key)
        self._audit = Audit(minute_start(self._minutes.start), minute_start(self._minutes.stop), self._key)
        if isinstance(state, str):
            self._audit.notes.append(state)
        self._ce_time = settings.headers is not HeaderSet.DEBEZIUM
        self._tables = Tables(
            self._connection,
            settings.db_schema,
            self._router,
            scope.topics,
            self._minutes,
            self._key,
            order_minutes=scope.order_minutes,
            ce_time=self._ce_time,
        )
        self._deleted: set[bytes] = set()
        """The ids of archived events whose records Kafka has deleted, or are not compared."""
        self._renamed: set[str] = set()
        """Topics with records of this outbox that have another source."""
        self._placed: dict[bytes, tuple[Partition, int]] = {}
        """By id, the place on Kafka of events whose place the archive lacks."""
        self.ledger_differences: dict[Window, str] = {}
        """Windows of which the ledger counts something else than is known, each with the kind of the difference."""
        self.explained: set[Window] = set()
        """Windows of which all that the ledger counts is known, or may be under way."""
        self.skipped_topics: Collection[str] = ()
        """Topics of groups that were not read, as this outbox does not write to them."""
        self._groups: Groups | None = None
        if settings.relay.sink_url is not None or has_tables(opened.sink, settings.consumer_schema):
            self._groups = Groups(opened.sink, settings.consumer_schema, scope.group, self._minutes, self._key)
        elif scope.group is not None:
            raise ConfigurationError(f"--group {scope.group}: there are no tables of consumers")
        else:
            self._audit.notes.append("there are no tables of consumers here: give --sink-url if they are elsewhere")

    def run(self) -> Audit:
        read = self._read()
        audited = self._compare_sums(read)
        for window, some in read.scheduled.items():
            audited[window].scheduled = some.events
        self._compare_groups(audited, read)
        lost = [] if self._scope.former else list(given_up(read.groups, read.cells))
        for window, _, _ in lost:
            if audited[window].state != EXPIRED:
                audited[window].state = DIFFERENT
        self._one_by_one(audited)
        misplaced = read.misplaced
        if self._placed:
            # Their places are on Kafka only.
            with self._tables.snapshot():
                misplaced = self._tables.misplaced(self._placed)
        self._order(misplaced, audited)
        named = {(one.group, one.topic, one.text) for one in self._audit.differences}
        for window, group, text in lost:
            # Of the others each event is named; and what was given up may lie between the events of several minutes.
            what = group.name, window.topic, text
            if (audited[window].state == EXPIRED or group.forgot(window.minute)) and what not in named:
                named.add(what)
                self._differ(audited[window], "missing", None, text, group.name)
        for one in audited.values():
            if (one.state == EQUAL and self._under_way(one)) or (one.state == EXPIRED and one.waiting):
                one.state = OPEN
        in_order = sorted(audited.values(), key=lambda one: (one.window.minute, one.window.topic))
        self._audit.windows = [one for one in in_order if not one.empty]
        self._audit.notes += self._coverage.notes(self._audit.windows)
        left = self.skipped_topics, self._renamed
        self._audit.notes += left_out(self._settings, self._scope, self._audit, read.groups, self._topics, *left)
        return self._audit

    def _read(self) -> Readings:
        # Before anything is read: what has ended by now is seen.
        self._closed, why = (self._minutes.stop, None) if self._scope.closed else closed_now(self._connection)
        if why is not None and self._closed < self._minutes.stop:
            self._audit.notes.append(why)
        with self._tables.snapshot():
            self._now = minute_of(self._tables.now())
            unpublished = self._tables.unpublished()
            scheduled = {} if self._scope.closed else self._tables.scheduled()
            written = self._tables.ledger() if self._ledger else {}
            archived_topics, lowest, all_known = self._tables.places()
            self._coverage.of_archive(self._tables.archived(), on=self._settings.relay.archive_days > 0)
        unarchived = {*unpublished[0], *unpublished[1], *scheduled, *written}
        known = {window.topic for window in unarchived} | set(archived_topics)
        chosen = choose(self._settings, self._scope, self._router, self._groups, known)
        self._coverage.own, topics, self.skipped_topics = chosen
        self._topics = Topics(self._options, topics, self._settings.ce_source, self._key, ce_time=self._ce_time)
        complete = self._coverage.whole if all_known else ()
        self._extents = self._topics.extents(self._audit.since, lowest, complete=complete)
        self._audit.absent = topics - {place.topic for place in self._extents}
        with ThreadPoolExecutor(1) as pool:
            # Postgres adds up the archive meanwhile.
            archive = pool.submit(self._read_archive)
            contents = bool(self._coverage.archive)
            cells, first = self._topics.sums(self._extents, self._minutes, contents=contents)
            committed, misplaced = archive.result()
        groups, applied = self._applied(topics)
        admin, end = KafkaAdmin(self._options), (self._now + 1) * WINDOW_SECONDS
        self._audit.notes += self._coverage.of_retention(admin, self._extents, first, end)
        self._look_again()
        return Readings(unpublished, scheduled, written, committed, misplaced, cells, groups, applied)

    # -- what is compared

    def _read_archive(self) -> tuple[dict[Window, Committed], list[Misplaced]]:
        with self._tables.snapshot():
            return self._tables.committed(ids=self._ledger), self._tables.misplaced()

    def _look_again(self) -> None:
        """Note what was deleted during the reads."""
        if self._coverage.archive:
            with self._tables.snapshot():
                self._coverage.of_archive_again(self._tables.archived_since())
        if self._ledger:
            # It counts the events that were left out, too.
            state = None if self._topics.untimed else ledger.state(self._connection, self._settings.db_schema)
            self._coverage.of_ledger(state, self._key)
        self._coverage.of_kafka(self._topics, self._extents)

    def _applied(self, topics: Collection[str]) -> tuple[list[Group], dict[tuple[str, int], Sum]]:
        if self._groups is None:
            return [], {}
        with self._groups.snapshot():
            groups = self._groups.groups(topics)
            return groups, self._groups.sums(groups)

    def _under_way(self, one: WindowAudit) -> bool:
        waits = one.waiting > 0 or one.scheduled > 0 or any(group.waiting for group in one.groups.values())
        return waits or one.window.minute >= self._closed

    # -- sums

    def _compare_sums(self, read: Readings) -> dict[Window, WindowAudit]:
        """Compare the outbox with Kafka."""
        ids, wholes = window_sums(read.cells)
        in_tables = {*read.committed, *chain.from_iterable(read.unpublished), *read.scheduled, *read.written}
        audited: dict[Window, WindowAudit] = {}
        known: dict[Window, Sum] = {}
        for window in with_applied([*in_tables, *ids], read.groups, read.applied):
            audited[window] = one = WindowAudit(window, None, ids.get(window, NOTHING).events)
            left = [table.get(window, NOTHING) for table in read.unpublished]
            one.waiting, one.dead, one.discarded = (part.events for part in left)
            one.sums["kafka"] = ids.get(window, NOTHING).hashes
            one.failed = (left[1] + left[2]).hashes
            here = read.committed.get(window, Committed()) if self._coverage.archived(window) else None
            published = ids.get(window, NOTHING) if here is None else here.ids
            if here is not None:
                one.committed = sum((part.events for part in left), here.ids.events)
            if self._coverage.counted(window):
                all_of_it = read.written.get(window, NOTHING)
                one.committed, one.sums["ledger"] = all_of_it.events, all_of_it.hashes
                known[window] = sum(left, published)
            if self._coverage.lost(window):
                one.state = EXPIRED
            elif here is not None and not (here.complete and here.wholes == wholes.get(window, NOTHING)):
                one.state = DIFFERENT
        for window in (differ := unlike(known, read.written, self._scope.former)):
            if audited[window].state != EXPIRED:
                audited[window].state = DIFFERENT
        self.explained = known.keys() - differ
        return audited

    def _compare_groups(self, audited: Mapping[Window, WindowAudit], read: Readings) -> None:
        for group in read.groups:
            expected, waiting, unsure = expected_of(group, read.cells)
            totals = by_minute(expected)
            for window, one in audited.items():
                if window.topic not in group.topics or one.state == EXPIRED or group.forgot(window.minute):
                    continue
                here = read.applied.get((group.name, window.minute), NOTHING)
                count = one.groups[group.name] = GroupCount(None, waiting.get(window, 0))
                if group.remembers:
                    mine = expected.get(window, NOTHING)
                    count.applied, count.hashes = mine.events, mine.hashes
                    if here != totals.get(window.minute, NOTHING) or window.minute in unsure:
                        one.state = DIFFERENT

    # -- one by one

    def _one_by_one(self, audited: dict[Window, WindowAudit]) -> None:
        compared = 0
        # Of a topic that is gone too: its events are missing.
        topics = sorted({place.topic for place in self._extents} | {window.topic for window in audited})
        for minutes in list(parts(audited)):
            # All topics of a minute: an event of another one may have come meanwhile.
            windows = [Window(topic, minute) for minute in minutes for topic in topics]
            for window in windows:
                state = EXPIRED if self._coverage.lost(window) else EQUAL
                audited.setdefault(window, WindowAudit(window, None, 0, state=state))
            count = sum(audited[window].kafka for window in windows)
            if compared and compared + count > _MOST_COMPARED:
                self._audit.stop(_MOST_COMPARED, minutes[0])
                return
            compared += count
            self._compare(audited, windows)

    def _compare(self, audited: Mapping[Window, WindowAudit], windows: Sequence[Window]) -> None:
        """Compare the events of these windows: all windows of their minutes."""
        self._topics.renamed.clear()
        new, _ = self._topics.since(self._extents)
        on_kafka = self._topics.events(windows, self._topics.spans({window.minute for window in windows}), new)
        with self._tables.snapshot():
            archived = self._tables.events(windows)
            left = [self._tables.ids(table, windows) for table in UNPUBLISHED]
            written = self._tables.ledger() if self._ledger else {}
        taken = self._ids_of_groups(windows, on_kafka)
        more, hidden = self._topics.since(new)
        hides = {place.topic for place in hidden}
        late = self._topics.events(windows, more)
        self._look_again()
        accounted: dict[Window, tuple[Sum, bool]] = {}
        for window in windows:
            one, records = audited[window], on_kafka[window]
            known = set(archived[window]).union(*(ids[window] for ids in left))
            if self._coverage.lost(window):
                one.state = EXPIRED
                # What is left may be what the ledger counts for another topic.
                known |= records.keys() | late[window].keys()
                accounted[window] = Sum(len(known), self._sum(known)), True
                continue
            one.state = EQUAL
            one.kafka, one.repeated = len(records), sum(map(len, records.values())) - len(records)
            one.sums["kafka"] = self._sum(records)
            one.waiting, one.dead, one.discarded = (len(ids[window]) for ids in left)
            one.failed = self._sum(chain(*(ids[window] for ids in left[1:])))
            dead, discarded = set[bytes](), set[bytes]()
            if self._coverage.archived(window):
                one.committed = len(known)
                self._compare_archive(one, archived[window], records, late[window], hidden)
                known |= self._unarchived(one, records, known, written)
                dead, discarded = (ids[window] - archived[window].keys() for ids in left[1:])
            else:
                one.committed = None
                known |= records.keys() | late[window].keys()
                everything = known | self._topics.renamed[window].keys()
                if everything > known and self._is_in_ledger(window, everything, written):
                    self._renamed.add(window.topic)
                    known, one.state = everything, EXPIRED
                # One that was discarded may have been sent again by hand: that is not known here.
                dead = left[1][window]
            for event_id, kind, text in superfluous(records, known, dead, discarded):
                self._differ(one, kind, event_id, text)
            # Without an archive, what is between the outbox and its readers may be under way.
            whole = self._coverage.archived(window) or not (one.waiting or window.topic in hides)
            accounted[window] = Sum(len(known), self._sum(known)), whole
        self.explained |= {one for one in windows if self._coverage.counted(one) and not self._coverage.lost(one)}
        for one, kind, text in unlike_ledger(
            audited, accounted, written, self._coverage, self._scope.former, self._now, self._closed
        ):
            self.ledger_differences[one.window] = kind
            self.explained.discard(one.window)
            self._differ(one, kind, None, text)
        windows = [window for window in windows if audited[window].state != EXPIRED]
        for group, applied, excused in taken:
            self._compare_group(audited, windows, group, applied, excused, on_kafka, late)

    def _unarchived(
        self,
        window: WindowAudit,
        on_kafka: Mapping[bytes, Sequence[OnKafka]],
        known: set[bytes],
        written: Mapping[Window, Sum],
    ) -> set[bytes]:
        """Return the ids on Kafka of events that were committed, or may have been, while relays kept no archive."""
        more = on_kafka.keys() - known
        if more and self._is_in_ledger(window.window, known | more, written):
            return more
        more = {one for one in more if on_kafka[one][0].milliseconds > self._coverage.archive_until * 1000}
        if more:
            window.committed = None
        return more

    def _is_in_ledger(self, window: Window, ids: Collection[bytes], written: Mapping[Window, Sum]) -> bool:
        """Return whether these are all events that the ledger has of a window."""
        return self._coverage.counted(window) and written.get(window) == Sum(len(ids), self._sum(ids))

    def _compare_archive(
        self,
        one: WindowAudit,
        archived: Mapping[bytes, Archived],
        on_kafka: Mapping[bytes, Sequence[OnKafka]],
        late: Mapping[bytes, Sequence[OnKafka]],
        hidden: Mapping[Partition, range],
    ) -> None:
        deleted, hides = set(), {place.topic for place in hidden}
        for event_id, row in archived.items():
            records = on_kafka.get(event_id) or late.get(event_id) or ()
            if not records:
                if row.place is None:
                    was_deleted, is_hidden = self._coverage.cut(one.window), one.window.topic in hides
                else:
                    was_deleted = (row.offset or 0) < self._coverage.low.get(row.place, 0)
                    is_hidden = row.offset in hidden.get(row.place, ())
                places = self._topics.renamed[one.window].get(event_id, ())
                if any(row.place is None or place == (row.place, row.offset) for place in places):
                    self._renamed.add(one.window.topic)
                    was_deleted = True
                if was_deleted:
                    deleted.add(event_id)
                    continue
                if is_hidden:
                    one.waiting += 1
                    continue
                where = "" if row.place is None else f", was at partition {row.place.number} offset {row.offset}"
                self._differ(one, "missing", event_id, f"was published{where}, and is not on Kafka")
                continue
            if row.place is None:
                self._placed[event_id] = records[0].place, records[0].offset
            for kind, text in unlike_archived(row, records):
                self._differ(one, kind, event_id, text)
        if deleted and one.state == EQUAL:
            one.state = EXPIRED
        self._deleted |= deleted

    def _ids_of_groups(
        self, windows: Sequence[Window], on_kafka: Mapping[Window, Mapping[bytes, Any]]
    ) -> list[tuple[Group, set[bytes], set[tuple[Partition, int]]]]:
        if self._groups is None:
            return []
        minutes = sorted({window.minute for window in windows})
        untimed = [one for one in chain.from_iterable(on_kafka.values()) if minute_of_id(one) is None]
        topics = {place.topic for place in self._extents}
        found = []
        with self._groups.snapshot():
            for group in self._groups.groups(topics):
                ids = self._groups.ids(group, minutes, untimed) if group.remembers else set()
                found.append((group, ids, self._groups.excused(group)))
        return found

    def _compare_group(
        self,
        audited: Mapping[Window, WindowAudit],
        windows: Sequence[Window],
        group: Group,
        applied: set[bytes],
        excused: set[tuple[Partition, int]],
        on_kafka: Mapping[Window, Mapping[bytes, Sequence[OnKafka]]],
        late: Mapping[Window, Mapping[bytes, Sequence[OnKafka]]],
    ) -> None:
        mine = [one for one in windows if one.topic in group.topics and not group.forgot(one.minute)]
        for window in mine:
            one = audited[window]
            count = one.groups[group.name] = GroupCount(0 if group.remembers else None)
            for event_id, records in on_kafka[window].items():
                passed = [record for record in records if record.offset < group.positions.get(record.place, 0)]
                if not passed:
                    count.waiting += 1
                elif text := group.gave_up(passed):
                    self._differ(one, "missing", event_id, text, group.name)
                elif event_id in applied:
                    count.applied = (count.applied or 0) + 1
                    count.hashes = (count.hashes + hash_of(self._key, event_id)) % MODULUS
                elif text := group.lacks(passed, excused, partial=group.name in self._scope.partial):
                    self._differ(one, "missing", event_id, text, group.name)
        if not mine or not group.remembers or not self._reads_only_ours(group):
            return
        known = self._topics.copies.union(self._deleted, *on_kafka.values(), *late.values())
        for event_id in applied - known:
            minute = minute_of_id(event_id)
            here = next((one for one in mine if minute is None or one.minute == minute), None)
            if here and all(audited[Window(topic, here.minute)].state != EXPIRED for topic in group.topics):
                self._differ(audited[here], "unknown", event_id, "was applied, and is not on Kafka", group.name)

    def _sum(self, ids: Iterable[bytes]) -> int:
        return sum(hash_of(self._key, one) for one in ids) % MODULUS

    def _reads_only_ours(self, group: Group) -> bool:
        """Return whether all that a group has applied must be among the audited events."""
        read = {place.topic for place in self._extents}
        return group.reads <= read and not any(self._topics.others[topic] for topic in group.topics)

    def _order(self, misplaced: Sequence[Misplaced], audited: Mapping[Window, WindowAudit]) -> None:
        if len(misplaced) == MOST_MISPLACED:
            last = misplaced[-1].window.minute
            self._audit.notes.append(
                f"{MOST_MISPLACED:,} events are out of order before the end of {minute_start(last):%Y-%m-%d %H:%M}: "
                "the order of later ones was not compared; give a shorter range"
            )
            for later in audited.values():
                if later.window.minute >= last and later.state != EXPIRED:
                    later.state = DIFFERENT
        # What a topic that was created again has lost stands before nothing.
        gone = {one.event_id for one in self._audit.differences if one.kind == "missing" and one.group is None}
        for window, kind, event_id, text in out_of_order(one for one in misplaced if one.before_id not in gone):
            if (one := audited.get(window)) is not None and one.state != EXPIRED:
                self._differ(one, kind, event_id, text)

    def _differ(
        self, one: WindowAudit, kind: str, event_id: bytes | str | None, text: str, group: str | None = None
    ) -> None:
        if self._scope.former and kind != "repeated":
            return
        one.state = DIFFERENT
        name = str(uuid.UUID(bytes=event_id)) if isinstance(event_id, bytes) else event_id
        self._audit.add(one.window, Difference(kind, name, one.window.topic, one.window.start, text, group))
