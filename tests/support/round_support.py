"""What the tests of rounds share: messages and dead letters, put there by hand."""

from __future__ import annotations

import json

from bench import ided, order
from uuid_utils.compat import uuid7

__all__ = ["order"]

NUL = '{"order_id": "a\\u0000b", "seq": 1, "customer": "c", "amount_cents": 10, "status": "s"}'


def letters(bench, columns="message_offset, reason"):
    return bench.rows(f"SELECT {columns} FROM consumer.dead_letters ORDER BY part, message_offset")


def put(bench, value, key="k", event_id=None, kind="order.placed", **where):
    event_id = uuid7() if event_id is None else event_id
    headers = [*ided(event_id), ("ce_type", kind.encode())]
    data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    bench.send_raw(data, headers, key, **where)
    return event_id


def retry(bench):
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
