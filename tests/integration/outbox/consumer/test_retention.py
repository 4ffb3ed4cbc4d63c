"""How long ids are remembered: days made and dropped on a real Postgres, what groups are said to have forgotten."""

from __future__ import annotations

import datetime as dt
import json
import threading
import uuid
from unittest.mock import ANY

import psycopg
import pytest
from id_retention import KEEP, sink
from plans import nodes
from psycopg import errors, sql
from rows_and_roles import login_role
from support import stop_clock, wait_until, with_path_of_role

from outbox.consumer import retention
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.ids import DAY_OF_ID
from outbox.consumer.retention import NO_TIME, STRAY, IdRetention, RetentionResult, _named
from outbox.consumer.statements import statement
from outbox.errors import SchemaError

__all__ = ["sink", "with_path_of_role"]

pytestmark = pytest.mark.usefixtures("with_path_of_role")


REMEMBER = "INSERT INTO consumer.processed_messages (grp, day, message_id) VALUES ('g', %s, gen_random_uuid())"


def names(*days: dt.date) -> set[str]:
    return {f"{day:%Y%m%d}" for day in days}


def test_days_are_made_for_what_is_kept_and_a_few_ahead(sink):
    made = sink.memory.make()
    days = names(NO_TIME, *(sink.day(ago) for ago in range(-3, KEEP + 1)))
    assert {name.removeprefix("processed_messages_") for name in made.made} == days
    assert sink.partitions() == days | {"default"}
    assert sink.memory.make() == RetentionResult()
    # Ids of every kind find the partition of their day.
    midnight = dt.datetime.combine(sink.today, dt.time(), dt.UTC)
    v7 = uuid.UUID(int=(int(midnight.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | 1)
    for message_id, where in ((uuid.uuid4(), "19700101"), (v7, f"{sink.today:%Y%m%d}")):
        query = (
            "INSERT INTO consumer.processed_messages (grp, day, message_id) "
            f"SELECT 'g', {DAY_OF_ID}, message_id FROM (SELECT %s::uuid AS message_id) AS batch "
            "RETURNING tableoid::regclass::text"
        )
        assert sink.one(query, (message_id,)) == f"consumer.processed_messages_{where}"


def test_many_days_are_made_in_steps_and_those_of_new_messages_first(sink, monkeypatch):
    """All at once would fill the server's lock table: any statement of any session may fail then."""
    monkeypatch.setattr(retention, "_AT_ONCE", 4)
    sink.group("g")
    # Not in the way of the others, and not tried for ever.
    sink.remember("g", sink.day(2), 0)
    make, tried = IdRetention._make, []

    def full_once(self, connection, day):
        tried.append(day)
        if len(tried) == 6:
            raise errors.OutOfMemory("out of shared memory")
        return make(self, connection, day)

    monkeypatch.setattr(IdRetention, "_make", full_once)
    first = sink.memory.make()
    assert tried == [NO_TIME, *(sink.day(ago) for ago in range(-3, 2))]
    made = names(NO_TIME, *(sink.day(ago) for ago in (-3, -2, -1)))
    assert first == RetentionResult(made=tuple(f"processed_messages_{day}" for day in sorted(made)), problem=ANY)
    assert sink.partitions() == made | {"default"}
    second = sink.memory.make()
    left = names(*(sink.day(ago) for ago in (0, 1, 3, 4, 5)))
    assert second == RetentionResult(made=tuple(f"processed_messages_{day}" for day in sorted(left)))
    assert sink.partitions() == made | left | {"default"}
    # None is tried twice in a run.
    assert len(tried) == len(set(tried)) + 2
    assert sink.memory.make() == RetentionResult()


def test_one_query_when_all_days_are_there(sink):
    """The upkeep of every consumer that starts: nothing is locked, nothing is waited for."""
    sink.memory.make()
    with psycopg.connect(sink.url) as other:
        other.execute("LOCK TABLE consumer.processed_messages IN SHARE UPDATE EXCLUSIVE MODE")
        other.execute(retention._LOCK, ("consumer",))
        assert sink.memory.make() == RetentionResult()


def test_days_that_the_default_partition_holds_stay_there(sink):
    sink.group("g")
    for day in (sink.day(0), NO_TIME):
        sink.remember("g", day, 0)
    made = sink.memory.make()
    assert made.problem is None
    assert sink.partitions().isdisjoint(names(sink.day(0), NO_TIME))
    assert names(sink.day(1), sink.day(-1)) < sink.partitions()


def test_an_old_day_goes_with_its_partition_and_only_its_groups_have_forgotten(sink):
    for group in ("early", "late"):
        sink.group(group)
    old, kept = sink.day(KEEP + 2), sink.day(KEEP)
    sink.partition(old)
    sink.memory.make()
    sink.remember("early", old, KEEP + 2)
    sink.remember("early", kept, KEEP + 0.5)
    sink.remember("late", sink.day(0), 0)
    done = sink.memory.forget()
    assert list(done.dropped) == [f"processed_messages_{old:%Y%m%d}"]
    assert sink.remembered() == {("early", kept): 1, ("late", sink.day(0)): 1}
    assert sink.forgotten() == {"early": old + dt.timedelta(days=1), "late": None}
    assert sink.memory.forget() == RetentionResult()


def test_a_day_whose_ids_were_seen_lately_is_kept_whole(sink):
    """A backlog: old ids that were applied yesterday can come again for as long as any other."""
    for group in ("g", "backlog"):
        sink.group(group)
    old = sink.day(KEEP + 10)
    sink.partition(old)
    sink.remember("g", sink.day(0), 0)
    sink.remember("g", old, KEEP + 9, count=3)
    sink.remember("backlog", old, KEEP - 0.5)
    assert sink.memory.forget() == RetentionResult()
    assert sink.remembered() == {("g", sink.day(0)): 1, ("g", old): 3, ("backlog", old): 1}
    assert sink.forgotten() == {"g": None, "backlog": None}
    sink.run("UPDATE consumer.processed_messages SET seen_at = seen_at - interval '1 day' WHERE grp = 'backlog'")
    assert len(sink.memory.forget().dropped) == 1
    assert sink.forgotten() == dict.fromkeys(("g", "backlog"), old + dt.timedelta(days=1))


@pytest.mark.parametrize("of_day", ["its partition", "the default partition"])
def test_a_clock_that_is_ahead_forgets_nothing_that_is_kept(sink, of_day):
    sink.group("g")
    old, kept = sink.day(KEEP + 1), [sink.day(ago) for ago in (0, 1, KEEP)]
    if of_day == "its partition":
        sink.partition(old)
        sink.memory.make()
    for ago in (0, 1, KEEP, KEEP + 1):
        sink.remember("g", sink.day(ago), ago)
    # Of writers whose clocks are ahead: they do not name the newest day.
    coming = [sink.day(-2), sink.day(-300)]
    for day in coming:
        sink.remember("g", day, 0)
    stop_clock(sink.url, 30)
    due, done = sink.memory.due(), sink.memory.forget()
    assert (due.dropped, due.deleted_rows) == ([*done.dropped], done.deleted_rows)
    assert sink.remembered() == {("g", day): 1 for day in (*kept, *coming)}
    assert sink.forgotten() == {"g": sink.day(KEEP)}


def test_what_is_forgotten_never_comes_back(sink):
    sink.group("g")
    sink.run("UPDATE consumer.groups SET forgotten_before = %s", (sink.day(KEEP),))
    older = sink.day(KEEP + 5)
    sink.partition(older)
    sink.remember("g", older, KEEP + 5)
    sink.remember("g", sink.day(0), 0)
    assert len(sink.memory.forget().dropped) == 1
    assert sink.forgotten() == {"g": sink.day(KEEP)}


def test_rows_of_the_default_partition_go_by_group_and_day(sink):
    for group in ("g", "h", "idle"):
        sink.group(group)
    old, older, young = sink.day(KEEP + 3), sink.day(KEEP + 30), sink.day(1)
    sink.remember("g", NO_TIME, 400, count=2)
    sink.remember("g", older, KEEP + 1, count=2)
    sink.remember("g", old, KEEP + 1)
    sink.remember("g", young, KEEP + 1)
    # One that was seen lately keeps the day for its group, and for no other.
    sink.remember("h", older, KEEP + 1)
    sink.remember("h", older, 1)
    sink.remember("h", sink.day(0), 0)
    assert sink.memory.forget() == RetentionResult(deleted_rows=3)
    assert sink.remembered() == {
        ("g", NO_TIME): 2,
        ("g", young): 1,
        ("h", older): 2,
        ("h", sink.day(0)): 1,
    }
    assert sink.forgotten() == {"g": old + dt.timedelta(days=1), "h": None, "idle": None}


def test_ids_without_a_time_are_not_even_looked_at(sink):
    """They may be most of the table: finding what can go must not read them."""
    sink.group("g")
    sink.remember("g", NO_TIME, 400, count=20_000)
    sink.remember("g", sink.day(KEEP + 3), KEEP + 1, count=5)
    sink.run("ANALYZE consumer.processed_messages_default")
    query = statement("consumer", STRAY)
    values = {"no_time": NO_TIME, "horizon": sink.day(KEEP), "keep_days": KEEP}
    [plan] = sink.one(sql.SQL("EXPLAIN (ANALYZE, FORMAT json) ") + query, values)
    text = json.dumps(plan)
    assert "processed_messages_default_days" in text
    assert '"Node Type": "Seq Scan", "Parent Relationship": "Inner"' not in text
    read = [node for node in nodes(plan["Plan"]) if node.get("Relation Name") == "processed_messages_default"]
    assert [node["Actual Rows"] for node in read] == [5]


def test_upkeep_gives_way_to_a_task_that_writes(sink):
    """A task holds the table for as long as its transaction takes; upkeep gives up, says so, and is due again."""
    sink.group("g")
    old = sink.day(KEEP + 2)
    sink.partition(old)
    with psycopg.connect(sink.url) as task:
        task.execute(REMEMBER, (old,))
        for upkeep in (sink.memory.make(), sink.memory.forget()):
            assert "lock timeout" in upkeep.problem
            assert (upkeep.made, upkeep.dropped) == ((), ())
        # The task was not harmed by either.
        task.execute("SELECT 1")
    assert sink.memory.make().problem is None
    # The id is there, seen just now.
    assert sink.memory.forget() == RetentionResult()
    assert sink.remembered() == {("g", old): 1}


def test_a_locked_day_keeps_no_other_day(sink):
    """As a dump that reads it, or a session that was forgotten."""
    held, later = sink.day(KEEP + 3), sink.day(KEEP + 2)
    for old in (held, later):
        sink.partition(old)
    with psycopg.connect(sink.url) as dump:
        dump.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sink.memory._partition(_named(held))))
        first = sink.memory.forget()
    assert "lock timeout" in first.problem
    assert first.dropped == (_named(later),)
    assert sink.memory.forget() == RetentionResult(dropped=(_named(held),))


