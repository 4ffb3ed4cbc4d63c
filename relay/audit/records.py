"""How the records of events on Kafka differ from what must be there, and their number from the ledger's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from outbox._clients.counting import counted
from relay.audit.coverage import Coverage
from relay.audit.findings import OPEN, WindowAudit
from relay.audit.sums import NOTHING, Sum, Window, unlike
from relay.audit.tables import Archived
from relay.audit.topics import OnKafka


def superfluous(
    on_kafka: Mapping[bytes, Sequence[OnKafka]],
    known: Collection[bytes],
    dead: Collection[bytes],
    discarded: Collection[bytes],
) -> Iterator[tuple[bytes, str, str]]:
    """Yield events that have records which must not be there, each with the kind of the difference and a text.

    known  the events of the outbox; of these some failed for good, and are ``dead`` letters or were ``discarded``.
    """
    for event_id, records in on_kafka.items():
        places = [f"{record.place.number} offset {record.offset}" for record in records]
        if len(records) > 1:
            yield event_id, "repeated", f"stands {len(records)} times: partition {', '.join(places)}"
        has_it = f"partition {places[0]} has it, and"
        if event_id not in known:
            text = f"{has_it} the outbox has no row of it: never committed, or published by a relay without an archive"
            yield event_id, "unknown", text
        elif event_id in dead:
            yield event_id, "repeated", f"{has_it} it is a dead letter: a retry would send it again"
        elif event_id in discarded:
            yield event_id, "repeated", f"{has_it} it was discarded"


def unlike_archived(row: Archived, records: Sequence[OnKafka]) -> Iterator[tuple[str, str]]:
    """Yield the kinds in which an event's records differ from its row in the archive, each with a text."""
    if row.place is not None and not any((one.place, one.offset) == (row.place, row.offset) for one in records):
        record = records[0]
        kind = "order" if record.place == row.place else "partition"
        text = (
            f"was published to partition {row.place.number} offset {row.offset}, and stands in partition "
            f"{record.place.number} at offset {record.offset}"
        )
        yield kind, text
    if any(record.content != row.content for record in records):
        yield "payload", "key, type, value or headers differ from those in the archive"


def unlike_ledger(
    found: Mapping[Window, WindowAudit],
    accounted: Mapping[Window, tuple[Sum, bool]],
    written: Mapping[Window, Sum],
    coverage: Coverage,
    former: Collection[str],
    now: int,
    closed: int,
) -> Iterator[tuple[WindowAudit, str, str]]:
    """Yield windows of which the ledger counts something else, each with the kind of the difference and a text.

    accounted  by window, the sum over the events that are known, and whether these must be all.
    former     topics that count only for others: see ``unlike``.
    now        this minute is not over. From ``closed`` on, transactions may still bring events.
    """
    accounted = {window: known for window, known in accounted.items() if coverage.counted(window)}
    for window in accounted:
        in_ledger = written.get(window, NOTHING)
        found[window].committed, found[window].sums["ledger"] = in_ledger.events, in_ledger.hashes
    for window in unlike({window: known for window, (known, _) in accounted.items()}, written, former):
        one, (known, whole) = found[window], accounted[window]
        if coverage.lost(window):
            continue
        if not whole:
            # The rest may be what waits, or what an open transaction hides.
            one.state = OPEN
            continue
        # Of a minute that is not over, the readings differ by what is written meanwhile; and the last reading of Kafka
        # may have what is committed after that of the tables.
        events = written.get(window, NOTHING).events
        missing = events >= known.events
        if window.minute < (now if missing else min(now, closed)):
            where = "its archive" if coverage.archived(window) else "on Kafka"
            text = f"{counted(events, 'event')} written, and {known.events} in the outbox or {where}"
            if where == "on Kafka":
                text += "; if routes have changed since, give --topic for the old and the new topic"
            yield one, "missing" if missing else "unknown", text
