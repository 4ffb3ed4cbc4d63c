"""The relay with one guard of its protocol taken out: ``python mutant.py NAME relay run``. For test_mutations.py.

Some are guards of other parts of the product. Members of ``make chaos`` that are no command call ``mutate``.
Several names with a + between them are all applied. Each mutation is a mistake that an implementation of the same
protocol could make. Patched at run time, so that the product has no switch for any of them.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outbox._app import migrate
from outbox.external.caller import Caller
from outbox.transform._positions import positions_after
from outbox.transform._session import Session
from relay.cli import main
from relay.core.loop import WorkerLoop
from relay.core.marker import Marker
from relay.core.ports import Batches, Claim, Confirm, Fetched, Receipt, Sent, UnsettledBatch
from relay.kafka.transactional import TransactionalPublisher
from relay.polling import low_water_mark, reader, row_marks
from relay.polling.reader import LaneReader
from relay.polling.source import PollingSource
from relay.settle import settlement, statements

_COMPUTED = "sa.Computed(expression"


def marker_first() -> None:
    """The markers are committed in a transaction of their own, before the events."""
    real = TransactionalPublisher.publish

    def publish(self: Any, batches: Batches, confirm: Confirm | None = None) -> Sent:
        sender = self._senders[self._transactions % len(self._senders)]
        sender.producer.begin_transaction()
        markers = {lane: self._marker(lane, self._joined[lane].batch + 1, claims) for lane, claims in batches.items()}
        self._commit(sender, markers, time.monotonic() + self._delivery_seconds)
        self._joined |= markers
        self._transactions += 1
        return real(self, batches, confirm)

    TransactionalPublisher.publish = publish  # type: ignore[method-assign]


def no_flush_barrier() -> None:
    """What was read is published without waiting until Postgres can't lose it: settling commits asynchronously."""
    statements.SYNCHRONOUS = "set_config('synchronous_commit', 'off', true)"  # type: ignore[misc]
    flushed = "pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()"
    assert flushed in settlement._WRITTEN
    settlement._WRITTEN = settlement._WRITTEN.replace(flushed, "true")  # type: ignore[misc]


def settle_before_ack() -> None:
    """Rows are deleted as soon as they are read."""
    real = PollingSource.fetch

    def fetch(self: Any, limits: Mapping[int, int]) -> Fetched:
        fetched = real(self, limits)
        if fetched.batches:
            receipts = {lane: Receipt(UnsettledBatch(claims)) for lane, claims in fetched.batches.items()}
            self.settle(receipts)
            self.flush(list(receipts))
        return fetched

    PollingSource.fetch = fetch  # type: ignore[method-assign]


def let_go_unsettled() -> None:
    """Lanes are released without settling what was published of them."""
    real = WorkerLoop._let_go

    def let_go(self: Any, lanes: Collection[int]) -> None:
        for lane in lanes:
            if self._source is not None:
                self._source.settlement.lanes[lane].unsettled = settlement.NOTHING
        real(self, lanes)

    WorkerLoop._let_go = let_go  # type: ignore[method-assign]


def marker_of_all_claims() -> None:
    """A lane's marker names all events of the turn, those too that were left out of it."""
    publish, real = TransactionalPublisher.publish, TransactionalPublisher._marker
    turn: dict[int, Sequence[Claim]] = {}

    def noted(self: Any, batches: Batches, confirm: Confirm | None = None) -> Sent:
        turn.clear()
        turn.update(batches)
        return publish(self, batches, confirm)

    def marker(self: Any, lane: int, number: int, sent: Sequence[Claim]) -> Marker:
        return real(self, lane, number, turn[lane] if sent else sent)

    TransactionalPublisher.publish = noted  # type: ignore[method-assign]
    TransactionalPublisher._marker = marker  # type: ignore[method-assign]


def freed_keys_overtake() -> None:
    """Newer events of a key that was freed a moment ago go out before those that waited below the mark."""
    LaneReader._freed = lambda _self, _claims: set()  # type: ignore[method-assign]


def lanes_of_before() -> None:
    """When the number of lanes changes, events go into the lanes of another number."""
    source = inspect.getsource(migrate.change_lanes)
    assert source.count(_COMPUTED) == 1
    exec(source.replace(_COMPUTED, "sa.Computed(lane_expression(256)"), vars(migrate))


def positions_first() -> None:
    """A transformer commits its positions before the transaction of its records begins."""
    real = Session._write

    def write(self: Any) -> None:
        self._consumer.commit(
            offsets=list(positions_after(self._messages, self._committed).values()), asynchronous=False
        )
        # As long as a transform may take.
        time.sleep(0.2)
        real(self)

    Session._write = write  # type: ignore[method-assign]


def key_of_each_attempt() -> None:
    """A call that may have been done is made again with another key."""
    real = Caller._ask_or_call

    def ask_or_call(self: Any, claim: Any) -> Any:
        other = copy.copy(self)
        other._external = replace(self._external, key_suffix=f"-{claim.attempt}")
        return real(other, claim)

    Caller._ask_or_call = ask_or_call  # type: ignore[method-assign]


def quick_marks() -> None:
    """No mutation: low-water marks rise at once, and stand in the lanes' rows soon, not only after seconds."""
    low_water_mark._LOOK_SECONDS = low_water_mark._SETTLE_SECONDS = reader._LOOK_SECONDS = 0.0  # type: ignore[misc]
    row_marks._SECONDS = 0.5  # type: ignore[misc]


def records() -> None:
    """No mutation: the relay records its steps, see protocol_trace.py."""
    import protocol_trace

    protocol_trace.record()


MUTATIONS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "marker_first": marker_first,
    "no_flush_barrier": no_flush_barrier,
    "settle_before_ack": settle_before_ack,
    "let_go_unsettled": let_go_unsettled,
    "marker_of_all_claims": marker_of_all_claims,
    "freed_keys_overtake": freed_keys_overtake,
    "lanes_of_before": lanes_of_before,
    "positions_first": positions_first,
    "key_of_each_attempt": key_of_each_attempt,
    "quick_marks": quick_marks,
    "records": records,
}


def mutate(names: str) -> None:
    """Apply mutations in this process: several with a + between them."""
    for name in names.split("+"):
        MUTATIONS[name]()


if __name__ == "__main__":
    mutate(sys.argv.pop(1))
    main()
