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
from sender_support import sending

from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import BrokerUnavailable, IdBusy, NotFenced
from relay.kafka import fencing
from relay.kafka.idempotent import IdempotentPublisher
from relay.kafka.state_topic import MarkersRead
from relay.kafka.takeover import Takeover

OPTIONS: Final = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


class Store:
    """The database's side of lanes that have nothing to settle."""

    def identity(self, _leases: Any) -> tuple[Any, dict[int, OutboxError]]:
        return SimpleNamespace(system_identifier="1", timeline=1), {}

    def adopt_settled(self, leases: Any, *_: Any) -> dict[int, Any]:
        return {lease.lane: (None, None) for lease in leases}


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
    monkeypatch.setattr(fencing, "_AGAIN_SECONDS", 0.0)
    store: Any = Store()
    state: Any = State()
    takeover = Takeover(store, state, fencing.Fencing(OPTIONS), "own")
    failures = []
    for _ in range(3):
        leases = [Lease(lane, 1, 60.0, 1e18, id_, 1, "me") for lane, id_ in enumerate(["former", None])]
        failures.append(takeover.take_over(leases).failed)
    assert [{lane: type(error) for lane, error in failed.items()} for failed in failures] == [{0: kind}] * 3
    assert all("transactional.id 'former." in str(failed[0]) for failed in failures)
    assert ([producer() for producer in made], len(made)) == ([None] * len(made), 3 * len(codes))


def test_an_id_that_can_not_be_fenced_stops_the_lanes_that_name_it_and_no_other() -> None:
    """Whichever comes first. If all lanes name it, the broker is asked again before anything else is done."""
    asked: list[str] = []

    def fence(each: str) -> None:
        asked.append(each)
        if each.startswith("bad"):
            raise BrokerUnavailable(f"{each} may not be used")

    def lease(lane: int, former_id: str | None) -> Lease:
        return Lease(lane, 1, 60.0, 1e18, former_id=former_id, last_batch=1, owner="me")

    store: Any = Store()
    state: Any = State()
    takeover = Takeover(store, state, fence, "own")
    taken = takeover.take_over([lease(0, "bad"), lease(1, "good"), lease(2, None)])
    assert {lane: str(error) for lane, error in taken.failed.items()} == {0: "bad.0 may not be used"}
    assert sorted(taken.markers) == [1, 2]
    assert asked == ["bad.0", "good.0", "good.1"]
    assert takeover.take_over([lease(0, "bad"), lease(2, None)]).failed.keys() == {0}
    for other, text in (("bad", r"^bad\.0 may not be used$"), ("bad too", r"^bad\.0 .*; bad too\.0 may not be used$")):
        with pytest.raises(NotFenced, match=text):
            takeover.take_over([lease(0, "bad"), lease(1, other)])


def test_lanes_of_two_former_workers_of_whom_one_is_only_busy_are_retried_alone() -> None:
    """The brokers answer."""

    def fence(each: str) -> None:
        raise (IdBusy if each.startswith("busy") else BrokerUnavailable)(each)

    store: Any = Store()
    state: Any = State()
    leases = [Lease(lane, 1, 60.0, 1e18, id_, 1, "me") for lane, id_ in enumerate(["bad", "busy"])]
    failed = Takeover(store, state, fence, "own").take_over(leases).failed
    assert {lane: type(error) for lane, error in failed.items()} == {0: BrokerUnavailable, 1: IdBusy}


def test_an_id_whose_coordinator_stays_away_takes_little_of_the_time_of_lanes_that_do_not_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt stops them, and they go on in between."""
    now, stopped_seconds = 1000.0, 0.0

    def fence(_options: Any, _id: str, seconds: float = 10.0) -> None:
        nonlocal now, stopped_seconds
        now += seconds
        stopped_seconds += seconds
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(fencing, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(fencing, "fence", fence)
    fence_again = fencing.Fencing(OPTIONS)
    while now < 2000:
        with pytest.raises(BrokerUnavailable, match="no answer"):
            fence_again("former.0")
        now += 1
    assert 10 < stopped_seconds < 200


def test_at_least_once_a_lane_that_needs_no_fence_goes_on_where_another_one_can_not_be_fenced() -> None:
    class Away:
        def take_over(self, leases: Any) -> Any:
            raise NotFenced("an id can't be fenced")

    takeover: Any = Away()
    publisher = IdempotentPublisher(sending(), takeover)
    former, free = (Lease(lane, 1, 60.0, 1e18, former_id=id_) for lane, id_ in enumerate(["former", None]))
    failed = publisher.join([former, free])
    assert {lane: type(error) for lane, error in failed.items()} == {0: BrokerUnavailable}
    with pytest.raises(NotFenced):
        publisher.join([former])
    publisher.close()
