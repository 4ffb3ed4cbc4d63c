"""The contract of a consumer group in Postgres, for both who keep one: the inbox, and a Spark job.

Both share the tables and the commands of operators. What a claim, a position and an id mean must not depend on who
reads Kafka; test_group_letters.py has what a dead letter and a loss mean.
"""

from __future__ import annotations

import datetime as dt
import threading

import psycopg
import pytest
from consumer_group import event_id
from counting import Counting
from group_sides import BAD, BEGIN, PARTS, TOPIC, Bench, Message, OnInbox, bench, messages, side
from support import wait_until

from outbox.consumer.errors import Fenced
from outbox.consumer.ids import NO_TIME
from outbox.consumer.retention import IdRetention
from spark_jobs.outcomes import RejectedRecords

__all__ = ["bench", "side"]

# --- Claims, fences, moves --------------------------------------------------------------------------------------------


def test_a_group_begins_where_it_is_told_and_goes_on_where_it_was(bench, side):
    assert (side.next_offset(), bench.stands()) == (BEGIN, (BEGIN, 1, 0, 0, 0))
    assert side.apply(messages(1, 2)) == 2
    later = bench.side()
    later.claim()
    assert [later.next_offset(part) for part in PARTS] == [BEGIN + 2, BEGIN]
    assert bench.stands() == (BEGIN + 2, 2, 2, 0, 0)
    [(owner, strategy, ended)] = bench.run("SELECT owner, strategy, ended_at FROM consumer.groups")
    assert owner != "owner 0"
    assert (strategy, ended) == ("Dedup", None)


def test_effects_ids_and_position_are_one_transaction(bench, side):
    with pytest.raises(RejectedRecords) as caught:
        side.apply(messages(1, BAD))
    assert [one.place for one in caught.value.found] == [(TOPIC, 0, BEGIN + 1)]
    assert bench.stands() == (BEGIN, 1, 0, 0, 0)
    assert bench.numbers() == []
    assert bench.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]
    assert side.apply(messages(1)) == 1


def test_an_older_claim_changes_nothing_any_more(bench, side):
    later = bench.side()
    later.claim()
    # Nothing has moved: the generation alone tells the two apart.
    with pytest.raises(Fenced):
        side.apply(messages(1))
    assert (bench.numbers(), bench.stands()) == ([], (BEGIN, 2, 0, 0, 0))
    assert later.apply(messages(1)) == 1


@pytest.mark.parametrize("change", ["SET topic_id = 'another'", "SET next_offset = 3", None])
def test_nor_does_one_whose_row_is_another(bench, side, change):
    bench.run(f"UPDATE consumer.offsets {change}" if change else "DELETE FROM consumer.offsets")
    with pytest.raises(Fenced):
        side.apply(messages(1))
    assert bench.numbers() == []


def test_a_claim_waits_for_a_transaction_that_has_the_position(bench, side):
    """It begins behind what that one commits."""
    bench.run("CREATE TABLE gate (n int)")
    later = bench.side()
    with psycopg.connect(bench.database.url) as gate:
        # The effect stops here, in its transaction.
        gate.execute("LOCK TABLE numbers")
        applying = threading.Thread(target=side.apply, args=(messages(1, 2),))
        applying.start()
        wait_until(lambda: waiting(bench, "relation") == 1, what="the effect")
        claiming = threading.Thread(target=later.claim)
        claiming.start()
        wait_until(lambda: waiting(bench, "transactionid") + waiting(bench, "tuple") >= 1, what="the claim")
        assert claiming.is_alive()
    for thread in (applying, claiming):
        thread.join(60)
    assert later.next_offset() == BEGIN + 2
    assert bench.numbers() == [1, 2]
    with pytest.raises(Fenced):
        side.apply(messages(3, at=BEGIN + 2))


def waiting(bench: Bench, kind: str) -> int:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND wait_event = %s"
    )
    return int(bench.run(query, kind)[0][0])


