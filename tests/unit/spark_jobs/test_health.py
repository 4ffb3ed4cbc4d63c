"""When a consumer is ready: by a clock that the test turns."""

from __future__ import annotations

import pytest

from spark_jobs.health import ConsumerHealth

LIMIT = 300.0


class Consumer:
    def __init__(self) -> None:
        self.now = 1000.0
        self.health = ConsumerHealth(LIMIT, lambda: self.now)

    def lines(self) -> list[str]:
        found = self.health.look()
        assert found.ready is all(check.passed for check in found.checks if check.counts)
        return [check.line() for check in found.checks]


@pytest.fixture
def consumer():
    return Consumer()


def test_it_is_not_ready_before_its_first_round(consumer):
    consumer.health.observe("group taken over", {})
    assert consumer.lines() == ["[-]rounds failed: none has ended yet", "[+]partitions ok", "[+]servers ok"]


@pytest.mark.parametrize("how", ["a round", "nothing to apply"])
def test_it_is_ready_for_a_while_after_a_round_or_an_empty_poll(consumer, how):
    if how == "a round":
        consumer.health.observe("round", {"read": 1})
    else:
        consumer.health.succeeded(consumer.now)
    consumer.now += LIMIT - 1
    assert consumer.lines() == ["[+]rounds ok: the last one ended 299 s ago", "[+]partitions ok", "[+]servers ok"]
    assert consumer.health.look().ready
    consumer.now += 1
    assert consumer.lines()[0] == "[-]rounds failed: the last one ended 300 s ago"
    assert not consumer.health.look().ready


def test_a_server_that_is_away_is_shown_since_when_and_why(consumer):
    consumer.health.succeeded()
    consumer.health.observe("waiting for a server", {"error": "Kafka is away", "wait_seconds": 0.1})
    consumer.now += 20
    consumer.health.observe("waiting for a server", {"error": "Postgres is away", "wait_seconds": 0.2})
    found = consumer.health.look()
    assert (found.ready, found.waiting, found.waiting_seconds) == (True, "Postgres is away", 20)
    assert consumer.lines()[2] == "[-]servers failed: waiting for 20 s: Postgres is away (leaves it ready)"
    consumer.now += LIMIT
    assert not consumer.health.look().ready
    consumer.health.observe("round", {"read": 1})
    assert consumer.lines() == ["[+]rounds ok: the last one ended 0 s ago", "[+]partitions ok", "[+]servers ok"]


def test_a_partition_that_stands_is_named_while_the_others_move(consumer):
    both = {("orders", 0), ("orders", 1)}
    consumer.health.lagging({("orders", 0): 7, ("orders", 1): 100}, both)
    consumer.now += LIMIT - 1
    consumer.health.lagging({("orders", 0): 7, ("orders", 1): 200}, {("orders", 1)})
    consumer.health.observe("round", {"read": 100})
    assert consumer.health.look().ready
    consumer.now += 1
    consumer.health.observe("round", {"read": 100})
    assert consumer.lines()[:2] == [
        "[+]rounds ok: the last one ended 0 s ago",
        "[-]partitions failed: orders-0 stands at offset 7 for 300 s",
    ]
    assert not consumer.health.look().ready
    # It moves, and then nothing waits in it, for however long.
    consumer.health.lagging({("orders", 0): 8}, both)
    assert consumer.lines()[1] == "[+]partitions ok"
    consumer.health.lagging({}, ())
    consumer.now += 2 * LIMIT
    consumer.health.lagging({("orders", 0): 8}, both)
    assert consumer.lines()[1] == "[+]partitions ok"


def test_a_partition_that_waits_for_its_turn_does_not_stand(consumer):
    for _ in range(2):
        consumer.health.lagging({("orders", 0): 7}, ())
        consumer.now += LIMIT
        consumer.health.observe("round", {"read": 100})
        assert consumer.lines()[1] == "[+]partitions ok"
    # From its turn on it does, in the rounds of others too.
    consumer.health.lagging({("orders", 0): 7}, [("orders", 0)])
    consumer.now += LIMIT
    consumer.health.lagging({("orders", 0): 7}, ())
    assert consumer.lines()[1] == "[-]partitions failed: orders-0 stands at offset 7 for 300 s"
