"""Which messages come after a dead letter of their key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from outbox.consumer.model import MessageRef

if TYPE_CHECKING:
    import pyarrow as pa


def behind(
    keys: Mapping[tuple[str, bytes], MessageRef | None], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Return the places of messages that come after a dead letter of their key.

    keys  topic and key → place of the dead letter. Behind it are the later messages of its partition, and all messages
          of the key in other partitions. Without a place all messages of the key are behind it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    by_topic: dict[str, list[bytes]] = {}
    for topic, key in keys:
        by_topic.setdefault(topic, []).append(key)
    wanted = {topic: pa.array(of_topic, pa.binary()) for topic, of_topic in by_topic.items()}
    for batch in batches:
        topics, kafka_keys, places = batch.column("topic"), batch.column("key"), batch.drop_columns("key")
        found: list[int] = []
        for topic in wanted.keys() & set(pc.unique(topics).to_pylist()):
            here = pc.and_(pc.equal(topics, topic), pc.is_in(kafka_keys, value_set=wanted[topic]))
            for row in pc.indices_nonzero(here).to_pylist():
                dead = keys[topic, kafka_keys[row].as_py()]
                _, part, offset = (column[row].as_py() for column in places.columns)
                if dead is None or part != dead[1] or offset > dead[2]:
                    found.append(row)
        yield places.take(pa.array(sorted(found), pa.int64()))