def test_who_locks_all_days_is_not_waited_for_at_each(sink):
    days = [sink.day(KEEP + 6 - number) for number in range(retention._MOST_HELD + 1)]
    for old in days:
        sink.partition(old)
    with psycopg.connect(sink.url) as dump:
        for old in days[:-1]:
            dump.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sink.memory._partition(_named(old))))
        # The last one is free, and is not come to.
        assert sink.memory.forget().dropped == ()
    assert sink.memory.forget() == RetentionResult(dropped=tuple(map(_named, days)))


def test_a_view_of_an_old_day_keeps_only_that_day(sink):
    viewed, later = sink.day(KEEP + 3), sink.day(KEEP + 2)
    for old in (viewed, later):
        sink.partition(old)
    partition = sink.memory._partition(_named(viewed))
    with psycopg.connect(sink.url) as connection:
        connection.execute(sql.SQL("CREATE VIEW public.of_a_day AS TABLE {}").format(partition))
    with psycopg.connect(sink.url) as dump:
        dump.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sink.memory._partition(_named(later))))
        # It retries while a day is busy.
        with pytest.raises(ConsumerUnavailable, match="tasks may be using them"):
            list(sink.memory.prune(0.0))
    done = sink.memory.forget()
    assert done.dropped == (_named(later),)
    assert _named(viewed) in done.problem_figures()["problem"]
    assert done.problem_figures()["to_do"] == "drop what depends on it"
    with pytest.raises(SchemaError, match=r"drop what depends on it$"):
        list(sink.memory.prune())
    with psycopg.connect(sink.url) as connection:
        connection.execute("DROP VIEW public.of_a_day")
    assert sink.memory.forget() == RetentionResult(dropped=(_named(viewed),))


