"""What an event costs the business transaction that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psycopg

from benchmarks.harness.load import SMALL, pad
from benchmarks.harness.publishers import Way
from benchmarks.harness.results import Metric, Results, Run, Target, at_least, at_most, beside
from benchmarks.harness.scenarios.base import Scenario
from benchmarks.harness.servers import Servers, Site
from outbox import Event, Outbox

_TURN = 50
Write = Callable[[psycopg.Connection[Any], int], object]


ONE_CLIENT: Final = Way("one client")
"""One run measures all: they take turns of 50 transactions, so that a slow disk is slow for each."""


class Writers(Scenario):
    """Transactions a second of one client."""

    name = "writer"
    title = "The writer: a business transaction with one event"
    about = (
        "One client, synchronous commits: INSERT an order, UPDATE its customer, and an event of 740 bytes (or a bare "
        "INSERT into the outbox's table, or nothing). They take turns of 50 transactions on the same connection; no "
        "relay runs. CPU is the client's, and event_us what an event adds to the time of a transaction."
    )
    metrics = (
        Metric("without", "transactions/s"),
        Metric("event", "transactions/s"),
        Metric("bare", "transactions/s"),
        Metric("event_us", "µs of a connection"),
        Metric("without_cpu", "µs each"),
        Metric("event_cpu", "µs each"),
        Metric("bare_cpu", "µs each"),
    )

    @property
    def ways(self) -> Sequence[Way]:
        return (ONE_CLIENT,)

    def run(self, servers: Servers, way: Way, run: Run) -> None:
        with servers.site(self.name) as site:
            writes = _writes(site)
            seconds = dict.fromkeys(writes, 0.0)
            cpu = dict.fromkeys(writes, 0.0)
            with psycopg.connect(site.url) as connection:
                connection.execute("CREATE TABLE customers (id int PRIMARY KEY, orders int NOT NULL)")
                connection.execute("INSERT INTO customers SELECT g, 0 FROM generate_series(0, 999) AS g")
                connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer int, total int, note text)")
                connection.commit()
                number = 0
                turns = self.sizes.writer_transactions // _TURN
                for turn in range(turns + 1):
                    for name, write in writes.items():
                        started, used = time.perf_counter(), time.process_time()
                        for _ in range(_TURN):
                            _business(connection, number)
                            write(connection, number)
                            connection.commit()
                            number += 1
                        if turn:  # The first one prepares the statements.
                            seconds[name] += time.perf_counter() - started
                            cpu[name] += time.process_time() - used
            run.figures |= figures(turns * _TURN, seconds, cpu)

    def targets(self, results: Results) -> list[Target]:
        without, event, bare = (results.by_round(ONE_CLIENT.name, name) for name in ("without", "event", "bare"))
        costs = list(results.by_round(ONE_CLIENT.name, "event_us").values())
        return [
            at_least("one event: of the rate without", [event[number] / without[number] for number in event], 0.85),
            at_most("one event: time of its connection", costs, 140, 0, " µs"),
            beside("a bare INSERT: of the rate without", [bare[number] / without[number] for number in bare]),
        ]


def figures(transactions: int, seconds: Mapping[str, float], cpu: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a run from what so many transactions of each kind took."""
    rates = {name: transactions / took for name, took in seconds.items()}
    used = {f"{name}_cpu": took / transactions * 1e6 for name, took in cpu.items()}
    return {**rates, "event_us": (1 / rates["event"] - 1 / rates["without"]) * 1e6, **used}


def _business(connection: psycopg.Connection[Any], number: int) -> None:
    connection.execute("INSERT INTO orders VALUES (%s, %s, %s, 'as ordered')", (number, number % 1000, number))
    connection.execute("UPDATE customers SET orders = orders + 1 WHERE id = %s", (number % 1000,))


def _writes(site: Site) -> dict[str, Write]:
    outbox = Outbox()
    text = pad(SMALL)

    def event(number: int) -> Event:
        return Event(site.kind, f"order-{number % 5000}", "OrderPlaced", {"n": number, "pad": text})

    insert = (
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
        " VALUES (%s, %s, 'OrderPlaced', %s)"
    )
    return {
        "without": lambda _connection, _number: None,
        "event": lambda connection, number: outbox.add(connection, event(number)),
        "bare": lambda connection, number: connection.execute(
            insert, (site.kind, f"order-{number % 5000}", f'{{"n": {number}, "pad": "{text}"}}')
        ),
    }
