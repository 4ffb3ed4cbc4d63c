"""The order and the partitions of keys, however many of them are not as they were."""

from __future__ import annotations

import datetime as dt

import psycopg
from audit_support import Pipeline, pipeline
from support import order

from relay.audit import comparison, tables
from relay.audit.sums import minute_of, minute_start
from relay.audit.tables import MOST_MISPLACED, Tables, out_of_order
from relay.kafka.routing import Router

__all__ = ["order", "pipeline"]

_MOVED = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, published_at,
                              topic, partition, "offset")
SELECT 0, n, (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000'
              || lpad(to_hex(n), 12, '0'))::uuid, 'A', key, 'E', at, now(), 't', partition, n
  FROM (SELECT n, %(start)s + n * interval '35 milliseconds' AS at,
               CASE WHEN n <= 2 * %(keys)s THEN 'k' || n %% %(keys)s ELSE 'back' END AS key,
               CASE WHEN n <= 2 * %(keys)s THEN (n - 1) / %(keys)s ELSE n %% 2 END AS partition
          FROM generate_series(1, 2 * %(keys)s + 3) AS n) AS events"""


def test_a_key_that_came_back_among_many_that_moved_for_good(outbox_postgres):
    """As where partitions are added: each key leaves its own once. The last key leaves another one, and comes back."""
    end = minute_of(dt.datetime.now(dt.UTC))
    hour = range(end - 60, end)
    keys = MOST_MISPLACED + 1_000
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(_MOVED, {"start": minute_start(hour.start), "keys": keys})
        for topics, count in ((None, 1), (["t"], 1), (["other"], 0)):
            audited = Tables(connection, "outbox", Router({}), topics, hour, b"key")
            with audited.snapshot():
                found = list(out_of_order(audited.misplaced()))
            assert [kind for _, kind, _, _ in found] == ["partition"] * count
            assert all("its key back before and after it" in text for *_, text in found)


def test_more_events_out_of_order_than_one_audit_finds(pipeline: Pipeline, monkeypatch):
    """What is behind them is not equal."""
    ids = [one for ago in (600, 480) for one in pipeline.add(2, keys=1, ago=ago)]
    pipeline.published()
    pipeline.run("UPDATE outbox.published SET id = id + CASE id % 2 WHEN 1 THEN 1 ELSE -1 END WHERE id > 0")
    assert pipeline.differences() == sorted(("order", one) for one in (ids[0], ids[2]))
    for module in (comparison, tables):
        monkeypatch.setattr(module, "MOST_MISPLACED", 1)
    status, found = pipeline.audit()
    assert (status, [one["event_id"] for one in found["differences"]]) == (1, ids[:1])
    assert {one["state"] for one in found["windows"]} == {"different"}
    assert any(note.startswith("1 events are out of order before the end of ") for note in found["notes"])
