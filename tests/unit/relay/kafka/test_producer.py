"""Producers and addresses, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException
from sender_support import OPTIONS, AllThere, claim, events, new_sender, soon

from outbox.errors import ConfigurationError, SchemaError
from outbox.urls import display_url
from relay.core.ports import (
    BatchRefused,
    BrokerUnavailable,
    Claim,
    DeliveryTimeout,
    IdBusy,
    StandingError,
    TopicUnusable,
    Unavailable,
)
from relay.database import Connector, unavailable_on_error
from relay.kafka import client, fencing
from relay.kafka.producer import BatchProducer
from relay.kafka.topics import Topics


def failure_of(count: int, *, late: bool) -> Unavailable:
    """What a sender says of a turn of so many events of two lanes and their markers when no broker is there."""
    sender = new_sender()
    sender.send({0: events(0, count), 3: events(3, count)}, soon())
    for lane in (0, 3):
        sender.send_marker("outbox.relay.state", lane, b"{}", soon())
    if not late:
        # As if another producer had fenced this one.
        sender.producer.purge()
    sender.drain(time.monotonic() if late else soon())
    assert sender.failed
    assert not sender.acknowledged(0)
    assert not sender.acknowledged(3)
    failure, blamed = sender.failure(4)
    assert list(blamed) == []
    sender.close()
    return failure


def test_what_was_not_acknowledged_is_said_in_a_sentence():
    late = failure_of(0, late=True)
    assert isinstance(late, DeliveryTimeout)
    assert str(late) == "Kafka: no acknowledgement within 4 s"
    assert str(failure_of(2, late=True)) == "Kafka: no acknowledgement within 4 s (4 of 4 events not acknowledged)"
    dropped = failure_of(2, late=False)
    assert type(dropped) is BrokerUnavailable
    assert str(dropped) == "Kafka: the batch was dropped (4 of 4 events not acknowledged)"


class Ended:
    """A producer that a fatal error ends while nothing is sent: librdkafka says so to whoever polls next."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def poll(self, _seconds: float) -> int:
        raise KafkaException(KafkaError(KafkaError._FENCED, "another has the id", fatal=True))


def test_a_fatal_error_while_a_worker_is_idle_fails_its_next_turn_and_not_the_worker():
    sender = new_sender()
    sender.producer = cast("Any", Ended(sender.producer))
    sender.serve()
    assert sender.failed
    failure, _ = sender.failure(4)
    assert isinstance(failure, BrokerUnavailable)
    assert "another relay has taken a lane over" in str(failure)
    sender.close()


def test_a_fatal_error_that_comes_while_another_exception_is_explained_is_kept():
    """librdkafka raises it once, and from then on only says that there was one."""
    sender = new_sender()
    sender.producer = cast("Any", Ended(sender.producer))
    sender.explained(KafkaException(KafkaError(KafkaError._FATAL)))
    assert sender.fatal is not None
    assert sender.fatal.code() == KafkaError._FENCED
    sender.close()


