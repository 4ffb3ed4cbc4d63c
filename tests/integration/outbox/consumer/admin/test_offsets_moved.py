"""Moving groups by hand, on real Kafka and Postgres. The driver runs without Spark."""

from __future__ import annotations

import datetime as dt
import threading
import time
from concurrent.futures import Future

import orjson
import psycopg
import pytest
from offsets_driver import GROUP, driver
from support import wait_until
from typer.testing import CliRunner

from outbox.consumer import kafka_admin
from outbox.consumer.admin.offsets import Offsets
from outbox.consumer.errors import ConsumerUnavailable, DataLost, Fenced
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Range
from outbox.errors import NotFound, OperationRefused, SchemaError
from relay.cli.app import app
from spark_jobs.driver.round_context import OffsetRanges, RoundState

__all__ = ["driver"]


@pytest.mark.parametrize(
    "arguments", [("set", "t", "0", "4"), ("reset", "--topic", "t", "--to", "earliest"), ("forget", "--topic", "t")]
)
def test_only_a_dry_run_needs_no_reason(driver, monkeypatch, arguments):
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
    command, *rest = arguments
    for reason in ([], ["--reason", " "]):
        refused = driver.command(command, GROUP, *rest, *reason)
        assert (refused.exit_code, refused.stderr) == (2, "outbox: --reason: say why; it is kept in the audit\n")
    planned = driver.command(command, GROUP, *rest, "--dry-run")
    assert (planned.exit_code, "say why" in planned.stderr) == (1, False)


def test_setting_an_offset_fences_a_running_consumer_and_is_audited(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 6)
    running = driver.runner
    planned = driver.command("set", GROUP, driver.topic, "0", "4", "--dry-run")
    assert planned.exit_code == 0
    assert f"{driver.topic}-0: 6 → 4  (2 come again)" in planned.stdout
    assert "known by its id" in planned.stdout
    assert "nothing was changed" in planned.stdout
    assert (driver.positions()[0], driver.audit()) == (6, [])
    running._store.state((), running._generation, keep_order=False)
    said = driver.command("set", GROUP, driver.topic, "0", "4", "--reason", "wrong totals", "--json")
    moved = orjson.loads(said.stdout)
    assert (moved["moves"][0]["before"], moved["moves"][0]["after"], moved["moves"][0]["again"]) == (6, 4, 2)
    assert driver.positions() == {0: 4, 1: 0}
    [(what, why, details)] = driver.audit()
    assert (what, why, details["to"]) == ("offsets set", "wrong totals", 4)
    assert details["by"].startswith("outbox offsets, ")
    assert driver.shown_to_kafka()[0] == 4
    # The consumer that ran meanwhile: neither its rounds nor its tasks' statement go through, and it says who it was.
    with pytest.raises(Fenced, match=r"was taken over.*by outbox offsets, .*start this one again"):
        running._round({})
    span = OffsetRanges({(driver.topic, 0): Range(details["partitions"][0]["topic_id"], 4, 6)}, {})
    with pytest.raises(Fenced, match="was taken over"):
        running._rounds._step_over(span, RoundState(), running._generation)
    [(generation,)] = driver.rows("SELECT DISTINCT generation FROM consumer.offsets")
    assert generation == driver.generation() == moved["generation"]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(0, 10)


def test_a_move_waits_for_a_task_that_is_about_to_commit(driver):
    driver.send(0, 10)
    driver.meet()
    moved = []
    with psycopg.connect(driver.url) as task:
        task.execute("UPDATE consumer.offsets SET next_offset = 7 WHERE part = 0")
        with pytest.raises(ConsumerUnavailable, match="nothing was changed"):
            driver.offsets().reset(GROUP, driver.topic, "earliest", "why", wait_seconds=0.2)
        thread = threading.Thread(
            target=lambda: moved.append(driver.offsets().reset(GROUP, driver.topic, 2, "why", part=0))
        )
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: driver.rows(waits) == [(1,)], what="the move to wait")
    thread.join(60)
    # What it moved from is what the task committed.
    assert [(one.before, one.after, one.again) for one in moved[0].moves] == [(7, 2, 5)]
    assert driver.positions()[0] == 2


@pytest.mark.parametrize(("to", "after"), [("loss", 13), ("latest", 15)])
def test_a_move_sets_no_group_back_that_goes_on_until_it_is_fenced(driver, to, after):
    driver.send(0, 10)
    driver.meet()
    moved = []
    with psycopg.connect(driver.url) as task:
        task.execute("UPDATE consumer.offsets SET next_offset = 10 WHERE part = 0")
        thread = threading.Thread(
            target=lambda: moved.append(driver.offsets().reset(GROUP, driver.topic, to, "why", skip=True))
        )
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: driver.rows(waits) == [(1,)], what="the move to wait")
        driver.send(0, 5)
        task.execute("UPDATE consumer.offsets SET next_offset = 13 WHERE part = 0")
    thread.join(60)
    assert [(one.before, one.after, one.again) for one in moved[0].moves if one.part == 0] == [(13, after, 0)]
    assert driver.positions()[0] == after


