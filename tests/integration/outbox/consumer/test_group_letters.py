"""The contract of a consumer group in Postgres: dead letters and losses, of an inbox as of a Spark job."""

from __future__ import annotations

import base64
import contextlib
import threading
from typing import Any

import psycopg
import pytest
from consumer_group import event_id
from group_sides import BAD, BEGIN, TOPIC, TOPIC_ID, Bench, Message, Side, bench, messages, side
from writer_targets import round_trips

from outbox.consumer.errors import Fenced
from outbox.consumer.groups import GroupRows
from outbox.consumer.model import Loss, LossKind

__all__ = ["bench", "side"]

# --- Dead letters -----------------------------------------------------------------------------------------------------


def test_a_dead_letter_is_the_whole_message(bench, side):
    side.bury(Message(1, BEGIN))
    [row] = bench.run(
        "SELECT topic, topic_id, part, message_offset, message_id::text, message_key, message_value, message_headers, "
        "extract(epoch FROM message_time), reason, error, sqlstate, state, attempts FROM consumer.dead_letters"
    )
    assert row[:7] == (TOPIC, TOPIC_ID, 0, BEGIN, event_id(1), b"k", b"1")
    assert [(one["key"], one["value"]) for one in row[7]] == [
        ("id", base64.b64encode(event_id(1).encode()).decode()),
        ("nothing", None),
        ("raw", base64.b64encode(b"\0\xff").decode()),
    ]
    assert float(row[8]) == 1_700_000_000.123
    # Postgres takes no NUL.
    assert row[9:] == ("failed", "why\ufffd", "22000", "dead", 1)
    assert bench.stands() == (BEGIN + 1, 1, 0, 0, 1)


def test_the_same_message_again_is_one_dead_letter_with_more_attempts(bench, side):
    """The offsets were set back."""
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.offsets SET next_offset = %s WHERE part = 0", BEGIN)
    side.bury(Message(1, BEGIN), again=True)
    assert bench.letters() == [(BEGIN, "failed", "dead", 2)]


def test_another_message_at_its_offset_leaves_the_first_one_in_the_audit(bench, side):
    """The log was cut, and grew again."""
    side.bury(Message(1, BEGIN, of="old"))
    bench.run("UPDATE consumer.offsets SET next_offset = %s WHERE part = 0", BEGIN)
    side.bury(Message(2, BEGIN, of="new"), again=True)
    stored = "SELECT message_id::text, message_key, message_value, attempts, died_at = last_failed_at"
    assert bench.run(f"{stored} FROM consumer.dead_letters") == [(event_id(2), b"new", b"2", 1, True)]
    [(what, kept)] = bench.run("SELECT what, details FROM consumer.audit")
    assert what == "replace dead letter"
    assert (kept["message_id"], kept["offset"]) == (event_id(1), BEGIN)
    assert [base64.b64decode(kept[name]) for name in ("key_base64", "value_base64")] == [b"old", b"1"]


def test_a_retry_applies_it_in_order_and_deletes_it_with_the_effect(bench, side):
    for number in (1, 2):
        side.bury(Message(number, BEGIN + number - 1, of=f"k{number}"))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert (bench.numbers(), bench.letters()) == ([1, 2], [])
    assert bench.stands() == (BEGIN + 2, 1, 2, 0, 2)


def test_a_retry_is_no_progress_of_the_position(bench, side):
    """What stands still must not look as if it moved."""
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.offsets SET updated_at = '2020-01-01'")
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert bench.numbers() == [1]
    assert bench.run("SELECT count(*) FROM consumer.offsets WHERE updated_at = '2020-01-01'") == [(2,)]
    assert side.apply(messages(2, at=BEGIN + 1)) == 1
    assert bench.run("SELECT part FROM consumer.offsets WHERE updated_at > '2020-01-01'") == [(0,)]


def test_without_ids_a_position_moves_without_the_table_of_ids(bench, side):
    """Who deletes old days must not wait for those that remember nothing."""
    with psycopg.connect(bench.database.url) as blocking:
        blocking.execute("LOCK TABLE consumer.processed_messages")
        burying = threading.Thread(target=side.bury, args=(Message(1, BEGIN),), daemon=True)
        burying.start()
        burying.join(60)
        assert not burying.is_alive()
    assert bench.stands() == (BEGIN + 1, 1, 0, 0, 1)