def test_a_failed_marker_is_named_with_its_lane_and_no_event_is_at_fault_for_it():
    sender = new_sender()
    sender.send({0: events(0, 2), 3: events(3, 2)}, soon())
    sender.send_marker("outbox.relay.state", 3, b"{}", soon())
    sender.close()
    sender._failed.clear()

    def said(code: int) -> tuple[Unavailable, list[int]]:
        sender._on_marker(3, KafkaError(code), None)
        failure, blamed = sender.failure(4)
        return failure, list(blamed)

    fenced, blamed = said(KafkaError.INVALID_PRODUCER_EPOCH)
    assert str(fenced).startswith("Kafka, sending the marker of lane 3: Broker: ")
    assert (type(fenced), blamed) == (BrokerUnavailable, [])
    assert "events" not in str(fenced)
    forbidden, blamed = said(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert (type(forbidden), blamed) == (BrokerUnavailable, [])
    # The marker of fewer events is smaller: only this lane's batch is halved.
    large, blamed = said(KafkaError.MSG_SIZE_TOO_LARGE)
    assert (type(large), blamed) == (BatchRefused, [3])
    del sender.sent[3][1:]
    large, blamed = said(KafkaError.MSG_SIZE_TOO_LARGE)
    assert (type(large), blamed) == (BrokerUnavailable, [])


def failed(sender: BatchProducer, *failures: tuple[Claim, int]) -> tuple[Unavailable, list[int]]:
    """What a sender says when these events come back with these errors, and no marker does."""
    sender.close()
    sender._failed.clear()
    for item, code in failures:
        sender._on_failure(item, KafkaError(code), None)
    failure, blamed = sender.failure(4)
    return failure, list(blamed)


def test_the_lanes_of_which_the_broker_refuses_something_are_blamed_and_not_those_behind_them():
    sender = new_sender()
    turn = {lane: events(lane, 2) for lane in range(4)}
    sender.send(turn, soon())
    failure, blamed = failed(
        sender,
        (turn[0][0], KafkaError._PURGE_QUEUE),
        (turn[1][0], KafkaError.MSG_SIZE_TOO_LARGE),
        (turn[1][1], KafkaError._PURGE_INFLIGHT),
        (turn[3][1], KafkaError.INVALID_RECORD),
    )
    assert (type(failure), blamed) == (BatchRefused, [1, 3])
    assert "'order-events'" in str(failure)
    assert {lane: [item.position for item in sender.acknowledged(lane).rows] for lane in range(4)} == {
        0: [2],
        1: [],
        2: [201, 202],
        3: [301],
    }


def test_a_failure_that_is_nobodys_fault_names_the_topic_and_the_cause():
    sender = new_sender()
    turn = {0: events(0, 2), 1: events(1, 1)}
    sender.send(turn, soon())
    failure, blamed = failed(
        sender, (turn[0][0], KafkaError._PURGE_QUEUE), (turn[1][0], KafkaError.NOT_ENOUGH_REPLICAS)
    )
    assert (type(failure), blamed) == (BrokerUnavailable, [])
    assert str(failure).startswith("Kafka, sending to 'order-events': Broker: Not enough")
    assert str(failure).endswith("(2 of 3 events not acknowledged)")


@pytest.mark.parametrize(
    ("code", "said"), [(KafkaError.TOPIC_AUTHORIZATION_FAILED, "grant it WRITE"), (KafkaError.TOPIC_EXCEPTION, "route")]
)
def test_what_the_broker_says_of_a_topic_is_the_topics_state_and_blames_no_lane(code, said):
    sender = new_sender()
    turn = {0: [claim(0, 1), claim(0, 2, "Invoice")], 1: [claim(1, 101, "Invoice")]}
    sender.send(turn, soon())
    assert sender._topics.unpublishable_kinds() == frozenset()
    failure, blamed = failed(sender, (turn[0][1], code), (turn[0][0], KafkaError._PURGE_QUEUE))
    assert isinstance(failure, TopicUnusable)
    assert "'invoice-events'" in str(failure)
    assert blamed == []
    assert said in str(failure)
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}


def test_a_refused_event_holds_up_its_key_in_its_lane_and_no_other():
    sender = new_sender(kafka={"message.max.bytes": "2000"})
    large = claim(0, 2, key="a", value=b"x" * 3000)
    turn = {0: [claim(0, 1), large, claim(0, 3, key="a"), claim(0, 4, key="b")], 1: [claim(1, 101, key="c")]}
    sender.send(turn, soon())
    assert {lane: [item.position for item in sent] for lane, sent in sender.sent.items()} == {0: [1, 4], 1: [101]}
    [(item, reason)] = sender.refused[0]
    assert item == large
    assert "max.message.bytes" in reason
    assert sender.refused[1] == []
    assert sender.left_out == set()
    # Where an event of its key failed before it, that one comes first.
    sender.close()
    sender._failed.clear()
    sender._on_failure(claim(0, 1, key="a"), KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), None)
    assert sender.refused_first() == {0: [], 1: []}
    sender._failed.clear()
    assert [item for item, _ in sender.refused_first()[0]] == [large]
    assert [item for item, _ in sender.refused_first(aborted=True)[0]] == [large]


