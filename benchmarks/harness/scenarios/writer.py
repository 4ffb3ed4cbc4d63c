"""What an event costs the business transaction that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.harness.load import SMALL, pad
from benchmarks.harness.results import Metric, Results, Run, Target, at_least, beside
from benchmarks.harness.scenarios.base import Scenario
from benchmarks.harness.servers import Servers, Site
from outbox import Event, Outbox

_TURN = 50
_WITHOUT = "without an event"
_BARE = "a bare INSERT into the outbox"
_EVENT = "one event"
Write = Callable[[psycopg.Connection[Any], int], None]


@dataclass(frozen=True)
class All:
    """One run measures all: they take turns of 50 transactions, so that a slow disk is slow for each."""

    name: str = "all"


class Writers(Scenario):
    """Transactions a second of one client."""

    name = "writer"
    title = "The writer: a business transaction with one event"
    about = (
        "One client, synchronous commits: INSERT an order, UPDATE its customer, and an event of 740 bytes or none. "
        "They take turns of 50 transactions on the same connection; no relay runs."
    )
    metrics = (
        Metric("transactions", "transactions/s", plotted=True),
        Metric("client_cpu", "µs of the client's CPU each"),
    )

    @property
    def ways(self) -> Sequence[All]:
        return (All(),)

    def run(self, servers: Servers, way: All, run: Run) -> None:
        with servers.site(self.name) as site:
            writes = _writes(site)
            seconds = dict.fromkeys(writes, 0.0)
            cpu = dict.fromkeys(writes, 0.0)
            counts = dict.fromkeys(writes, 0)
            with psycopg.connect(site.url) as connection:
                connection.execute("CREATE TABLE customers (id int PRIMARY KEY, orders int NOT NULL)")
                connection.execute("INSERT INTO customers SELECT g, 0 FROM generate_series(0, 999) AS g")
                connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer int, total int, note text)")
                connection.commit()
                number = 0
                for turn in range(self.sizes.writer_transactions // _TURN + 1):
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
                            counts[name] += _TURN
            run.series |= {name: [counts[name] / seconds[name], cpu[name] / counts[name] * 1e6] for name in writes}

    def split(self, run: Run) -> list[Run]:
        if run.error is not None:
            return [run]
        return [
            Run(run.scenario, name, run.round, {"transactions": rate, "client_cpu": cpu}, seconds=run.seconds)
            for name, (rate, cpu) in run.series.items()
        ]

    def targets(self, results: Results) -> list[Target]:
        found = []
        for name in (_EVENT, _BARE):
            ratios = results.ratio(name, _WITHOUT, "transactions")
            what = f"{name}: of the rate without"
            found.append(beside(what, ratios) if name == _BARE else at_least(what, ratios, 0.85))
        return found


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
        _WITHOUT: lambda _connection, _number: None,
        _EVENT: lambda connection, number: _ignore(outbox.add(connection, event(number))),
        _BARE: lambda connection, number: _ignore(
            connection.execute(insert, (site.kind, f"order-{number % 5000}", f'{{"n": {number}, "pad": "{text}"}}'))
        ),
    }


def _ignore(_result: object) -> None:
    pass
