"""The idempotent Publisher: acks=all, in order, and nothing is said to be published before Kafka said so.

After any failure the producer is thrown away: what it had in flight may or may not stand in the log, so the lane is
read again and sent again by a new one. Both producers send the lane's events in the same order, and what arrives of
either is a prefix, so the first time each event stands in the log is in order; a reader that drops repeats by event id
sees order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from relay.failpoints import failpoint
from relay.ports import BatchRefused, Claim, Receipt, Unavailable
from relay.routing import Router
from relay.sending import Sender, Topics


class IdempotentPublisher:
    """One lane's producer. See ports.Publisher for the contract.

    options are librdkafka's, from config.producer_options; delivery_seconds is how long a batch may take; with
    ``places`` the results say where each event stands. Raises ConfigurationError when librdkafka refuses the options.
    For at-most-once, with options that never repeat a request, ``once`` says that what the broker refuses is not to be
    looked for in smaller batches: all that it refused is Refused.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        router: Router,
        topics: Topics,
        ce_source: str,
        delivery_seconds: float,
        *,
        places: bool = False,
        once: bool = False,
    ) -> None:
        self._delivery_seconds = delivery_seconds
        self._once = once
        self._sender: Sender | None = Sender(options, router, topics, ce_source, places=places)

    def publish(self, claims: Sequence[Claim]) -> Receipt:
        """Send in order, wait for every acknowledgement."""
        sender = self._sender
        if sender is None:
            return Receipt((), Unavailable("this publisher is closed"))
        deadline = time.monotonic() + self._delivery_seconds
        failure: Unavailable | None = None
        try:
            sender.send(claims, deadline)
        except Unavailable as error:
            failure = error
        sender.drain(deadline)
        failpoint("batch.acknowledged")
        if sender.failed:
            failure = sender.failure(self._delivery_seconds)
        refused = sender.refused_first() + (sender.refused_by_broker() if self._once else [])
        if self._once and isinstance(failure, BatchRefused):
            failure = Unavailable(str(failure))
        return Receipt(sender.acknowledged() + refused, failure)

    def close(self) -> None:
        """Forget what is queued and in flight; the lane will be read again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