def test_another_sink_in_the_database_does_not_hold_it_up(sink):
    old = sink.day(KEEP + 2)
    sink.partition(old)
    with psycopg.connect(sink.url) as other:
        other.execute(retention._LOCK, ("consumer2",))
        assert sink.memory.forget() == RetentionResult(dropped=(_named(old),))


def test_a_task_that_waits_for_the_drop_sees_that_its_day_is_forgotten(sink, monkeypatch):
    """Its id goes in as if it were new; what it reads next says that the day is forgotten."""
    # So that the drop is still there when the task comes.
    monkeypatch.setattr("outbox.consumer.retention._GIVE_WAY", "60s")
    sink.group("g")
    old = sink.day(KEEP + 2)
    sink.partition(old)
    sink.remember("g", old, KEEP + 2)
    [(twin,)] = sink.run("SELECT message_id FROM consumer.processed_messages")
    sink.remember("g", sink.day(0), 0)
    seen: list[dt.date] = []
    with psycopg.connect(sink.url) as blocker:
        # Lets the drop come as far as the table itself, holding the day's partition and the group's row.
        blocker.execute("LOCK TABLE ONLY consumer.processed_messages IN ACCESS SHARE MODE")
        forgetting = threading.Thread(target=sink.memory.forget)

        def task() -> None:
            with psycopg.connect(sink.url) as connection:
                connection.execute(
                    "INSERT INTO consumer.processed_messages (grp, day, message_id) VALUES ('g', %s, %s)", (old, twin)
                )
                seen.append(connection.execute("SELECT forgotten_before FROM consumer.groups").fetchone()[0])

        forgetting.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'consumer.processed_messages'::regclass"
        wait_until(lambda: sink.one(waits) == 1, what="the drop to wait")
        inserting = threading.Thread(target=task)
        inserting.start()
        wait_until(lambda: sink.one(waits) == 2, what="the task to wait")
        blocker.rollback()
    forgetting.join(30)
    inserting.join(30)
    assert seen == [old + dt.timedelta(days=1)]


