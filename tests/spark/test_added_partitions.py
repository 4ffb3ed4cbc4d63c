"""Partitions that are added to a topic: messages wait for what their keys have in others, whichever they move to."""

from __future__ import annotations

import threading

import pytest
from bench import Bench
from support import wait_until

from spark_jobs.driver.options import Totals
from spark_jobs.postgres.group_store import AddedEnds

pytestmark = pytest.mark.spark

BACKLOG = 1_200
ROUND = 500


def run_while_messages_come(bench: Bench, seq: int, count: int) -> Totals:
    """Run once. As soon as the run has its targets, the old partition gets ``count`` more messages."""

    def sending(text: str) -> None:
        if text == "planned":
            bench.orders(["a"], range(seq, seq + count), 0)

    with bench.runner(then=sending, max_records=ROUND) as runner:
        return runner.once(threading.Event())


def test_runs_of_once_reach_the_ends_that_the_first_one_has_stored(bench):
    bench.orders(["a"], [1], 0)
    bench.once()
    bench.add_partitions(3)
    bench.orders(["a"], range(2, BACKLOG + 1), 0)
    bench.send_to_added("a", BACKLOG + 601, 2)
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
        at, ends = (bench.topic, 2), AddedEnds({(bench.topic, 0): 5}, {(bench.topic, 0): 7, (bench.topic, 1): 2**40})
        runner._store.note_added({at: ends}, {bench.topic: "then"}, generation)
        assert runner._store.added_ends({bench.topic: "then"}) == {at: ends}
        assert runner._store.added_ends({bench.topic: "now"}) == {}


def test_a_run_that_is_stopped_has_the_next_one_wait_too(bench):
    """A backlog of one key in the old partition; its next message goes to a new one, and is applied last."""
    bench.send("a", 1)
    bench.once()
    bench.orders(["a"], range(2, 3_001))
    bench.add_partitions(4)
    bench.send_to_added("a", 3_001, 3, status="last")
    # Stopped in the middle and started again: nothing has been noted of the new partition, and it still waits.
    stop = threading.Event()
    with bench.runner(then=lambda text: stop.set() if text == "round" else None, max_records=ROUND) as runner:
        runner.once(stop)
    assert len(bench.positions()) == 2
    bench.once(max_records=ROUND)
    assert bench.totals()["a"][1:] == (3_001, 3_001, 0, "last")
    # The other new one has no messages yet, and is none of the group's.
    assert bench.positions().keys() == {0, 1, 3}
    waits = [figures["partitions"] for text, figures in bench.reports if text.startswith("partitions wait")]
    assert waits == [[f"{bench.topic}-3"]] * 2


def test_one_that_was_seen_empty_waits_too(bench):
    """Producers hear of a new partition minutes after the driver; and an open transaction hides what came before."""
    bench.send("a", 1)
    bench.once()
    ((part, _),) = [(at, offset) for at, offset in bench.positions().items() if offset]
    bench.add_partitions(4)
    with bench.runner(max_records=ROUND) as runner:
        assert runner._round(None) is False
        assert bench.positions().keys() == {0, 1}
        bench.orders(["a"], range(2, 2_001), part)
        hidden = bench.in_transaction()
        bench.send("a", 2_001, producer=hidden, part=part)
        bench.send_to_added("a", 2_002, 3)
        while runner._round(None):
            pass
        # Everything that is committed in the old one has been applied; what the transaction hides has not.
        assert bench.totals()["a"][1:3] == (2_000, 2_000)
        hidden.commit_transaction(30)
        wait_until(lambda: runner._round(None) is False and bench.totals()["a"][1] == 2_002, what="the rest")
    assert bench.totals()["a"][1:4] == (2_002, 2_002, 0)