def test_what_was_committed_is_not_applied_again(bench, side):
    """The answer to the COMMIT was lost: the same claim tries the same messages."""
    assert side.apply(messages(1, 2)) == 2
    assert side.apply(messages(1, 2)) is None
    assert (bench.numbers(), bench.stands()) == ([1, 2], (BEGIN + 2, 1, 2, 0, 0))


def test_a_transaction_locks_its_position_first_and_moves_it_once(bench):
    """In as few statements as it needs: with BEGIN, and what its session is asked when it is returned."""
    with Counting(bench.database.url) as counting:
        side = bench.kind(counting.url, "owner")
        bench.sides.append(side)
        side.claim()
        side.apply(messages(1))
        counting.statements.clear()
        assert side.apply(messages(2, 3, at=BEGIN + 1)) == 2
        sent = [" ".join(one.decode().split()) for one in counting.statements]
    of_offsets = [one.partition(" ")[0] for one in sent if '"offsets"' in one]
    assert (of_offsets, len(sent)) == (
        (["SELECT", "WITH"], 7) if bench.kind is OnInbox else (["SELECT", "UPDATE"], 18)
    ), "\n".join(sent)


# --- Ids --------------------------------------------------------------------------------------------------------------


def test_a_repeat_has_no_effect_wherever_it_is(bench, side):
    assert side.apply([Message(1, BEGIN), Message(2, BEGIN + 1), Message(7, BEGIN + 2, id=event_id(1))]) == 2
    assert side.apply([Message(3, BEGIN, part=1), Message(8, BEGIN + 1, part=1, id=event_id(2))]) == 1
    assert bench.numbers() == [1, 2, 3]
    assert [bench.stands(part)[2:] for part in PARTS] == [(2, 1, 0), (1, 1, 0)]


def test_ids_survive_a_claim_and_belong_to_the_group(bench, side):
    bench.run("INSERT INTO consumer.groups (grp, owner) VALUES ('other', 'x')")
    bench.run(
        "INSERT INTO consumer.processed_messages (grp, day, message_id) VALUES ('other', '2026-03-05', %s)", event_id(1)
    )
    assert side.apply(messages(1)) == 1
    later = bench.side()
    later.claim()
    assert later.apply([Message(9, BEGIN + 1, id=event_id(1)), Message(2, BEGIN + 2)]) == 1
    assert bench.numbers() == [1, 2]


def test_what_may_have_been_forgotten_is_refused(bench, side):
    """An id without a time is never forgotten."""
    bench.run("UPDATE consumer.groups SET forgotten_before = current_date")
    old = "01900000-0000-7000-8000-000000000000"
    with pytest.raises(RejectedRecords) as caught:
        side.apply([Message(1, BEGIN, id=old)])
    assert [one.reason for one in caught.value.found] == ["too-old"]
    assert (bench.numbers(), bench.stands()[0]) == ([], BEGIN)
    assert side.apply([Message(1, BEGIN, id="00000000-0000-4000-8000-000000000001")]) == 1


def test_retention_forgets_whole_days_and_says_so(bench, side):
    today = bench.run("SELECT (now() AT TIME ZONE 'UTC')::date")[0][0]
    old, fresh = uuid7(today - dt.timedelta(days=20)), uuid7(today)
    assert side.apply([Message(1, BEGIN, id=old), Message(2, BEGIN + 1, id=fresh)]) == 2
    bench.run(
        "UPDATE consumer.processed_messages SET seen_at = seen_at - interval '20 days' WHERE message_id = %s", old
    )
    memory = IdRetention(bench.database.url, "consumer", 7)
    memory.make()
    memory.forget()
    assert bench.run("SELECT message_id::text FROM consumer.processed_messages") == [(fresh,)]
    [(before,)] = bench.run("SELECT forgotten_before FROM consumer.groups")
    assert NO_TIME < before <= today
    with pytest.raises(RejectedRecords, match="too-old"):
        side.apply([Message(3, BEGIN + 2, id=old)])
    assert side.apply([Message(3, BEGIN + 2, id=fresh)]) == 0


def uuid7(day: dt.date) -> str:
    milliseconds = (day - NO_TIME).days * 86_400_000
    digits = f"{milliseconds:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-000000000001"