def test_a_role_that_repeats_reads_forgets_no_id_that_was_seen_just_now(sink, monkeypatch):
    """Read on a snapshot from before its wait for a task, the day would look as if nobody had used it since."""
    with psycopg.connect(sink.url, autocommit=True) as connection:
        connection.execute(
            sql.SQL("ALTER ROLE {} IN DATABASE {} SET default_transaction_isolation = 'repeatable read'").format(
                sql.Identifier(connection.info.user), sql.Identifier(connection.info.dbname)
            )
        )
    monkeypatch.setattr("outbox.consumer.retention._GIVE_WAY", "60s")
    sink.group("g")
    old = sink.day(KEEP + 2)
    sink.partition(old)
    sink.remember("g", old, KEEP + 2)
    sink.remember("g", sink.day(0), 0)
    done: list[RetentionResult] = []
    with psycopg.connect(sink.url) as task:
        task.execute(REMEMBER, (old,))
        forgetting = threading.Thread(target=lambda: done.append(sink.memory.forget()))
        forgetting.start()
        name = f"consumer.processed_messages_{old:%Y%m%d}"
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
        wait_until(lambda: sink.one(waits, (name,)) == 1, what="the drop to wait for the task")
        task.commit()
    forgetting.join(30)
    assert done == [RetentionResult()]
    assert sink.remembered() == {("g", old): 2, ("g", sink.day(0)): 1}


def test_without_the_owners_rights_it_says_so(sink):
    sink.partition(sink.day(KEEP + 2))
    with psycopg.connect(sink.url, autocommit=True) as admin, login_role(admin, "reader") as role:
        admin.execute(f"GRANT USAGE ON SCHEMA consumer TO {role}")
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA consumer TO {role}")
        url = psycopg.conninfo.make_conninfo(sink.url, options=f"{sink.clock} -c role={role}")
        memory = IdRetention(url, "consumer", KEEP)
        assert "permission denied" in memory.make().problem
        assert "must be owner" in memory.forget().problem