def test_a_retry_that_fails_stays_and_counts(bench, side):
    side.bury(Message(BAD, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    side.retry()
    assert (bench.numbers(), bench.letters()) == ([], [(BEGIN, "failed", "dead", 2)])


def test_what_is_behind_another_waits_for_it(bench, side):
    """A retried message does not overtake an earlier one of its key; one of another key goes."""
    bury_and_wait(side)
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE message_offset > %s", BEGIN)
    side.retry()
    assert bench.numbers() == [3]
    assert bench.letters() == [(BEGIN, "failed", "dead", 1), (BEGIN + 1, "behind", "dead", 2)]


def bury_and_wait(side: Side) -> None:
    for number, key in ((1, "k"), (2, "k"), (3, "other")):
        side.bury(Message(number, BEGIN + number - 1, of=key))


def test_what_waits_behind_one_that_is_gone_is_released(bench, side):
    """It was put there while that one was being discarded: nothing else would release it."""
    bury_and_wait(side)
    bench.run("UPDATE consumer.dead_letters SET reason = 'behind' WHERE message_offset = %s", BEGIN + 1)
    side.retry()
    assert bench.numbers() == []
    bench.run("DELETE FROM consumer.dead_letters WHERE message_offset = %s", BEGIN)
    side.retry()
    assert bench.numbers() == [2]
    assert bench.letters() == [(BEGIN + 2, "failed", "dead", 1)]


def test_a_key_that_has_moved_to_another_partition_waits_too(bench, side):
    """Partitions were added: which dead letter came first gives the order, and not the offsets."""
    side.bury(Message(1, BEGIN, part=1))
    side.bury(Message(2, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE part = 0")
    side.retry()
    assert bench.numbers() == []
    bench.run("DELETE FROM consumer.dead_letters WHERE part = 1")
    side.retry()
    assert bench.numbers() == [2]


def test_an_earlier_one_of_the_topic_as_it_was_before_goes_first(bench, side):
    """The topic was created again, so its offsets begin at 0: they give no order with those of before."""
    bury_and_wait(side)
    bench.run("UPDATE consumer.dead_letters SET topic_id = 'before', message_offset = 500 WHERE message_offset = 5")
    bench.run("UPDATE consumer.dead_letters SET reason = 'behind' WHERE message_offset = 6")
    side.retry()
    assert bench.numbers() == []
    assert bench.letters() == [(500, "failed", "dead", 1), (6, "behind", "dead", 1), (7, "failed", "dead", 1)]
    assert [one for one in retried(bench, side) if one != 3] == [1, 2]


def test_those_of_a_partition_that_the_group_no_longer_has_are_retried(bench, side):
    """The topic was created again with fewer partitions, and the key has moved."""
    for number, at, part in ((1, BEGIN, 1), (2, BEGIN + 1, 1), (3, BEGIN, 0)):
        side.bury(Message(number, at, part))
    bench.run("UPDATE consumer.dead_letters SET part = 7, topic_id = 'before' WHERE part = 1")
    another = bench.side()
    another.claim()
    assert retried(bench, another) == [1, 2, 3]


@pytest.mark.parametrize("parts", [(1, 0, 1, 0), (0, 1, 0, 1)])
def test_a_key_that_has_moved_is_retried_in_its_order(bench, side, parts):
    """Each partition begins with its own first one, and the key goes to and fro between two."""
    for number, (key, part) in enumerate(zip(("m", "k", "k", "k"), parts, strict=True), 1):
        side.bury(Message(number, BEGIN + (number - 1) // 2, part, of=key))
    side.bury(Message(5, BEGIN + 2, parts[0]))
    assert [one for one in retried(bench, side) if one != 1] == [2, 3, 4, 5]


def test_what_waits_for_another_partition_hides_nothing_behind_it(bench, side):
    """More than are tried together wait, and at the end of them is the first of all."""
    side.bury(Message(1, BEGIN, part=1, of="m"))
    side.bury(Message(2, BEGIN))
    numbers = list(range(3, 15))
    for number in numbers:
        side.bury(Message(number, BEGIN + number - 2, part=1))
    bench.run("UPDATE consumer.dead_letters SET message_offset = 100 WHERE message_key = 'm'")
    assert [one for one in retried(bench, side) if one != 1] == [2, *numbers]


def retried(bench: Bench, side: Side) -> list[int]:
    """Retry all dead letters until none is left. Returns their numbers in the order in which they were applied."""
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    for _ in range(10):
        side.retry()
    assert bench.letters() == []
    return [number for (number,) in bench.run("SELECT n FROM numbers ORDER BY ctid")]


def test_an_older_claim_retries_nothing(bench, side):
    side.bury(Message(1, BEGIN))
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    bench.side().claim()
    with contextlib.suppress(Fenced):
        side.retry()
    assert (bench.numbers(), bench.letters()) == ([], [(BEGIN, "failed", "retry", 1)])


# --- Losses -----------------------------------------------------------------------------------------------------------


def loss(first: int, end: int | None, kind: LossKind = LossKind.RETENTION, part: int = 0) -> Loss:
    return Loss(TOPIC, part, TOPIC_ID, first, end, kind, f"{first} to {end}")


def test_a_loss_is_recorded_once_grows_and_is_open_until_it_is_accepted(bench, side):
    def open_losses() -> list[tuple[Any, ...]]:
        return bench.run(
            "SELECT part, kind, first_offset, end_offset, detail FROM consumer.losses WHERE accepted_at IS NULL "
            "ORDER BY part, kind"
        )

    for _ in range(2):
        side.record([loss(5, 8)])
    assert open_losses() == [(0, "retention", 5, 8, "5 to 8")]
    side.record([loss(5, 12), loss(9, None, LossKind.RECREATED), loss(5, 6, part=1)])
    assert open_losses() == [
        (0, "recreated", 9, None, "9 to None"),
        (0, "retention", 5, 12, "5 to 12"),
        (1, "retention", 5, 6, "5 to 6"),
    ]
    bench.run("UPDATE consumer.losses SET accepted_at = now()")
    side.record([loss(5, 12)])
    assert open_losses() == [(0, "retention", 5, 12, "5 to 12")]
    assert bench.run("SELECT count(*) FROM consumer.losses") == [(4,)]


def test_no_loss_costs_no_round_trip(outbox_postgres, tmp_path):
    with outbox_postgres.connect() as connection:
        store = GroupRows("consumer", "billing")
        connection.execute("SELECT 1")
        assert round_trips(connection, tmp_path / "trace", lambda: store.record_losses(connection, [])) == 0
