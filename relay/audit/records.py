"""How the records of events on Kafka differ from what must be there, one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from relay.audit.tables import Archived
from relay.audit.topics import OnKafka


def repeats(on_kafka: Mapping[bytes, Sequence[OnKafka]]) -> Iterator[tuple[bytes, str]]:
    for event_id, records in on_kafka.items():
        if len(records) > 1:
            places = ", ".join(f"{record.place.number} offset {record.offset}" for record in records)
            yield event_id, f"stands {len(records)} times: partition {places}"


def kept_back(
    on_kafka: Mapping[bytes, Sequence[OnKafka]], dead: Collection[bytes], discarded: Collection[bytes]
) -> Iterator[tuple[bytes, str]]:
    """Yield events that are on Kafka although they failed for good, each with a text."""
    for event_id, records in on_kafka.items():
        if event_id in dead or event_id in discarded:
            what = "is a dead letter: a retry would send it again" if event_id in dead else "was discarded"
            place = f"partition {records[0].place.number} offset {records[0].offset}"
            yield event_id, f"{place} has it, and it {what}"


def unknown(on_kafka: Mapping[bytes, Sequence[OnKafka]], known: Collection[bytes]) -> Iterator[tuple[bytes, str]]:
    for event_id, records in on_kafka.items():
        if event_id not in known:
            place = f"partition {records[0].place.number} offset {records[0].offset}"
            yield event_id, f"{place} has it, and the outbox has no row of it"


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
