"""A partition that is added to a topic that always gets messages, read by runs of ``--once``."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from bench import Bench
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions
from support import wait_until

from spark_jobs.driver.options import Totals

pytestmark = pytest.mark.spark

BACKLOG = 1_200
ROUND = 500


def add_partition(bench: Bench) -> None:
    """Add a third partition, and wait until it accepts messages."""
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    admin.create_partitions([NewPartitions(bench.topic, 3)])[bench.topic].result(30)
    wait_until(lambda: len(admin.list_topics(bench.topic).topics[bench.topic].partitions) == 3, what="the partition")


def run_while_messages_come(bench: Bench, seq: int, count: int) -> Totals:
    """Run once. As soon as the run has its targets, the old partition gets ``count`` more messages."""
    with bench.runner(max_records=ROUND) as runner:
        report = runner._report

        def sending(text: str, figures: Any) -> None:
            report(text, figures)
            if text == "planned":
                bench.orders(["a"], range(seq, seq + count), 0)

        runner._report = sending
        return runner.once(threading.Event())


def test_runs_of_once_reach_the_ends_that_the_first_one_has_stored(bench):
    bench.orders(["a"], [1], 0)
    bench.once()
    add_partition(bench)
    bench.orders(["a"], range(2, BACKLOG + 1), 0)

    def sent_to_the_new_one() -> bool:
        # A producer that knew the topic before learns of the partition minutes later.
        try:
            bench.orders(["a"], [BACKLOG + 601], 2)
        except KafkaException:
            return False
        return True

    wait_until(sent_to_the_new_one, what="the new partition to take messages")
    # The ends that count are those when the run looked: 600 messages beyond what this run reads.
    run_while_messages_come(bench, BACKLOG + 1, 600)
    assert bench.positions() == {0: BACKLOG, 1: 0}
    [(ends,)] = bench.rows("SELECT added_ends FROM consumer.groups")
    assert ends[bench.topic]["2"]["ends"] == {"0": BACKLOG + 600, "1": 0}
    # The topic gets as many again, and the second run reaches the first one's ends.
    run_while_messages_come(bench, BACKLOG + 602, 600)
    assert bench.positions() == {0: BACKLOG + 600, 1: 0, 2: 1}
    (_, applied, last, out_of_order, _) = bench.totals()["a"]
    assert (applied, last, out_of_order) == (BACKLOG + 601, BACKLOG + 601, 0)
    bench.once()
    assert bench.positions() == {0: BACKLOG + 1_200, 1: 0, 2: 1}


def test_ends_of_another_incarnation_of_the_topic_are_ignored(bench):
    bench.send("a", 1)
    bench.once()
    with bench.runner() as runner:
        generation = runner._begin()
        at, ends = (bench.topic, 2), {(bench.topic, 0): 7, (bench.topic, 1): 2**40}
        runner._store.note_added({at: ends}, {bench.topic: "then"}, generation)
        assert runner._store.added_ends({bench.topic: "then"}) == {at: ends}
        assert runner._store.added_ends({bench.topic: "now"}) == {}
