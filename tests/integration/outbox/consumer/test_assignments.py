"""Members that get no assignment: the group does not answer them, or refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from inbox_support import Log
from kafka_proxy import JOIN_GROUP, KafkaProxy, delay_response
from support import wait_until
from transform_support import Place, _soon, copied, place, running

from outbox.consumer.stalled import StalledPartition
from outbox.inbox import KafkaFailed
from outbox.testing.fixtures import Topics
from outbox.transform import KafkaRefused

__all__ = ["_soon", "place"]

Stalled = Callable[[], list[StalledPartition]]


@pytest.fixture
def topics(mortal_network) -> Iterator[tuple[Topics, KafkaProxy]]:
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as made:
        yield made, proxy


def held(proxy: KafkaProxy) -> bool:
    return any(fired.held for fired in proxy.fired)


def seen(stalled: Stalled, proxy: KafkaProxy, topic: str) -> None:
    """Look at a member whose request to join is held back, and let it go."""
    wait_until(lambda: held(proxy), 60, "its request to join")
    # It may have a partition to give back first.
    wait_until(lambda: [(one.topic, one.partition) for one in stalled()] == [(topic, None)], 60, "what a probe sees")
    proxy.release()
    wait_until(lambda: stalled() == [], 60, "its assignment")


def test_the_inbox_is_not_ready_before_the_group_has_answered(outbox_postgres, topics):
    made, proxy = topics
    log = Log(outbox_postgres, made)
    proxy.on(JOIN_GROUP, delay_response())
    with log.consuming(kafka={"bootstrap.servers": proxy.address}) as member:
        seen(member.stalled, proxy, log.topic)
        # Another one joins, and this one has to do so again.
        proxy.on(JOIN_GROUP, delay_response())
        with log.consuming() as other:
            seen(member.stalled, proxy, log.topic)
            # One of them has no partition.
            other.wait(lambda: other.stalled() == [], "its assignment")
    assert member.stalled() == []


def test_nor_is_a_transformer(topics):
    made, proxy = topics
    with closing(Place(made, 1)) as place:
        other, member = place.member(copied(place)), place.member(copied(place), by=proxy)
        proxy.on(JOIN_GROUP, delay_response())
        with running(member):
            seen(lambda: member.stalled(0.0), proxy, place.source)
            proxy.on(JOIN_GROUP, delay_response())
            with running(other):
                seen(lambda: member.stalled(0.0), proxy, place.source)
                wait_until(lambda: other.stalled(0.0) == [], 60, "its assignment")
        assert member.stalled(0.0) == []


# Longer than brokers allow: group.max.session.timeout.ms is half an hour.
LONG = {"session.timeout.ms": 3_000_000, "max.poll.interval.ms": 3_000_000}


def test_a_session_that_is_too_long_is_refused(outbox_postgres, outbox_kafka, place):
    with Log(outbox_postgres, outbox_kafka).consuming(kafka=LONG) as member:
        error = member.error()
    assert isinstance(error, KafkaFailed)
    assert "group.max.session.timeout.ms" in str(error)
    place.options |= LONG
    with pytest.raises(KafkaRefused, match="session timeout"):
        place.member(copied(place)).run()


def test_another_strategy_than_the_group_has_is_refused(outbox_postgres, outbox_kafka):
    log = Log(outbox_postgres, outbox_kafka)
    options: dict[str, Any] = {"kafka": {"partition.assignment.strategy": "cooperative-sticky"}}
    with log.consuming() as member:
        member.wait(lambda: log.positions() == {0: 0}, "its claim")
        with log.consuming(**options) as other:
            error = other.error()
    assert isinstance(error, KafkaFailed)
    assert "partition.assignment.strategy" in str(error)


def test_an_assignor_that_the_brokers_do_not_have_is_refused(outbox_postgres, outbox_kafka):
    """With this protocol librdkafka's client is of no more use, and a new one is refused as well."""
    log = Log(outbox_postgres, outbox_kafka)
    with log.consuming(kafka={"group.protocol": "consumer", "group.remote.assignor": "nope"}) as member:
        error = member.error()
    assert isinstance(error, KafkaFailed)
    assert "assignor" in str(error)


def test_a_name_that_another_member_has_is_waited_for(outbox_postgres, outbox_kafka):
    """Until the brokers have noticed that the other one is gone. A probe sees why."""
    log = Log(outbox_postgres, outbox_kafka)
    static = {"group.protocol": "consumer", "group.instance.id": "the-same"}
    with log.consuming(kafka=static) as first:
        first.wait(lambda: log.positions() == {0: 0}, "its claim")
        with log.consuming(kafka=static) as second:
            second.wait(lambda: "instance ID" in " ".join(one.why for one in second.stalled()), "why it waits")
            first.end()
            log.produce(["k"])
            second.wait(lambda: log.count() == 1, "the effect")
            assert second.stalled() == []
