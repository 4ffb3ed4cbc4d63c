"""A sender of events without a server: what the tests of the producer share."""

from __future__ import annotations

import time
from typing import Any

from relay.config import load, producer_options
from relay.core.ports import Claim
from relay.kafka.producer import BatchProducer, Sending
from relay.kafka.routing import Router
from relay.kafka.topics import Topics

OPTIONS = {"bootstrap.servers": "127.0.0.1:1"}


class AllThere(Topics):
    def require(self, topic: str) -> None:
        """No broker is asked."""


def claim(lane: int, position: int, kind: str = "Order", key: str = "k", value: bytes = b"{}") -> Claim:
    return Claim(position, f"id{position}", kind, key, "T", "", value, None, lane=lane)


def events(lane: int, count: int) -> list[Claim]:
    return [claim(lane, 100 * lane + n) for n in range(1, count + 1)]


def new_sender(topics: Topics | None = None, kafka: dict[str, str] | None = None, **more: Any) -> BatchProducer:
    """A sender to a broker that is not there."""
    return BatchProducer(sending(topics, kafka, **more))


def sending(
    topics: Topics | None = None, kafka: dict[str, str] | None = None, router: Router | None = None, **more: Any
) -> Sending:
    options = producer_options(load(kafka=OPTIONS | (kafka or {})))
    return Sending(options, router or Router(), topics or AllThere(OPTIONS, create=False), "/shop", 60.0, **more)


def soon() -> float:
    return time.monotonic() + 60
