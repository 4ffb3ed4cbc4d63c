from __future__ import annotations

import psycopg


def test_a(outbox_postgres_server, outbox_kafka):
    url = outbox_postgres_server.create_database("x")
    with psycopg.connect(url) as c:
        c.execute("select 1")
    from confluent_kafka import Producer

    t = outbox_kafka.create_topic(outbox_kafka.name("Order"), partitions=2)
    p = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    for i in range(100):
        p.produce(t, str(i).encode(), key=str(i).encode())
    p.flush()
    assert len(outbox_kafka.consume(t)) == 100
    assert len(outbox_kafka.consume(t, count=7)) == 7
