"""Run the shop: ``python examples/shop --database-url … --events 20000``.

Several tills place and pay orders at once. About one order in twenty is rolled back after its events were written:
no reader may ever see those. Prints one JSON object at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import threading
import time

from models import Base
from service import pay_order, place_order
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox.stopping import Stopping

TILLS = 3
ARTICLES = {"tea": 450, "bread": 320, "cheese": 780, "apples": 260, "wine": 1190, "honey": 640}


class ChangedMind(Exception):
    """The customer leaves the till: the transaction is rolled back."""


class Tills:
    """Places orders until ``events`` are committed.

    rate        events per second; None: as fast as possible.
    afterwards  the rate at which it continues after ``events`` until ``stop`` is set; None: it ends then.
    """

    def __init__(self, url: str, events: int, rate: float | None, afterwards: float | None) -> None:
        self._engine = create_engine(url, pool_size=8)
        self._wanted = events
        self._rate = rate
        self._afterwards = afterwards
        self._started = time.monotonic()
        self._reached_at = self._started
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.stop = Stopping()
        self.events = 0
        self.orders = 0
        self.rolled_back = 0

    def create_tables(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA IF NOT EXISTS shop"))
            Base.metadata.create_all(connection)

    def run(self) -> None:
        threads = [threading.Thread(target=self._till, args=(number,)) for number in range(TILLS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._engine.dispose()

    def _till(self, number: int) -> None:
        chance = random.Random(number)
        while not self._done():
            order_id = f"order-{next(self._numbers):07d}"
            articles = chance.sample(sorted(ARTICLES), k=chance.randint(1, 4))
            try:
                with Session(self._engine) as session, session.begin():
                    customer = f"customer-{chance.randrange(500)}"
                    place_order(session, order_id, customer, {name: ARTICLES[name] for name in articles})
                    if chance.random() < 0.05:
                        raise ChangedMind
            except ChangedMind:
                with self._lock:
                    self.rolled_back += 1
                continue
            self._count(1 + len(articles), orders=1)
            if chance.random() < 0.6:
                with Session(self._engine) as session, session.begin():
                    pay_order(session, order_id)
                self._count(1)

    def _count(self, events: int, orders: int = 0) -> None:
        with self._lock:
            before = self.events
            self.events += events
            self.orders += orders
            if before < self._wanted <= self.events:
                self._reached_at = time.monotonic()
            due = self._due()
        self.stop.wait(max(0.0, due - time.monotonic()))

    def _due(self) -> float:
        """Return when as many events as there are now are due, by the monotonic clock."""
        if self._afterwards is not None and self.events >= self._wanted:
            return self._reached_at + (self.events - self._wanted) / self._afterwards
        return self._started + self.events / self._rate if self._rate else self._started

    def _done(self) -> bool:
        return self.stop.is_set() or (self._afterwards is None and self.events >= self._wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database-url", required=True, help="postgresql+psycopg://…")
    parser.add_argument("--events", type=int, default=20_000, help="stop after about this many events")
    parser.add_argument("--rate", type=float, help="events per second; as fast as possible if not given")
    parser.add_argument("--afterwards", type=float, help="continue at this rate after --events, until SIGTERM")
    options = parser.parse_args()
    tills = Tills(options.database_url, options.events, options.rate, options.afterwards)
    signal.signal(signal.SIGTERM, lambda *_: tills.stop.set())
    tills.create_tables()
    tills.run()
    print(json.dumps({"events": tills.events, "orders": tills.orders, "rolled_back": tills.rolled_back}))


if __name__ == "__main__":
    main()
