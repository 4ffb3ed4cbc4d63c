"""What a job may say, and what it is told at once when it may not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.consumer.errors import JobError
from spark_jobs.dedup.strategies import Dedup, Fingerprint, Natural, OffsetsOnly, Version
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.job import META, ConsumerJob


class Named:
    """A decoder of which only the columns' names matter."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def task_plan(self) -> Any:
        return SimpleNamespace(fieldNames=lambda: self._names), None


def job(effect: object, **declared: object) -> ConsumerJob:
    return ConsumerJob("g", ["t"], effect, **declared)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "effect",
    [
        "INSERT INTO t SELECT 1 FROM batch; COMMIT",
        "INSERT INTO t SELECT 1 FROM batch;\n-- done\n commit work;",
        "BEGIN; SELECT 1",
        "start  transaction; SELECT 1",
        "SELECT 1; /* ; */ END",
        "SELECT ';'; ROLLBACK",
        "SELECT E'\\';' ; SAVEPOINT a",
        "SELECT $a$;$a$; RELEASE a",
        "ABORT",
        "PREPARE TRANSACTION 'a'",
    ],
)
def test_an_effect_does_not_end_its_transaction(effect):
    with pytest.raises(JobError, match="is not for an effect"):
        job(effect)


@pytest.mark.parametrize(
    "effect",
    [
        "INSERT INTO t VALUES ('; COMMIT', E'\\'; COMMIT', $$; COMMIT$$, $x$ ; ROLLBACK; $x$)",
        'SELECT "; COMMIT" FROM batch -- ; COMMIT\n',
        "SELECT CASE WHEN a THEN 1 END; UPDATE t SET commit = 1; /* ; COMMIT */ SELECT 1",
        "DO $$ BEGIN PERFORM 1; END $$; PREPARE transactions AS SELECT 1; COMMENT ON TABLE t IS 'a'",
        "SELECT 'it''s; ROLLBACK'; INSERT INTO ends SELECT 1; SELECT '\\'; SELECT 1",
    ],
)
def test_what_only_looks_so_is_taken(effect):
    assert job(effect).effect == effect


@pytest.mark.parametrize("names", ["order_id", "", [], [""]])
def test_the_columns_of_a_strategy_are_a_list(names):
    """A text would be taken for the list of its letters."""
    for declared in (lambda: Natural(names), lambda: Version("orders", names, "seq")):
        with pytest.raises(JobError, match="must be a list of column names"):
            declared()
    assert Version("orders", {"id": "order_id"}, "seq").required == ("id", "seq")


AT_MOST_ONCE = {"delivery": "at-most-once"}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"group": ""}, "group"),
        ({"topics": "orders"}, "topics"),
        ({"topics": ["a", "a"]}, "topics"),
        ({"topics": ["a b"]}, "topics"),
        *(({"types": none}, "types: must be a list of event types") for none in ([], (), "Order")),
        ({"effect": " "}, "effect"),
        ({"effect": 5}, "effect"),
        ({"schema": " "}, "schema"),
        *(
            ({"strategy": one}, r"strategy: must be Dedup\(\), .* or OffsetsOnly\(\)")
            for one in (OffsetsOnly, "Dedup", None)
        ),
        ({"start": "end"}, "start: must be earliest or earliest-available or latest, not 'end'"),
        ({"max_payload_bytes": 0}, "max_payload_bytes: must be 1 or more"),
        ({"delivery": "twice"}, "delivery: must be"),
        (AT_MOST_ONCE, "goes with OffsetsOnly"),
        (AT_MOST_ONCE | {"strategy": OffsetsOnly(), "keep_order": True}, "nothing waits behind"),
        # All tombstones of a key are one and the same message.
        ({"effect": Upsert("s", ["k"], deletes=True), "strategy": Fingerprint()}, "only the first would delete"),
    ],
)
def test_a_job_that_can_not_work_is_refused(declared, said):
    with pytest.raises(JobError, match=said):
        ConsumerJob(**{"group": "g", "topics": ["t"], "effect": "SELECT 1"} | declared)


def test_what_is_at_the_edge_of_that_is_taken():
    assert job(Upsert("s", ["k"]), strategy=Fingerprint()).reducing == Fingerprint()
    assert (job("SELECT 1").start, job("SELECT 1", start="latest").start) == ("earliest", "latest")
    assert job("SELECT 1", max_payload_bytes=1).max_payload_bytes == 1


@pytest.mark.parametrize(("columns", "time"), [(["message_id", "tenant"], None), (["tenant"], "Message_Id")])
def test_what_a_fingerprint_makes_is_none_of_its_columns(columns, time):
    with pytest.raises(JobError, match="message_id is made from the columns"):
        Fingerprint(columns, time=time)


@pytest.mark.parametrize("strategy", [Dedup, Fingerprint, OffsetsOnly])
def test_what_a_strategy_requires_is_no_option(strategy):
    """Messages without an id would be applied again and again, and nothing would say so."""
    with pytest.raises(TypeError, match="required"):
        strategy(required=())


def test_a_key_is_the_name_of_a_header():
    with pytest.raises(JobError, match="key must be the name of a header"):
        Dedup(key="")


def test_offsets_alone_go_with_every_effect():
    effects = ("SELECT 1", Insert("s"), Upsert("s", ["k"], deletes=True), lambda _cursor, _rows: None)
    for effect, atomic in itertools.product(effects, ("partition", "batch")):
        assert job(effect, atomic=atomic, keep_order=True, strategy=OffsetsOnly()).reducing == OffsetsOnly()
    assert not OffsetsOnly().remembers
    assert OffsetsOnly().required == ()


def test_names_that_are_the_consumers_own():
    for name in ("outbox_batch_held_at", "message_raw_key", *META):
        with pytest.raises(JobError, match=f"the name {name} is reserved for the consumer"):
            job("SELECT 1", schema=Named("a", name)).payload_columns()
    assert job("SELECT 1", schema=Named("held_at", "outbox_id")).payload_columns() == ("held_at", "outbox_id")
