"""What remains of the producers that fence ids, while these ids stay busy."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import BrokerUnavailable, IdBusy
from relay.kafka import fencing
from relay.kafka.state_topic import MarkersRead
from relay.kafka.takeover import Takeover

OPTIONS: Final = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


class Store:
    """The database's side: one lane, whose row names another worker."""

    def identity(self, _leases: Any) -> tuple[Any, dict[int, OutboxError]]:
        return SimpleNamespace(system_identifier="1", timeline=1), {}

    def adopt_settled(self, *_: Any) -> dict[int, Any]:
        return {}


class State:
    def read(self, lanes: list[int], *, decided: bool = True) -> MarkersRead:
        return MarkersRead(dict.fromkeys(lanes))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ([KafkaError.CONCURRENT_TRANSACTIONS], IdBusy),
        # The first of the two ids is fenced.
        ([None, KafkaError._TIMED_OUT], BrokerUnavailable),
    ],
)
def test_of_ids_that_can_not_be_fenced_no_producer_is_left(
    no_collector: None, monkeypatch: pytest.MonkeyPatch, codes: list[int | None], kind: type[BrokerUnavailable]
) -> None:
    """A lane is taken over again and again while its former holder's id is busy. Each producer has threads."""
    made: list[weakref.ref[Producer]] = []

    def initialize(producer: Producer, *_: float) -> None:
        code = codes[len(made) % len(codes)]
        made.append(weakref.ref(producer))
        if code is not None:
            raise KafkaException(KafkaError(code, "busy", False, True))

    monkeypatch.setattr(fencing, "initialize", initialize)
    monkeypatch.setattr(fencing, "fence", functools.partial(fencing.fence, busy_seconds=0.0))
    monkeypatch.setattr(fencing, "_BUSY_AGAIN_SECONDS", 0.0)
    store: Any = Store()
    state: Any = State()
    takeover = Takeover(store, state, fencing.Fencing(OPTIONS), "own")
    failures = []
    for _ in range(3):
        lease = Lease(0, 1, 60.0, 1e18, former_id="former", last_batch=1, owner="me")
        failures.append(takeover.take_over([lease]).failed)
    assert [{lane: type(error) for lane, error in failed.items()} for failed in failures] == [{0: kind}] * 3
    assert all("transactional.id 'former." in str(failed[0]) for failed in failures)
    assert ([producer() for producer in made], len(made)) == ([None] * len(made), 3 * len(codes))