def test_going_forward_has_to_be_meant_and_is_written_down(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 3)
    generation = driver.generation()
    refused = driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison")
    assert refused.exit_code == 1
    assert f"{driver.topic}-0 3 to 7" in refused.stderr
    assert "--skip" in refused.stderr
    assert (driver.positions()[0], driver.generation(), driver.audit()) == (3, generation, [])
    planned = driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison", "--dry-run")
    assert "skips 3 to 7" in planned.stdout
    assert "this needs --skip" in planned.stdout
    assert driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison", "--skip").exit_code == 0
    assert driver.positions()[0] == 8
    assert driver.audit()[0][2]["partitions"][0]["skipped"] == [3, 8]
    for outside, shown in (("11", "offsets 0 to 10"), ("99", "offsets 0 to 10")):
        refused = driver.command("set", GROUP, driver.topic, "0", outside, "--reason", "why", "--skip")
        assert refused.exit_code == 1
        assert shown in refused.stderr
    driver.delete_before(0, 4)
    with pytest.raises(OperationRefused, match="offsets 4 to 10"):
        driver.offsets().reset(GROUP, driver.topic, 3, "why", part=0)
    with pytest.raises(OperationRefused, match="no partition 2"):
        driver.offsets().reset(GROUP, driver.topic, 0, "why", part=2)
    # The first and the end themselves are inside.
    for at in (4, 10):
        driver.offsets().reset(GROUP, driver.topic, at, "why", part=0, skip=True)
        assert driver.positions()[0] == at


def test_resets_to_both_ends_and_to_a_time(driver):
    now = int(time.time() * 1000)
    for second in range(5):
        driver.send(0, 1, timestamp=now - 60_000 + second * 1000)
    driver.send(1, 2, timestamp=now - 3_600_000)
    driver.meet()
    driver.read(0, 5)
    driver.read(1, 2)
    at = dt.datetime.fromtimestamp((now - 60_000 + 2500) / 1000, dt.UTC).isoformat()
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", at, "--reason", "why", "--json")
    assert said.exit_code == 0
    # Everything in partition 1 is older: it goes on at the end.
    assert driver.positions() == {0: 3, 1: 2}
    assert driver.audit()[-1][2]["to"] == at
    driver.offsets().reset(GROUP, driver.topic, "earliest", "why")
    assert driver.positions() == {0: 0, 1: 0}
    driver.offsets().reset(GROUP, driver.topic, "latest", "why", skip=True)
    assert driver.positions() == {0: 5, 1: 2} == driver.shown_to_kafka()
    # Nothing to change: nobody is fenced, nothing is written.
    before = (driver.generation(), len(driver.audit()))
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", "latest", "--reason", "why")
    assert said.stdout == "nothing to change\n"
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", "loss", "--reason", "why")
    assert said.stdout == "nothing to change\n"
    assert (driver.generation(), len(driver.audit())) == before
    for arguments, named in (
        (("--to", "soon", "--reason", "why"), "--to soon"),
        (("--to", "latest", "--reason", " "), "--reason"),
    ):
        refused = driver.command("reset", GROUP, "--topic", driver.topic, *arguments)
        assert refused.exit_code == 2
        assert named in refused.stderr


def test_a_reset_leaves_an_added_partition_to_the_driver_which_lets_it_wait(driver):
    """Set by itself it is read at once; and it may be skipped."""
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 4)
    driver.add_partitions(3)
    driver.send(2, 1)
    for to in ("earliest", dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)):
        driver.offsets().reset(GROUP, driver.topic, to, "why")
        assert driver.positions() == {0: 0, 1: 0}
    driver.runner = driver.start()
    assert driver.step() == {0: (0, 10)}
    assert driver.step() == {2: (0, 1)}
    driver.rows("DELETE FROM consumer.offsets WHERE part = 2", result=False)
    driver.offsets().reset(GROUP, driver.topic, 0, "why", part=2)
    assert driver.positions() == {0: 10, 1: 0, 2: 0}
    driver.rows("DELETE FROM consumer.offsets WHERE part = 2", result=False)
    driver.offsets().reset(GROUP, driver.topic, "latest", "why", skip=True)
    assert driver.positions() == {0: 10, 1: 0, 2: 1}


