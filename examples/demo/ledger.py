"""The demo's ledger: counts what the shop committed, what Kafka holds, and what the sink applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

PARTITIONS: Final = 4
_OFFSETS: Final = sql.Identifier("consumer", "offsets")

# Business rows on one side, the sink's table on the other. `seq` is how many events an order's transactions committed;
# the sink counts what it applied, adds up the amounts, and notes every event that did not follow its predecessor.
_RECONCILE: Final = """
WITH pairs AS (
    SELECT o.id AS source_id, t.order_id AS sink_id, coalesce(o.seq, 0) AS committed,
           coalesce(t.events_applied, 0) AS applied, coalesce(t.out_of_order, 0) AS out_of_order,
           o.total_cents IS NOT DISTINCT FROM t.total_cents AND o.status IS NOT DISTINCT FROM t.status
               AND o.customer IS NOT DISTINCT FROM t.customer AS same
      FROM shop.orders AS o FULL JOIN {sink} AS t ON t.order_id = o.id)
SELECT coalesce(sum(committed), 0)::bigint,
       coalesce(sum(applied), 0)::bigint,
       coalesce(sum(greatest(committed - applied, 0)), 0)::bigint,
       coalesce(sum(greatest(applied - committed, 0)), 0)::bigint,
       coalesce(sum(out_of_order), 0)::bigint,
       count(*) FILTER (WHERE NOT same),
       count(*) FILTER (WHERE source_id IS NULL)
  FROM pairs"""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The comparison of source and sink, row by row.

    published  offsets that the topic's messages take: repeats and, with exactly-once, the markers of transactions too.
    repeated   messages that repeat an event, as after the kill of a relay. The consumer has dropped them.
    """

    committed: int
    published: int
    repeated: int
    applied: int
    lost: int
    applied_twice: int
    out_of_order: int
    differing_orders: int
    phantom_orders: int

    @property
    def clean(self) -> bool:
        """Return whether every committed event was applied exactly once, in order, and nothing else was."""
        wrong = self.lost, self.applied_twice, self.out_of_order, self.differing_orders, self.phantom_orders
        return self.committed == self.applied and self.published >= self.committed and not any(wrong)

    def line(self) -> str:
        text = (
            f"committed {self.committed} · repeated on Kafka {self.repeated} · applied {self.applied} · "
            f"lost {self.lost} · applied twice {self.applied_twice} · out of order {self.out_of_order}"
        )
        if self.differing_orders or self.phantom_orders:
            text += f" · orders that differ {self.differing_orders} · rolled back but applied {self.phantom_orders}"
        return text


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures at one moment.

    unread   how many messages of the topic the consumer has not read. Like ``published``, it counts a transaction's
             markers too.
    """

    committed: int
    published: int
    applied: int
    backlog: int
    oldest_seconds: float | None
    unread: int


class Ledger:
    """Reads the figures. ``sink`` is the sink's table as (schema, name)."""

    def __init__(self, url: str, bootstrap: str, topic: str, sink: tuple[str, str]) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._topic = topic
        self._sink = sql.Identifier(*sink)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "outbox-demo-ledger",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )

    def look(self) -> Figures:
        """Return the figures. A missing table counts as empty. Raises KafkaException if Kafka is away."""
        messages, end = self._topic_size()
        committed = self._sum("seq", sql.Identifier("shop", "orders"))
        applied = self._sum("events_applied", self._sink)
        row = self._connection.execute(
            "SELECT count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8 FROM outbox.events"
        ).fetchone()
        assert row is not None
        # The topic has one group, whose positions are the offsets to be read next.
        read = self._sum("next_offset", _OFFSETS)
        return Figures(committed, messages, applied, row[0], row[1], max(0, end - read))

    def reconcile(self) -> Reconciliation:
        """Compare source and sink in one statement over one snapshot. Raises KafkaException if Kafka is away."""
        row = self._connection.execute(sql.SQL(_RECONCILE).format(sink=self._sink)).fetchone()
        assert row is not None
        committed, applied, lost, twice, disorder, differing, phantom = row
        published, repeated = self._topic_size()[0], self._sum("duplicates", _OFFSETS)
        return Reconciliation(committed, published, repeated, applied, lost, twice, disorder, differing, phantom)

    def close(self) -> None:
        self._consumer.close()
        self._connection.close()

    def _topic_size(self) -> tuple[int, int]:
        """Return how many messages the topic has, and the sum of its partitions' ends."""
        messages = end = 0
        for partition in range(PARTITIONS):
            low, high = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=10)
            messages += high - low
            end += high
        return messages, end

    def _sum(self, column: str, table: sql.Identifier) -> int:
        query = sql.SQL("SELECT coalesce(sum({}), 0)::bigint FROM {}").format(sql.Identifier(column), table)
        try:
            row = self._connection.execute(query).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0
        assert row is not None
        return int(row[0])
