"""docs/guides/inbox.md does what it says: its examples apply each message once."""

from __future__ import annotations

import threading

import psycopg
from docs_support import blocks
from inbox_support import Log
from support import look_up, wait_until

TABLES = """
CREATE TABLE invoices (id integer GENERATED ALWAYS AS IDENTITY, order_id text);
CREATE TABLE shipments (id integer GENERATED ALWAYS AS IDENTITY, order_id text)"""


def test_the_examples_run(outbox_postgres, outbox_kafka):
    log = Log(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute(TABLES)
    ids = log.produce([f"o-{number}" for number in range(20)])
    log.produce(["repeated"] * 5, ids=ids[:5])
    loop, consumer, at_most_once = [block for block in blocks("python") if block.page == "docs/guides/inbox.md"]
    orders = [(f"o-{number}",) for number in range(20)]

    def rows(table: str) -> list[tuple[str]]:
        return look_up(outbox_postgres.url, f"SELECT order_id FROM {table} ORDER BY id")

    namespace = {"url": outbox_postgres.url, "servers": log.servers, "__name__": __name__}
    moved = "SELECT 1 FROM consumer.offsets WHERE grp LIKE %s AND next_offset = 25 AND unconfirmed_from IS NULL"
    sent: list[str] = []
    namespace["mail"] = sent.append
    polled = iter(range(10_000))
    namespace["running"] = lambda: len(rows("invoices")) < 20 and next(polled) < 1_000
    execute(loop, log, namespace)
    namespace["engine"].dispose()
    assert rows("invoices") == orders

    def stop(group: str) -> None:
        try:
            wait_until(lambda: look_up(outbox_postgres.url, moved, f"{group}-%"), 60, "the positions")
        finally:
            namespace["consumer"].stop()

    for group, block in (("shipping", consumer), ("passwords", at_most_once)):
        watch = threading.Thread(target=stop, args=(group,))
        text = block.text.replace("consumer.run(", "watch.start()\nconsumer.run(")
        assert text != block.text
        namespace["watch"] = watch
        execute(block, log, namespace, text)
        watch.join(60)
    assert rows("shipments") == orders
    assert sent == [order for (order,) in orders]


def execute(block, log: Log, namespace, text: str | None = None) -> None:
    own = (text or block.text).replace('"order-events"', repr(log.topic))
    for group in ("billing", "shipping", "passwords"):
        own = own.replace(f'"{group}"', repr(f"{group}-{log.group}"))
    exec(compile("\n" * (block.line - 1) + own, block.page, "exec", dont_inherit=True), namespace)