def test_a_group_that_has_never_run_has_to_be_called_new(driver):
    driver.send(0, 3)
    with pytest.raises(NotFound, match="there is no group biling; known: none"):
        driver.offsets().reset("biling", driver.topic, "latest", "why", skip=True)
    driver.meet()
    for dry_run in (False, True):
        with pytest.raises(NotFound, match=f"known: {GROUP}"):
            driver.offsets().reset("biling", driver.topic, "latest", "why", skip=True, dry_run=dry_run)
    planned = driver.offsets().reset("second", driver.topic, "latest", "why", new=True, dry_run=True)
    assert (planned.generation, planned.moves[0].skipped) == (None, (0, 3))
    moved = driver.offsets().reset("second", driver.topic, "latest", "only what comes", new=True, skip=True)
    assert [one.after for one in moved.moves] == [3, 0]
    rows = driver.rows("SELECT grp, part, next_offset FROM consumer.offsets ORDER BY grp, part")
    assert rows == [(GROUP, 0, 0), (GROUP, 1, 0), ("second", 0, 3), ("second", 1, 0)]


def test_show_says_where_everything_stands(driver):
    assert driver.command("show").stdout == "no groups\n"
    driver.send(0, 1234)
    driver.meet()
    driver.read(0, 1000)
    driver.delete_before(0, 1100)
    with pytest.raises(DataLost):
        driver.look()
    driver.rows("UPDATE consumer.groups SET forgotten_before = '2026-01-02' RETURNING 1")
    shown = orjson.loads(driver.command("show", "--group", GROUP, "--json").stdout)
    [group] = shown["groups"]
    assert (group["group"], group["generation"], group["forgotten_before"]) == (GROUP, 1, "2026-01-02")
    first, second = group["positions"]
    assert (first["next_offset"], first["first"], first["end"], first["high_watermark"]) == (1000, 1100, 1234, 1234)
    assert (first["trouble"], first["lag"]) == ("retention passed it", None)
    assert (second["next_offset"], second["lag"], second["uncommitted"], second["trouble"]) == (0, 0, 0, None)
    assert [loss["kind"] for loss in group["losses"]] == ["retention"]
    text = driver.command("show").stdout
    for part in (f"{driver.topic}-0", "1,000", "1,100", "1,234", "retention passed it", "2026-01-02", "generation 1"):
        assert part in text
    assert f"accept: outbox offsets reset {GROUP} --topic {driver.topic} --to loss" in text
    assert driver.command("show", "--group", "nobody").exit_code == 1


def test_a_partition_without_a_leader_hides_only_its_own_figures(driver, monkeypatch):
    driver.send(0, 10)
    driver.meet()
    describe = KafkaAdmin.describe

    def without_one(admin: KafkaAdmin, topics: list[str], seconds: float | None = None) -> dict[str, Future]:
        found = {name: one.result(30) for name, one in describe(admin, topics, seconds).items()}
        for one in found.values():
            one.partitions[1].leader = None
        done = {name: Future() for name in found}
        for name, one in found.items():
            done[name].set_result(one)
        return done

    monkeypatch.setattr(KafkaAdmin, "describe", without_one)
    [group], away = driver.offsets().show(GROUP)
    first, second = group.positions
    assert away is None
    assert (first.lag, first.trouble) == (10, None)
    assert (second.next_offset, second.end, second.lag, second.trouble) == (0, None, None, "it has no leader")


def test_accepting_what_was_given_up_keeps_the_epoch_that_finds_a_log_that_was_cut(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 2)
    driver.rows("UPDATE consumer.offsets SET leader_epoch = 0, epoch_offset = 2 WHERE part = 0 RETURNING 1")
    driver.rows(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        "SELECT grp, topic, topic_id, 0, 1, 2, 'given-up', 'why' FROM consumer.offsets WHERE part = 0",
        result=False,
    )
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "counted")
    assert (len(moved.accepted), driver.positions()[0]) == (1, 2)
    assert driver.rows("SELECT leader_epoch, epoch_offset FROM consumer.offsets WHERE part = 0") == [(0, 2)]


def test_show_without_kafka_and_without_tables(driver, outbox_postgres):
    driver.meet()
    view = KafkaAdmin({"bootstrap.servers": "127.0.0.1:1"}, seconds=1.0)
    [group], away = Offsets(driver.database.connect(autocommit=True), "consumer", view).show()
    assert away.startswith("Kafka does not answer at 127.0.0.1:1: ")
    assert "KafkaError" not in away
    assert [(one.next_offset, one.end, one.trouble) for one in group.positions] == [(0, None, None)] * 2
    assert CliRunner().invoke(app, ["offsets", "show"], env={}).exit_code == 2
    with pytest.raises(SchemaError, match="outbox db upgrade --consumer"):
        Offsets(driver.database.connect(autocommit=True), "nowhere", view).show()