class OneMissing(AllThere):
    def require(self, topic: str) -> None:
        if topic == "invoice-events":
            raise TopicUnusable("it is not there")


def test_events_of_a_topic_that_is_not_there_are_left_out_with_their_key_and_the_lane_says_so():
    sender = new_sender(OneMissing(OPTIONS, create=False))
    turn = {
        0: [claim(0, 1), claim(0, 2, "Invoice"), claim(0, 3), claim(0, 4, "Invoice", key="other")],
        1: [claim(1, 101)],
    }
    sender.send(turn, soon())
    sender.close()
    assert {lane: [item.position for item in sent] for lane, sent in sender.sent.items()} == {0: [1, 3], 1: [101]}
    assert sender.left_out == {0}
    assert sender.refused == {0: [], 1: []}


def test_options_that_a_client_refuses_are_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"ssl\.ca"):
        Topics({**OPTIONS, "security.protocol": "ssl", "ssl.ca.location": "/nowhere"}, create=False)


def test_several_hosts_are_shown_and_no_secret():
    shown = display_url("postgresql://user:secret@one:5432,two:5433/db?target_session_attrs=read-write")
    assert shown == "postgresql://one:5432,two:5433/db"
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2/db"):
        Connector("postgresql://u:secret@127.0.0.1:1,127.0.0.1:2/db", "test")()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.ReadOnlySqlTransaction, Unavailable),
        (psycopg.errors.IdleInTransactionSessionTimeout, Unavailable),
        (psycopg.errors.TransactionTimeout, Unavailable),
        (psycopg.errors.CheckViolation, StandingError),
        (psycopg.errors.AdminShutdown, Unavailable),
        (psycopg.errors.UndefinedTable, SchemaError),
        (psycopg.errors.InsufficientPrivilege, SchemaError),
        (psycopg.errors.SyntaxError, psycopg.errors.SyntaxError),
    ],
)
def test_errors_that_pass_by_themselves_are_told_from_those_that_need_a_person(error, expected):
    with pytest.raises(expected), unavailable_on_error("testing"):
        raise error("no")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (psycopg.errors.UndefinedTable, "run `outbox db upgrade` (`outbox db check` shows what is missing)"),
        (psycopg.errors.InsufficientPrivilege, "grant it: `outbox db roles` prints the rights of each kind of role"),
    ],
)
def test_missing_tables_and_missing_rights_have_their_own_advice(error, advice):
    with pytest.raises(SchemaError) as caught, unavailable_on_error("testing"):
        raise error("no")
    assert str(caught.value) == f"Postgres, testing: no; {advice}"


class Flushes:
    """A producer that notes for how long it is to flush, and is empty after many times."""

    def __init__(self, producer):
        self.producer = producer
        self.seconds: list[float] = []

    def flush(self, seconds: float) -> int:
        self.seconds.append(seconds)
        return self.producer.flush(seconds)

    def __getattr__(self, name: str):
        return getattr(self.producer, name)

    def __len__(self) -> int:
        return len(self.producer) if len(self.seconds) < 30 else 0


def test_acknowledgements_are_looked_for_more_often_than_librdkafka_does():
    """Its flush() looks every 10 ms, unless it is to end before; a turn would last that long at least."""
    sender = new_sender()
    sender.send({0: events(0, 2)}, soon())
    flushes = sender.producer = Flushes(sender.producer)
    sender.drain(soon())
    assert len(flushes.seconds) == 30
    assert flushes.seconds[0] == 0.001
    assert sorted(flushes.seconds[:10]) == flushes.seconds[:10]
    assert sum(seconds < 0.005 for seconds in flushes.seconds) >= 8
    assert max(flushes.seconds) <= 0.01
    sender.close()


