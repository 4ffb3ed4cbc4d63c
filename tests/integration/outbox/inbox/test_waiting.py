"""What the inbox's upkeep costs each second while many dead letters wait, whatever the planner knows of them."""

from __future__ import annotations

from typing import Any

import pytest
from inbox_log import _quick
from inbox_support import Log, apply

from outbox.inbox import _letters
from outbox.inbox._letters import Letters

__all__ = ["_quick"]

COUNT = 5_000
# Of partition 0, by what the planner knows: the most where it expects none.
GONE = {"no statistics": COUNT, "analyzed when it was empty": 100_000, "analyzed": COUNT}
# Offset 0 of the partitions 0 and 1 has failed; the others of its key are behind it. Of partition 2 each has a key. The
# topic was created again, without partition 0, which has the most.
FILL = """
WITH g AS (INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'a') RETURNING grp)
INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation)
SELECT grp, 'orders', part, 'id', 0, 1 FROM g CROSS JOIN generate_series(1, 3) AS part;
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_value,
                                   message_headers, message_time, reason, error, state)
SELECT 'g', 'orders', 'id', part, n, CASE WHEN part = 2 THEN 'k' || n ELSE 'busy' || part END::bytea, 'x', '[]', now(),
       CASE WHEN n = 0 OR part = 2 THEN 'failed' ELSE 'behind' END, 'x', 'dead'
  FROM generate_series(0, 2) AS part, generate_series(0, CASE WHEN part = 0 THEN {gone} ELSE {count} END) AS n
 ORDER BY n, part"""
LETTER = """
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_headers,
                                   message_time, reason, error)
VALUES (%s, %s, 'id', 1, %s, %s, '[]', now(), 'failed', 'x') RETURNING id"""
PLACES = {("orders", part) for part in range(4)}


@pytest.fixture(scope="module", params=list(GONE))
def crowded(outbox_postgres_server, _outbox_template, request):
    from outbox.testing.fixtures import Database, token

    name = f"letters_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=_outbox_template), name) as database:
        connection = database.connect(autocommit=True)
        connection.execute("ALTER TABLE consumer.dead_letters SET (autovacuum_enabled = off)")
        if request.param == "analyzed when it was empty":
            connection.execute("ANALYZE consumer.dead_letters")
        connection.execute(FILL.format(gone=GONE[request.param], count=COUNT))
        if request.param == "analyzed":
            connection.execute("ANALYZE consumer.dead_letters")
        yield connection
    outbox_postgres_server.drop_database(name)


def rows(connection: Any) -> int:
    """The rows of dead letters that this transaction has read."""
    query = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'dead_letters'"
    return int(connection.execute(query).fetchone()[0])


def test_a_look_reads_what_has_changed_and_not_what_waits(crowded):
    letters = Letters("consumer", "g")
    with crowded.transaction():
        letters.by_index(crowded)
        assert letters.with_letters(crowded, PLACES) == (set(), {("orders", 0), ("orders", 1)})
        for place in PLACES:
            assert letters.release(crowded, place, b"") == (False, b"")
        assert rows(crowded) < 20
    # As in the transaction of a handler, whose plans are its own.
    with crowded.transaction():
        assert letters.next(crowded, ("orders", 0), ()) is None
        assert rows(crowded) < 10


def test_the_first_of_many_to_be_retried_is_found_at_once(crowded):
    letters = Letters("consumer", "g")
    with crowded.transaction(force_rollback=True):
        letters.by_index(crowded)
        assert letters.release(crowded, ("orders", 0), b"") == (False, b"")
        crowded.execute("UPDATE consumer.dead_letters SET state = 'retry' WHERE part = 1 AND message_offset > 0")
        crowded.execute("DELETE FROM consumer.dead_letters WHERE part = 0 AND message_offset = 0")
        assert letters.with_letters(crowded, PLACES) == ({("orders", 1)}, {("orders", 0)})
        # What it is behind is gone.
        assert letters.release(crowded, ("orders", 0), b"") == (True, b"")
        assert letters.with_letters(crowded, PLACES) == ({("orders", 0), ("orders", 1)}, set())
        for part, blocked in ((0, False), (1, True)):
            count = crowded.execute("SELECT count(*) FROM consumer.dead_letters WHERE part = %s", (part,)).fetchone()[0]
            before = rows(crowded)
            cleared = letters.hold_back(crowded, ("orders", part), 100)
            assert (len(cleared), rows(crowded) - before < 3 * count) == (100, True)
            before = rows(crowded)
            letter = letters.next(crowded, ("orders", part), cleared)
            assert (letter.offset(), letter.letter.behind) == (1, blocked)
            assert rows(crowded) - before < 10


