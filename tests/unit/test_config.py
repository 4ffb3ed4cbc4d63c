"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outbox.errors import ConfigurationError
from relay.cli.wiring import build_router
from relay.config import Delivery, delivery_seconds, load, producer_options
from relay.routing import OnFailure, Route


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    import os

    for name in list(os.environ):
        if name.startswith("OUTBOX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_environment_names(monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql+psycopg://u:secret@h:5/db")
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "h:9092")
    monkeypatch.setenv("OUTBOX_KAFKA__LINGER_MS", "7")
    monkeypatch.setenv("OUTBOX_DELIVERY", "exactly-once")
    monkeypatch.setenv("OUTBOX_CREATE_TOPICS", "true")
    monkeypatch.setenv("OUTBOX_SCHEMA", "shop")
    monkeypatch.setenv("OUTBOX_RELAY__BATCH_SIZE", "10")
    monkeypatch.setenv("OUTBOX_SPARK__KAFKA__MAX_POLL_RECORDS", "99")
    settings = load()
    assert settings.database_url == "postgresql://u:secret@h:5/db"
    assert settings.kafka == {"bootstrap.servers": "h:9092", "linger.ms": "7"}
    assert settings.delivery is Delivery.EXACTLY_ONCE
    assert settings.create_topics
    assert settings.db_schema == "shop"
    assert settings.relay.batch_size == 10
    assert settings.relay.lease_seconds == 15.0
    assert settings.spark.kafka == {"max.poll.records": "99"}
    assert "secret" not in repr(settings)
    assert producer_options(settings)["linger.ms"] == "7"


def test_file_below_environment_below_arguments(monkeypatch, tmp_path):
    (tmp_path / "outbox.toml").write_text(
        'schema = "filed"\ndatabase_url = "postgresql://file/db"\n'
        '[kafka]\n"bootstrap.servers" = "file:1"\n"linger.ms" = 3\n[relay]\nbatch_size = 5\nlease_seconds = 9\n'
        '[routes]\nOrder = "orders"\n'
    )
    monkeypatch.setenv("OUTBOX_RELAY__BATCH_SIZE", "6")
    settings = load(database_url="postgresql://argument/db")
    assert settings.database_url == "postgresql://argument/db"
    assert settings.db_schema == "filed"
    assert settings.relay.batch_size == 6
    assert settings.relay.lease_seconds == 9
    assert settings.kafka == {"bootstrap.servers": "file:1", "linger.ms": "3"}
    assert build_router(settings).route("Order") == Route("orders")


def test_a_file_named_but_missing(monkeypatch):
    monkeypatch.setenv("OUTBOX_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        load()


def test_a_misspelt_setting_in_the_file_is_refused(tmp_path):
    (tmp_path / "outbox.toml").write_text("create_topic = true\n")
    with pytest.raises(ConfigurationError, match="create_topic"):
        load()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OUTBOX_DELIVERY", "twice", "delivery"),
        ("OUTBOX_DATABASE_URL", "mysql://h/db", "database_url"),
        ("OUTBOX_RELAY__BATCH_SIZE", "0", "batch_size"),
        ("OUTBOX_KAFKA__TRANSACTIONAL_ID", "x", "transactional.id"),
    ],
)
def test_a_bad_value_names_the_setting(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=expected):
        load()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("acks", "1"),
        ("request.required.acks", "0"),
        ("enable.idempotence", "false"),
        ("enable.gapless.guarantee", "false"),
        ("max.in.flight.requests.per.connection", "6"),
        ("partitioner", "random"),
        ("enable.ssl.certificate.verification", "false"),
        ("ssl.endpoint.identification.algorithm", "none"),
        ("delivery.timeout.ms", "15000"),
        ("message.timeout.ms", "0"),
    ],
)
def test_options_that_break_the_promise_are_refused(option, value):
    settings = load(kafka={"bootstrap.servers": "h:1", option: value})
    check = delivery_seconds if "timeout" in option else producer_options
    with pytest.raises(ConfigurationError, match=option.split(".")[0]):
        check(settings)


def test_the_deadline_of_a_batch_is_the_relays_own_and_shorter_than_the_lease():
    settings = load(kafka={"bootstrap.servers": "h:1", "delivery.timeout.ms": "4000"})
    assert delivery_seconds(settings) == 4.0
    assert delivery_seconds(load()) == 10.0
    assert producer_options(settings)["delivery.timeout.ms"] == "0"


def test_at_most_once_can_not_read_the_wal():
    assert load(source="wal", delivery="exactly-once").wal.slot == "outbox_relay"
    with pytest.raises(ConfigurationError, match="at-most-once use polling"):
        load(source="wal", delivery="at-most-once")


@pytest.mark.parametrize(
    ("delivery", "option"),
    [
        ("exactly-once", "retry.backoff.ms"),
        ("exactly-once", "statistics.interval.ms"),
        ("at-most-once", "acks"),
        ("at-most-once", "enable.idempotence"),
        ("at-most-once", "message.send.max.retries"),
    ],
)
def test_options_that_a_delivery_rests_on_are_its_own(delivery, option):
    settings = load(delivery=delivery, kafka={"bootstrap.servers": "h:1", option: "1"})
    with pytest.raises(ConfigurationError, match=f"{option}.*{delivery}"):
        producer_options(settings)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"delivery": "exactly-once", "relay": {"batch_size": 20_001}}, "batch_size"),
        ({"delivery": "at-most-once", "relay": {"archive_days": 1}}, "archive_days"),
        ({"name": "two words"}, "name"),
        ({"routes": {"Order": {"topic": "o", "on_failure": "drop"}}}, "on_failure"),
        ({"routes": {"Order": {"topc": "o"}}}, "topc"),
        ({"failures": {"max_attempts": 0}}, "max_attempts"),
    ],
)
def test_settings_that_contradict_are_refused(given, named):
    with pytest.raises(ConfigurationError, match=named):
        load(**given)


def test_routes_take_what_failures_says_unless_they_say_it_themselves():
    router = build_router(
        load(
            routes={"Order": "orders", "Stock": {"topic": "stock", "on_failure": "block", "dead_letter_topic": "sd"}},
            failures={"on_failure": "skip", "dead_letter_topic": "dead"},
        )
    )
    assert router.route("Order") == Route("orders", OnFailure.SKIP, "dead")
    assert router.route("Stock") == Route("stock", OnFailure.BLOCK, "sd")
    with pytest.raises(ConfigurationError, match="dead_letter_topic"):
        build_router(load(failures={"dead_letter_topic": "no topic"}))


def test_missing_addresses_say_which_variable():
    with pytest.raises(ConfigurationError, match="OUTBOX_DATABASE_URL"):
        load().require_database()
    with pytest.raises(ConfigurationError, match="OUTBOX_KAFKA__BOOTSTRAP_SERVERS"):
        load().require_kafka()


def test_the_command_line_starts_without_what_only_some_commands_need():
    """A relay is restarted often enough, and it needs no SQLAlchemy."""
    code = (
        "import sys, relay.cli.app; print(*{'sqlalchemy', 'alembic', 'pyspark', 'confluent_kafka'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