@pytest.mark.parametrize(
    "error",
    [
        IdBusy("its last transaction can't be ended yet"),
        BrokerUnavailable("this user may not use it: can't be ended yet"),
    ],
)
def test_an_id_that_can_not_be_fenced_is_not_asked_for_again_at_once(monkeypatch, error):
    """Every lane that names it would wait for it, and keep the worker's other lanes waiting."""
    clock = [0.0]
    asked: list[str] = []

    def ask(_options: Mapping[str, Any], each: str, _seconds: float) -> None:
        asked.append(each)
        if each == "busy":
            raise error

    monkeypatch.setattr(fencing, "fence", ask)
    monkeypatch.setattr(fencing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    fence = fencing.Fencing(OPTIONS)
    for now in (0.0, 3.0, 19.9, 20.1):
        clock[0] = now
        with pytest.raises(type(error), match="can't be ended yet"):
            fence("busy")
        fence("well")
    assert asked == ["busy", "well", "well", "well", "busy", "well"]


class Asked:
    """A producer, and what was asked of it. ``away``: no broker answers. ``on_ask``: what else a question does."""

    def __init__(
        self, producer: Any, *, away: bool = False, on_ask: Callable[[float], None] = lambda _timeout: None
    ) -> None:
        self.producer = producer
        self.away = away
        self.on_ask = on_ask
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.producer, name)

    def list_topics(self, topic: str, *, timeout: float) -> Any:
        self.log.append(f"ask {topic}")
        self.on_ask(timeout)
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions={0: None})})

    def produce(self, topic: str, *_: Any, **__: Any) -> None:
        self.log.append(topic)


@pytest.mark.parametrize("away", [False, True])
def test_a_producer_asks_for_each_topic_before_it_writes_to_it(away: bool):
    """librdkafka asks for a second new topic when its timer comes round: a new producer's turn took a second longer."""
    sender = new_sender()
    asked = sender.producer = Asked(sender.producer, away=away)
    claims = [claim(0, n, ("Order", "Bill")[n % 2]) for n in range(4)]
    sender.send({0: claims}, soon())
    for lane in range(2):
        sender.send_marker("state", lane, b"", soon())
    topics = ["order-events", "bill-events", "order-events", "bill-events", "state", "state"]
    known: set[str] = set()
    wanted: list[str] = []
    for topic in topics:
        # One that is away must not be waited for again and again.
        if topic not in known and not (away and known):
            wanted.append(f"ask {topic}")
        known.add(topic)
        wanted.append(topic)
    assert asked.log == wanted
    sender.close()


