"""A relay's steps in the protocol, to be compared with the specification by traces.py.

``record`` wraps the worker's source and publisher; ``python mutant.py records relay run`` calls it. Each step is
appended to the file that PROTOCOL_TRACE names, as a line of JSON as soon as it is known, in one write: a kill loses
none. Relays may share the file.

at, since   when the step was known, and the latest time before which it can't have happened: nanoseconds of the
            machine's monotonic clock, so only relays of one machine can be compared
relay       the process
lane        absent for steps of the whole worker
ids         rows: what was read, sent, acknowledged, settled or committed, or what the adopted marker names

| step        | meaning                                                                              |
|-------------|--------------------------------------------------------------------------------------|
| taken       | the worker got the lane, under this epoch                                            |
| initialized | there is a new publisher; with transactions, its ids are fenced                      |
| joined      | the lane's marker was adopted: it is published under this worker's ids               |
| read        | the next events, with their keys and event ids                                       |
| sent        | publishing begins                                                                    |
| confirmed   | exactly-once: the leases were checked after the read, and the rows are durable       |
| committed   | the Kafka transaction was committed, with this batch of the lane                     |
| acked       | Kafka has acknowledged the events, without a transaction                             |
| settled     | their rows are gone                                                                  |
| refused     | Kafka or the relay has refused these events; without ids: some were left out of the  |
|             | transaction, as their topic can't be written to, or it was aborted as events of      |
|             | other lanes were refused, and its producer was replaced                              |
| failed      | the turn failed, or events were left out; the ids are acknowledged in spite of that  |
| lost        | another relay has the lane                                                           |
| let_go      | the worker no longer works on the lane                                               |
| closed      | the source is closed: a failure, or the end                                          |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from outbox._app.choices import Delivery, SourceKind
from outbox.errors import OutboxError
from relay import wiring
from relay.config import Settings
from relay.core.lease import Lease
from relay.core.marker import Marker
from relay.core.ports import (
    Batches,
    Claim,
    Completed,
    Confirm,
    Failed,
    Fetched,
    LaneLost,
    Publisher,
    Receipt,
    Sent,
    Source,
    UnsettledBatch,
)

VARIABLE: Final = "PROTOCOL_TRACE"


def record() -> None:
    """Make the relay that this process builds record its steps. The specification's traces cover polling ones."""
    of_source, of_publisher, of_rows = wiring._source, wiring._publisher, wiring.PollingSource
    traces: list[ProtocolTrace] = []

    def publisher(settings: Settings, *more: Any) -> Any:
        assert settings.source is SourceKind.POLLING
        assert settings.delivery is not Delivery.AT_MOST_ONCE
        traces.append(ProtocolTrace(os.environ[VARIABLE], settings))
        return partial(TracedPublisher, of_publisher(settings, *more), traces[-1])

    def source(*given: Any) -> Any:
        trace = traces[-1]
        wiring.PollingSource = partial(of_rows, on_settled=trace.settled, on_adopted=trace.adopted)  # type: ignore[misc]
        new = of_source(*given)
        return lambda reports: TracedSource(new(reports), trace)

    wiring._publisher, wiring._source = publisher, source


class ProtocolTrace:
    """What the wrappers of a worker's sources and publishers share."""

    def __init__(self, path: str, settings: Settings) -> None:
        self.transactional = settings.delivery is Delivery.EXACTLY_ONCE
        self._relay = f"{settings.relay.instance or 'relay'}/{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.since = self._began = time.monotonic_ns()
        """When the last read began: what is settled after it was asked for after it."""
        self.turn: dict[int, str] = {}
        """Without transactions: how the turn ended for each lane, acked or failed, until that is recorded. The source
        may record before that that the turn before is settled."""
        self._acknowledged: dict[int, tuple[str, list[int]]] = {}
        self._unsettled: dict[int, set[int]] = {}
        self._leases: dict[int, Lease] = {}
        self.write("began", transactional=self.transactional, batch_size=settings.relay.batch_size)

    def write(self, step: str, lane: int | None = None, since: int | None = None, **more: Any) -> None:
        line = {"at": time.monotonic_ns(), "since": since or self._began, "relay": self._relay, "step": step}
        if lane is not None:
            line["lane"] = lane
        os.write(self._file, json.dumps(line | more).encode() + b"\n")

    def taken(self, lease: Lease) -> None:
        # A new source is given the leases again.
        if self._leases.get(lease.lane) is not lease:
            self._leases[lease.lane] = lease
            self.write("taken", lease.lane, epoch=lease.epoch)

    def settled(self, lane: int, batch: UnsettledBatch) -> None:
        """See PollingSource, ``on_settled``."""
        rows = positions(batch.rows)
        _, acknowledged = self._acknowledged.get(lane, ("", []))
        if set(rows) & set(acknowledged):
            self._note_acknowledged(lane)
        self._unsettled.pop(lane, None)
        self.write("settled", lane, self.since, ids=rows)

    def adopted(self, lane: int, marker: Marker | None) -> None:
        """See PollingSource, ``on_adopted``."""
        if marker is not None:
            self.write("joined", lane, self.since, batch=marker.batch, ids=list(marker.positions))

    @contextmanager
    def settling(self, receipts: Mapping[int, Receipt]) -> Iterator[None]:
        """Record what Kafka has acknowledged without a transaction, before it is settled, but after the turn before."""
        for lane, receipt in receipts.items():
            if receipt.published.number is None:
                self._acknowledged[lane] = self.turn.pop(lane, "acked"), positions(receipt.published.rows)
        try:
            yield
        finally:
            for lane in list(self._acknowledged):
                self._note_acknowledged(lane)

    def _note_acknowledged(self, lane: int) -> None:
        step, rows = self._acknowledged.pop(lane)
        known = self._unsettled.setdefault(lane, set())
        # What could not be settled is given to the next source again.
        if step == "failed" or not known.issuperset(rows):
            known.update(rows)
            self.write(step, lane, self.since, ids=rows)

    def failed(self, lanes: Mapping[int, OutboxError]) -> None:
        for lane, error in lanes.items():
            if isinstance(error, LaneLost):
                self.write("lost", lane, self.since)
            else:
                self.write("failed", lane, self.since, ids=[], error=type(error).__name__)


