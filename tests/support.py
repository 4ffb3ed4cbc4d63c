"""What several tests need: a load of business transactions, and a checker that holds the topic against them.

Fixtures in here are for import.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Self

import psycopg
import pytest
from psycopg import sql

from outbox import Event, Outbox
from outbox.testing._process import patience
from outbox.testing.fixtures import RelayProcess


@pytest.fixture
def order(outbox_kafka):
    """An aggregate type, and its topic of three partitions."""
    kind = outbox_kafka.name("Order")
    return kind, outbox_kafka.create_topic(f"{kind.lower()}-events", 3)


def wait_until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "the condition") -> Any:
    """Wait for a condition with a deadline, which a slow machine may pass $OUTBOX_PATIENCE times; give its value."""
    seconds *= patience()
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)


def stop_clock(url: str) -> tuple[dt.date, str]:
    """Give a day (UTC) and libpq's options for connections on which it stays noon of that day, however late it gets.

    They find now() and clock_timestamp() in a schema of their own first. Defaults of tables still tell the real time.
    The day is yesterday: what goes by the real time after all fails at any hour, and not at midnight only.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        [(today,)] = connection.execute("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date - 1").fetchall()
        noon = dt.datetime.combine(today, dt.time(12), dt.UTC)
        connection.execute("CREATE SCHEMA stopped; GRANT USAGE ON SCHEMA stopped TO public")
        for function in ("now", "clock_timestamp"):
            connection.execute(
                sql.SQL("CREATE FUNCTION stopped.{}() RETURNS timestamptz LANGUAGE sql STABLE RETURN {}").format(
                    sql.Identifier(function), sql.Literal(noon)
                )
            )
    return today, "-c search_path=stopped,pg_catalog,public"


def backlog(url: str) -> int:
    """How many events are not published yet; -1 while Postgres is away."""
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            return connection.execute("SELECT count(*) FROM outbox.events").fetchone()[0]
    except psycopg.OperationalError:
        return -1


def drained(url: str, seconds: float = 60.0) -> None:
    """Wait until all events are published."""
    wait_until(lambda: backlog(url) == 0, seconds, "the outbox to drain")


def caught_up(url: str) -> None:
    """Wait until what is in the outbox now has left it, however much comes behind it."""
    with psycopg.connect(url, autocommit=True) as connection:
        highest = connection.execute("SELECT coalesce(max(id), 0) FROM outbox.events").fetchone()[0]
        left = "SELECT count(*) FROM outbox.events WHERE id <= %s"
        what = "the relay to publish what is there"
        wait_until(lambda: connection.execute(left, (highest,)).fetchone()[0] == 0, 90, what)


def await_stops(relay: RelayProcess, lanes: int, times: int) -> None:
    """Wait until each of the lanes has been stopped so often, by a relay that logs JSON."""

    def stopped() -> bool:
        lines = [line for line in relay.log().splitlines() if '"lane stopped"' in line]
        counts = Counter(int(found[1]) for line in lines if (found := re.search(r'"lane": (\d+)', line)))
        return len(counts) == lanes and min(counts.values()) >= times

    wait_until(stopped, what=f"every lane to stop {times} times")


def owners(url: str) -> dict[str, int]:
    """Living lanes by owner."""
    with psycopg.connect(url, autocommit=True) as connection:
        return dict(
            connection.execute(
                "SELECT owner, count(*) FROM outbox.lanes WHERE lease_until > clock_timestamp() GROUP BY owner"
            ).fetchall()
        )


class Load:
    """Business transactions from several threads: each raises a counter of some of its keys and writes the events.

    Every key has one writer at a time, so its counters are committed in order. Some transactions are rolled back, and
    some stay open for a while before they commit. What is committed is in the table ``business``. Each thread rests
    ``pause`` seconds between transactions, or the load alone would keep a small machine busy.
    """

    def __init__(
        self, url: str, aggregate_type: str, *, threads: int = 3, keys: int = 40, pause: float = 0.005
    ) -> None:
        self._url = url
        self._type = aggregate_type
        self._pause = pause
        self._stop = threading.Event()
        self._error: BaseException | None = None
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS business (key text PRIMARY KEY, seq int NOT NULL)")
        self._threads = [
            threading.Thread(target=self._run, args=(n, [f"k{n}-{key}" for key in range(keys)]), daemon=True)
            for n in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Finish the transactions under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60 * patience())
        if self._error is not None:
            raise self._error
        assert not any(thread.is_alive() for thread in self._threads), "the load does not end"

    def drain(self, seconds: float = 60.0) -> None:
        """Finish, and wait until all events are published."""
        self.stop()
        drained(self._url, seconds)

    def committed(self) -> int:
        """How many events are committed."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            return connection.execute("SELECT coalesce(sum(seq), 0) FROM business").fetchone()[0]

    def _run(self, number: int, keys: list[str]) -> None:
        chance = random.Random(number)
        outbox = Outbox()
        connection: psycopg.Connection[Any] | None = None
        try:
            while not self._stop.is_set():
                try:
                    connection = connection or psycopg.connect(self._url)
                    self._transaction(connection, outbox, chance, keys)
                    if self._pause:
                        self._stop.wait(self._pause)
                except (psycopg.OperationalError, psycopg.Rollback):
                    # The server is away (a Rollback comes out where the connection broke under it). Whether the last
                    # commit counted, the table knows.
                    if connection is not None:
                        connection.close()
                    connection = None
                    self._stop.wait(0.05)
        except BaseException as error:  # noqa: BLE001  raised again by stop()
            self._error = error
        finally:
            if connection is not None:
                connection.close()

    def _transaction(
        self, connection: psycopg.Connection[Any], outbox: Outbox, chance: random.Random, keys: list[str]
    ) -> None:
        with connection.transaction():
            for key in chance.sample(keys, chance.randint(1, 4)):
                row = connection.execute(
                    "INSERT INTO business VALUES (%s, 1) "
                    "ON CONFLICT (key) DO UPDATE SET seq = business.seq + 1 RETURNING seq",
                    (key,),
                ).fetchone()
                outbox.add(connection, Event(self._type, key, "Counted", {"seq": row[0]}))
            if chance.random() < 0.1:
                # A transaction that commits late, after others with higher ids.
                self._stop.wait(0.03)
            if chance.random() < 0.1:
                raise psycopg.Rollback


def check(url: str, messages: Iterable[Any]) -> int:
    """Hold the topic against the business rows: nothing lost, nothing invented, in order per key once repeats by event
    id are dropped. Gives the number of repeats.
    """
    seen: dict[str, list[int]] = defaultdict(list)
    ids: set[bytes] = set()
    repeats = 0
    for message in messages:
        event_id = dict(message.headers())["ce_id"]
        if event_id in ids:
            repeats += 1
            continue
        ids.add(event_id)
        seen[message.key().decode()].append(json.loads(message.value())["seq"])
    with psycopg.connect(url, autocommit=True) as connection:
        business = dict(connection.execute("SELECT key, seq FROM business").fetchall())
    assert business, "the load wrote nothing"
    lost = {key: seq for key, seq in business.items() if len(seen.get(key, [])) < seq}
    invented = {key: len(seqs) for key, seqs in seen.items() if len(seqs) > business.get(key, 0)}
    disorder = {key: seqs for key, seqs in seen.items() if seqs != sorted(seqs)}
    assert (lost, invented, disorder) == ({}, {}, {})
    assert dict(seen) == {key: list(range(1, seq + 1)) for key, seq in business.items()}
    return repeats
