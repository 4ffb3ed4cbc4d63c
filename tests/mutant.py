"""The relay with one guard of its protocol taken out: ``python tests/mutant.py NAME relay run``. For test_mutations.py.

Each mutation is a mistake that an implementation of the same protocol could make. Patched at run time, so that the
product has no switch for any of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relay.cli.app import app
from relay.failpoints import failpoint
from relay.marker import Marker
from relay.polling import PollingSource
from relay.ports import Published, Receipt
from relay.transactions import TransactionalPublisher


def marker_first() -> None:
    """The marker is committed in a transaction of its own, before the events."""
    real = TransactionalPublisher.publish

    def publish(self: Any, claims: Any) -> Receipt:
        deadline = time.monotonic() + self._delivery_seconds
        self._sender.producer.begin_transaction()
        identity = self._identity
        self._commit(
            Marker(
                self._batch + 1,
                self._epoch,
                identity.system_identifier,
                identity.timeline,
                tuple(claim.position for claim in claims),
                tuple(claim.event_id for claim in claims),
            ),
            deadline,
        )
        self._batch += 1
        receipt = real(self, claims)
        return replace(receipt, spent=False)

    TransactionalPublisher.publish = publish  # type: ignore[method-assign]


def no_epoch_recheck() -> None:
    """After being fenced, a new producer sends the batch in hand, without asking Postgres whose lane it is."""
    real = TransactionalPublisher.publish

    def publish(self: Any, claims: Any) -> Receipt:
        receipt = real(self, claims)
        # The rightful owner may fence it once more; such an implementation would insist.
        for _ in range(5):
            if receipt.failure is None or receipt.results:
                break
            receipt = insist(self, claims)
        return receipt

    def insist(self: Any, claims: Any) -> Receipt:
        again = TransactionalPublisher.__new__(TransactionalPublisher)
        again.__dict__.update(self.__dict__)
        again._closed = False
        sender = self._sender
        again._sender = type(sender)(self._mutant_options, sender._router, sender._topics, sender._ce_source)
        again._sender.producer.init_transactions(10)
        return real(again, claims)

    real_init = TransactionalPublisher.__init__

    def init(self: Any, options: Any, *args: Any, transactional_id: str, **more: Any) -> None:
        self._mutant_options = {**options, "transactional.id": transactional_id}
        real_init(self, options, *args, transactional_id=transactional_id, **more)

    TransactionalPublisher.__init__ = init  # type: ignore[method-assign]
    TransactionalPublisher.publish = publish  # type: ignore[method-assign]


def no_flush_barrier() -> None:
    """What was read is published without waiting until Postgres can't lose it; settling commits asynchronously."""
    real = PollingSource.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        from psycopg import sql

        plain = sql.SQL(
            "WITH lease AS (UPDATE {lanes} SET last_batch = coalesce(%(batch)s, last_batch) "
            "WHERE lane = %(lane)s AND epoch = %(epoch)s RETURNING lane), gone AS (DELETE FROM {events} "
            "WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])) "
            "SELECT cardinality(%(next_ids)s::bigint[]) FROM lease"
        )
        self._queries.settle = plain.format(
            lanes=sql.Identifier("outbox", "lanes"), events=sql.Identifier("outbox", "events")
        )
        self._connection.execute("SET synchronous_commit = off")

    PollingSource.__init__ = init  # type: ignore[method-assign]


def settle_before_ack() -> None:
    """Rows are deleted as soon as they are read."""
    real = PollingSource.fetch

    def fetch(self: Any, limit: int) -> Any:
        rows = real(self, limit)
        if rows:
            real_settle(self, Receipt([(claim, Published()) for claim in rows]))
            self.flush()
            failpoint("batch.fetched")
        return rows

    real_settle: Callable[..., None] = PollingSource.settle
    PollingSource.fetch = fetch  # type: ignore[method-assign]


MUTATIONS = {
    "none": lambda: None,
    "marker_first": marker_first,
    "no_epoch_recheck": no_epoch_recheck,
    "no_flush_barrier": no_flush_barrier,
    "settle_before_ack": settle_before_ack,
}

if __name__ == "__main__":
    MUTATIONS[sys.argv.pop(1)]()
    app()