def positions(claims: Sequence[Claim]) -> list[int]:
    return [claim.position for claim in claims]


class TracedSource:
    """``source``, with its steps recorded. Its callbacks must be those of ``trace``."""

    def __init__(self, source: Source, trace: ProtocolTrace) -> None:
        self._source = source
        self._trace = trace
        self._lost: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def hold(self, lease: Lease) -> None:
        self._source.hold(lease)
        self._lost.discard(lease.lane)
        self._trace.taken(lease)

    def drop(self, lane: int) -> None:
        self._source.drop(lane)
        if lane not in self._lost:
            self._trace.write("let_go", lane)

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        trace, began = self._trace, time.monotonic_ns()
        fetched = self._source.fetch(limits)
        trace.since = began
        for lane, batch in fetched.batches.items():
            names = {"keys": ["/".join(claim.key) for claim in batch], "event_ids": [claim.event_id for claim in batch]}
            trace.write("read", lane, began, ids=positions(batch), **names)
            if trace.transactional and not fetched.unconfirmed:
                trace.write("confirmed", lane, began)
        self._note_failed(fetched.failed)
        return fetched

    def confirm(self, deadline: float) -> Mapping[int, OutboxError]:
        failed = self._source.confirm(deadline)
        if not failed:
            self._trace.write("confirmed", None, self._trace.since)
        self._note_failed(failed)
        return failed

    def settle(self, receipts: Mapping[int, Receipt]) -> Mapping[int, OutboxError]:
        with self._trace.settling(receipts):
            failed = self._source.settle(receipts)
        self._note_failed(failed)
        return failed

    def flush(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        failed = self._source.flush(lanes)
        self._note_failed(failed)
        return failed

    def close(self) -> None:
        self._source.close()
        self._trace.write("closed")

    def _note_failed(self, failed: Mapping[int, OutboxError]) -> None:
        self._lost |= {lane for lane, error in failed.items() if isinstance(error, LaneLost)}
        self._trace.failed(failed)


class TracedPublisher:
    """A new publisher, with its steps recorded."""

    def __init__(self, new: Callable[[Source], Publisher], trace: ProtocolTrace, source: Source) -> None:
        began = time.monotonic_ns()
        self._publisher = new(source)
        self._trace = trace
        trace.write("initialized", None, began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        self._trace.since = time.monotonic_ns()
        failed = self._publisher.join(leases)
        self._trace.failed(failed)
        return failed

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        trace, began = self._trace, time.monotonic_ns()
        for lane, claims in batches.items():
            # Without a transaction, what allows it is the check after the read.
            trace.write("sent", lane, began if trace.transactional else trace.since, ids=positions(claims))
        sent = self._publisher.publish(batches, confirm)
        completed = isinstance(sent, Completed)
        goes_on = isinstance(sent, Failed) and not sent.publisher_unusable
        receipts = sent.receipts if isinstance(sent, Completed | Failed) else {}
        for lane in batches:
            receipt = receipts.get(lane, Receipt())
            refused = positions([claim for claim, _ in receipt.refused])
            if refused or ((receipt.left_out or goes_on) and trace.transactional):
                trace.write("refused", lane, began, ids=refused)
            if not trace.transactional:
                trace.turn[lane] = "acked" if completed and not receipt.left_out else "failed"
            elif not completed:
                trace.write("failed", lane, began, ids=[])
            elif (batch := receipt.published.number) is not None:
                trace.write("committed", lane, began, ids=positions(receipt.published.rows), batch=batch)
        return sent