@pytest.mark.parametrize(("part", "most_rows"), [(1, 3 * COUNT), (2, 500)])
def test_what_goes_first_elsewhere_is_looked_for_once_for_each_key(crowded, part, most_rows):
    """Of the first hundred to be retried, which have one key or a hundred."""
    letters = Letters("consumer", "g")
    with crowded.transaction(force_rollback=True):
        letters.by_index(crowded)
        crowded.execute("UPDATE consumer.dead_letters SET state = 'retry' WHERE part > 0")
        before = rows(crowded)
        assert len(letters.hold_back(crowded, ("orders", part), 100)) == 100
        assert rows(crowded) - before < most_rows


def test_partitions_that_are_gone_are_looked_up_once_each(crowded):
    """And not for each of their letters."""
    looks = "SELECT seq_scan + idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'offsets'"
    with crowded.transaction():
        assert Letters("consumer", "g").gone(crowded, ["orders"]) == {("orders", 0): ("orders", 1)}
        assert crowded.execute(looks).fetchone()[0] < 20


def test_letters_that_others_add_are_seen(outbox_postgres, outbox_kafka, monkeypatch):
    """Of another member, as where a key has moved to another partition."""
    seen: list[set[bytes]] = []
    keys = Letters.keys

    def noted(*arguments: Any) -> Any:
        seen.append(keys(*arguments))
        return seen[-1]

    monkeypatch.setattr(Letters, "keys", noted)
    log = Log(outbox_postgres, outbox_kafka)
    log.produce(["moved"])
    with log.consuming(on_failure="dead-letter") as running:
        running.wait(lambda: log.count() == 1, "the message")
        log.run(LETTER, log.group, log.topic, 1, b"moved")
        running.wait(lambda: seen[-1] == {b"moved"}, "the letter")
        log.produce(["moved"])
        running.wait(lambda: log.positions() == {0: 2}, "the position")
    assert log.count() == 1


def test_what_waits_for_nothing_is_applied_whatever_it_is(outbox_postgres, outbox_kafka, monkeypatch):
    """Of more keys than are looked at together: their dead letters are gone, and nothing says so."""
    monkeypatch.setattr(_letters, "LOOKED_AT", 20)
    log = Log(outbox_postgres, outbox_kafka)
    keys = [f"k{number}" for number in range(25)]
    log.produce(keys)

    def reject(connection: Any, message: Any) -> None:
        raise ValueError

    with log.consuming(reject, on_failure="dead-letter", attempts=1, most_dead=10 * len(keys)) as running:
        running.wait(lambda: log.positions().get(0) == len(keys), "the dead letters")
        # And a neighbour, which stays.
        log.produce(["stays"])
        log.produce([*keys, "stays"])
        running.wait(lambda: log.positions().get(0) == 2 * len(keys) + 2, "those behind")
    with log.consuming(apply, on_failure="dead-letter") as running:
        log.run("DELETE FROM consumer.dead_letters WHERE reason = 'failed' AND message_key <> 'stays' RETURNING 1")
        running.wait(lambda: log.count() >= len(keys), "those behind")
        # And the keys are free.
        running.wait(lambda: not log.run("SELECT FROM consumer.dead_letters WHERE message_key <> 'stays'"), "all")
        log.produce(["k7", "stays"])
        running.wait(lambda: log.count() >= len(keys) + 1, "a new one")
        running.wait(lambda: log.positions().get(0) == 2 * len(keys) + 4, "the position")
    assert [letter["reason"] for letter in log.letters()] == ["failed", "behind", "behind"]
    applied = log.applied()
    assert {key: applied[key] for key in keys} == {key: [1, 2] if key == "k7" else [1] for key in keys}
