"""A source that serves all lanes of a worker, seen as one lane: for tests that are about one lane's events."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Self

from relay.core.lease import Lease
from relay.core.ports import Claim, Receipt, Source


class OneLane:
    """``source`` with one lane held. What a worker's loop is told about the lane in ``failed`` is raised here."""

    def __init__(self, source: Source, lease: Lease) -> None:
        self.source = source
        self.lease = lease
        source.hold(lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lane(self) -> int:
        """The lane's number."""
        return self.lease.lane

    def fetch(self, limit: int) -> list[Claim]:
        """Settle what is pending, and return up to ``limit`` events."""
        fetched = self.source.fetch({self.lane: limit})
        failed = {**fetched.failed, **(self.source.confirm(time.monotonic() + 60) if fetched.unconfirmed else {})}
        if self.lane in failed:
            raise failed[self.lane]
        assert fetched.batches.keys() <= {self.lane}
        return list(fetched.batches.get(self.lane, ()))

    def settle(self, receipt: Receipt) -> None:
        """Record what became of the batch."""
        for error in self.source.settle({self.lane: receipt}).values():
            raise error

    def flush(self) -> None:
        """Make durable what was settled."""
        for error in self.source.flush([self.lane]).values():
            raise error

    def wait(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """Wait until there may be events."""
        return self.source.wait([self.lane], seconds, stop or threading.Event())

    def close(self) -> None:
        """Close the source's connection."""
        with contextlib.suppress(KeyError):
            self.source.drop(self.lane)
        self.source.close()
