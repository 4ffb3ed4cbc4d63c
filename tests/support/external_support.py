"""Reservations without Spark: a batch as a task would have it, and an External that calls the provider."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nursery
import psycopg
import pytest
from provider import Provider
from uuid_utils.compat import uuid7

from outbox.external import Call, External, HttpAsk, HttpCall, Settled
from outbox.external.caller import Caller

BATCH = """
CREATE TEMPORARY TABLE batch (message_id uuid, message_topic text, message_part int, message_offset bigint,
    message_key text, message_type text, message_time timestamptz, message_tombstone boolean,
    order_id text, cents bigint) ON COMMIT DROP"""
ORDERS = "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, state text NOT NULL, times int NOT NULL DEFAULT 1)"
SET = """
INSERT INTO orders (id, state) VALUES (%(request)s ->> 'order', '{}')
ON CONFLICT (id) DO UPDATE SET state = excluded.state, times = orders.times + 1"""


def payments(provider: str, **changes: Any) -> External:
    """An External with short waits; ``ask`` and ``cancel`` only when ``changes`` names them as True."""
    declared: dict[str, Any] = {
        "name": "payments",
        "group": "orders",
        "request": "jsonb_build_object('order', order_id, 'cents', cents)",
        "call": HttpCall(f"{provider}/charges"),
        "on_confirmed": SET.format("paid"),
        "on_cancelled": SET.format("cancelled"),
        "timeout": 20.0,
        "first_wait": 0.02,
        "longest_wait": 0.05,
        **changes,
    }
    if declared.get("cancel") is True:
        declared["cancel"] = HttpCall(
            f"{provider}/cancel", lambda call: {"order": call.request["order"], "key": call.call_key}
        )
    if declared.get("ask") is True:
        declared["ask"] = HttpAsk(lambda call: f"{provider}/charges/{call.call_key}", hosts=["127.0.0.1"])
    return External(**declared)


class Sink:
    """The sink's database, with reservations made as a task makes them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._offset = 0
        with self.connect() as connection:
            connection.execute(ORDERS)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, connect_timeout=10)

    def reserve(self, external: External, orders: Iterable[str | tuple[str, str | None]]) -> list[Any]:
        """Reserve for orders, or (order, key) pairs; the key is the order if not given. Gives the message ids."""
        rows = []
        for order in orders:
            name, key = (order, order) if isinstance(order, str) else order
            rows.append((uuid7(), "t", 0, self._offset, key, "Ordered", False, name, 100))
            self._offset += 1
        self.write(external, rows)
        return [row[0] for row in rows]

    def write(self, external: External, rows: list[tuple[Any, ...]]) -> None:
        with self.connect() as connection, connection.transaction():
            connection.execute(BATCH)
            connection.cursor().executemany(
                "INSERT INTO batch VALUES (%s, %s, %s, %s, %s, %s, now(), %s, %s, %s)", rows
            )
            connection.execute(external.reserve().encode())

    def drain(self, external: External, **options: Any) -> dict[str, Any]:
        counts = asdict(external.drain(self.connect, threading.Event(), **options))
        return {name: count for name, count in counts.items() if count and name != "name"}

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query, values or None).fetchall()

    def states(self) -> dict[str, str]:
        """order: state of its reservation"""
        return dict(self.rows("SELECT request ->> 'order', state FROM consumer.reservations"))

    def orders(self) -> dict[str, tuple[str, int]]:
        """order: (state, how often the SQL beside the settlement ran)"""
        return {row[0]: row[1:] for row in self.rows("SELECT id, state, times FROM orders")}


def run_and_die(url: str, provider: str, point: str, timeout: str) -> None:
    """Be a process of its own that settles everything, and is killed at a point; ``none`` for not at all."""

    def die(here: str) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[[Call], Any], name: str) -> Callable[[Call], Any]:
        def called(call: Call) -> Any:
            die(f"before {name}")
            try:
                return function(call)
            finally:
                die(f"after {name}")

        return called

    plain = payments(provider, cancel=True)

    def settling(text: str, name: str) -> Callable[[psycopg.Cursor[Any], Settled], None]:
        def effect(cursor: psycopg.Cursor[Any], settled: Settled) -> None:
            cursor.execute(text.encode(), {"request": psycopg.types.json.Jsonb(settled.request)})
            die(f"in the {name} transaction")

        return effect

    external = payments(
        provider,
        call=around(plain.call, "call"),
        cancel=around(plain.cancel, "cancel"),
        on_confirmed=settling(SET.format("paid"), "confirming"),
        on_cancelled=settling(SET.format("cancelled"), "cancelling"),
        timeout=float(timeout),
        lease=float(timeout) * 1.25,
        # Every kill counts as an attempt, and so does every call that a slow machine does not end in time.
        max_attempts=1000,
    )

    def report(text: str, figures: Mapping[str, Any]) -> None:
        die(f"told {text}")

    Caller(external, lambda: psycopg.connect(url, autocommit=True), report).run(threading.Event())


if __name__ == "__main__":
    run_and_die(*sys.argv[1:])


@pytest.fixture
def provider(tmp_path):
    with Provider(tmp_path / "book.sqlite") as started:
        yield started


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    return Sink(outbox_postgres.url)


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def lease_runs_out(sink: Sink) -> None:
    """As time would have it: leases that are long enough for any machine need not be waited for."""
    with sink.connect() as connection:
        connection.execute(
            "UPDATE consumer.reservations SET next_attempt_at = now() WHERE state IN ('calling', 'cancelling')"
        )


@pytest.fixture
def outbox_cli(sink, provider, tmp_path):
    """Run ``outbox …`` in a process of its own; gives the JSON object it prints last."""
    (tmp_path / "cli_external.py").write_text(
        f"from external_support import payments\nexternal = payments({provider.url!r}, cancel=True, max_attempts=3)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])

    def run(*arguments: str, status: int = 0) -> Any:
        done = nursery.run(
            ["-m", "relay.cli", *arguments], os.environ | {"OUTBOX_DATABASE_URL": sink.url, "PYTHONPATH": paths}
        )
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout.splitlines()[-1]) if status == 0 else done.stderr

    return run