@pytest.mark.parametrize("answer_seconds", [0.2, 0.7])
def test_slow_answers_about_many_new_topics_take_a_part_of_a_turn(monkeypatch, answer_seconds: float):
    """Fifty answers of 0.2 s were a whole turn, and it failed with nothing sent."""
    clock = [0.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait(timeout: float) -> None:
        clock[0] += min(timeout, answer_seconds)
        if timeout < answer_seconds:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    sender = new_sender()
    asked = sender.producer = Asked(sender.producer, on_ask=wait)
    sender.send({0: [claim(0, n, f"Kind{n}") for n in range(50)]}, soon())
    assert clock[0] <= 1.01
    assert asked.log[0].startswith("ask ")
    assert len([each for each in asked.log if not each.startswith("ask ")]) == 50
    sender.close()


def test_an_at_most_once_producer_asks_for_no_topic_because_the_leases_run_out_meanwhile():
    """The rows are deleted by then: what can't be sent within the lease is lost."""
    sender = new_sender(at_most_once=True)
    asked = sender.producer = Asked(sender.producer)
    sender.send({0: [claim(0, 1), claim(0, 2, "Bill")]}, soon())
    assert asked.log == ["order-events", "bill-events"]
    sender.close()


class FencingClient:
    """A producer whose id is busy for the first ``busy`` of them, and what was asked of all of them.

    ``connects_at``: nothing is answered before this time of the clock, which moves with each wait.
    """

    made: ClassVar[list[FencingClient]] = []
    busy: ClassVar[int] = 0
    connects_at: ClassVar[float] = 0.0
    clock: ClassVar[float] = 0.0

    def __init__(self, _options: Mapping[str, Any], _transactional_id: str) -> None:
        self.asked: list[str] = []
        self.made.append(self)

    def list_topics(self, topic: str, *, timeout: float) -> None:
        del topic, timeout
        self.asked.append("metadata")

    def init_transactions(self, seconds: float) -> None:
        self.asked.append(f"init {seconds:g}")
        FencingClient.clock += seconds
        if self.clock < self.connects_at:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))
        if len(self.made) <= self.busy:
            raise KafkaException(KafkaError(KafkaError.CONCURRENT_TRANSACTIONS, "busy", retriable=True))

    def explained(self, error: KafkaException) -> KafkaException:
        return error

    def purge(self) -> None:
        self.asked.append("purge")


@pytest.fixture
def fencing_client(monkeypatch) -> type[FencingClient]:
    for name, value in {"made": [], "busy": 0, "connects_at": 0.0, "clock": 0.0}.items():
        monkeypatch.setattr(FencingClient, name, value)
    monkeypatch.setattr(fencing, "ShortLivedProducer", FencingClient)
    monkeypatch.setattr(fencing, "time", SimpleNamespace(monotonic=lambda: FencingClient.clock))
    return FencingClient


@pytest.mark.parametrize("busy", [0, 2, 1000])
def test_an_id_that_is_busy_is_fenced_by_a_new_client_because_one_asks_again_only_half_a_second_later(
    fencing_client, busy: int
):
    fencing_client.busy = busy
    if busy > 100:
        with pytest.raises(IdBusy, match="can't be ended yet"):
            fencing.fence(OPTIONS, "id")
        # Twice as long each time: few clients until it is given up.
        assert [each.asked[2] for each in fencing_client.made][:4] == ["init 0.1", "init 0.2", "init 0.4", "init 0.8"]
        assert len(fencing_client.made) < 10
        return
    fencing.fence(OPTIONS, "id")
    assert len(fencing_client.made) == busy + 1
    # The first answer may come over a connection that ends with it.
    assert all(each.asked[:2] == ["metadata", "metadata"] for each in fencing_client.made)
    assert all(each.asked[-1] == "purge" for each in fencing_client.made)


@pytest.mark.parametrize("busy", [1, 1000])
@pytest.mark.parametrize("connects_at", [1.0, 5.0])
def test_an_id_that_is_busy_is_not_waited_for_longer_because_connecting_took_long(fencing_client, busy, connects_at):
    """Each of the lanes that name it would keep the worker's other lanes waiting for ten seconds."""
    fencing_client.busy, fencing_client.connects_at = busy, connects_at
    if busy > 1:
        with pytest.raises(IdBusy, match="can't be ended yet"):
            fencing.fence(OPTIONS, "id")
    else:
        # The first answer for an id with an open transaction is that it is busy: it is aborted from then on.
        fencing.fence(OPTIONS, "id")
        assert len(fencing_client.made) == 2
    assert fencing_client.clock < connects_at + 4.0


def test_a_coordinator_that_does_not_answer_is_waited_for_as_long_as_it_may_take(fencing_client):
    fencing_client.connects_at = 1000.0
    with pytest.raises(Unavailable, match="did not answer within 10 s") as caught:
        fencing.fence(OPTIONS, "id")
    assert not isinstance(caught.value, IdBusy)
    assert fencing_client.clock == pytest.approx(10.0)
