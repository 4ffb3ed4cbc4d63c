"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import without_settings
from typer.main import get_command
from typer.testing import CliRunner

from outbox._app import environment
from outbox._app.choices import OnFailure
from outbox.errors import ConfigurationError
from relay.cli.app import app
from relay.cli.assembly import assemble
from relay.cli.relay import reconciler_settings
from relay.config import Delivery, Settings, delivery_seconds, load, producer_options
from relay.kafka.routing import Route
from relay.parts import build_router

__all__ = ["without_settings"]


def test_environment_names(monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql+psycopg://u:secret@h:5/db")
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "h:9092")
    monkeypatch.setenv("OUTBOX_KAFKA__LINGER_MS", "7")
    monkeypatch.setenv("OUTBOX_DELIVERY", "exactly-once")
    monkeypatch.setenv("OUTBOX_CREATE_TOPICS", "true")
    monkeypatch.setenv("OUTBOX_SCHEMA", "shop")
    monkeypatch.setenv("OUTBOX_RELAY__BATCH_SIZE", "10")
    monkeypatch.setenv("OUTBOX_SPARK__CONF__SPARK_UI_ENABLED", "false")
    settings = load()
    assert settings.database_url == "postgresql://u:secret@h:5/db"
    assert settings.kafka == {"bootstrap.servers": "h:9092", "linger.ms": "7"}
    assert settings.delivery is Delivery.EXACTLY_ONCE
    assert settings.create_topics
    assert settings.db_schema == "shop"
    assert settings.relay.batch_size == 10
    assert settings.relay.lease_seconds == 15.0
    assert settings.spark.conf == {"spark.ui.enabled": "false"}
    assert "secret" not in repr(settings)
    assert producer_options(settings)["linger.ms"] == "7"


@pytest.mark.parametrize(
    "given",
    [
        {"DELIVERY": "at-most-once", "RELAY__AT_MOST_ONCE_ACKS": "0"},
        {"DELIVERY": "at-least-once", "RELAY__BATCH_SIZE": "30000"},
        {"KAFKA__RETRY_BACKOFF_MS": "200", "KAFKA__RETRY_BACKOFF_MAX_MS": "400", "KAFKA__LINGER_MS": "7"},
        {"DELIVERY": "exactly-once"},
    ],
)
def test_operators_may_use_the_settings_of_any_relay(monkeypatch, given):
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "h:9092")
    for name, value in given.items():
        monkeypatch.setenv(f"OUTBOX_{name}", value)
    producer_options(load())
    settings = reconciler_settings("postgresql://h/db")
    assert settings.delivery is Delivery.EXACTLY_ONCE
    options = producer_options(settings)
    assert options["retry.backoff.ms"] == "1000"
    assert options["linger.ms"] == given.get("KAFKA__LINGER_MS", "5")


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


def test_a_misspelt_setting_in_the_file_is_refused(tmp_path):
    (tmp_path / "outbox.toml").write_text("create_topic = true\n")
    with pytest.raises(
        ConfigurationError, match=r"create_topic in outbox\.toml is not a setting: did you mean create_topics\?"
    ):
        load()
    (tmp_path / "outbox.toml").write_text("[relay]\nbatchsize = 1\n")
    with pytest.raises(ConfigurationError, match=r"relay\.batchsize in outbox\.toml .*did you mean batch_size\?"):
        load()


def test_a_file_that_is_missing_or_can_not_be_read(monkeypatch, tmp_path):
    with monkeypatch.context() as named:
        named.setenv("OUTBOX_CONFIG", "nowhere.toml")
        with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
            load()
    for content in (b"schema =", b"\xff"):
        (tmp_path / "outbox.toml").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"outbox\.toml can't be read: "):
            load()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OUTBOX_DELIVERY", "twice", " must be at-most-once, at-least-once or exactly-once; got 'twice'."),
        (
            "OUTBOX_DATABASE_URL",
            "mysql://h/db",
            ": the database URL must start with postgresql://, this one starts with 'mysql'.",
        ),
        ("OUTBOX_CREATE_TOPICS", "maybe", " must be true or false; got 'maybe'."),
        ("OUTBOX_RELAY__BATCH_SIZE", "0", " must be a whole number from 1 to 50000; got '0'."),
        ("OUTBOX_RELAY__LEASE_SECONDS", "soon", " must be a number from 1.0 to 3600; got 'soon'."),
        ("OUTBOX_TOPIC_PARTITIONS", "0", " must be -1, or 1 to 100000; got '0'."),
        ("OUTBOX_TOPIC_PARTITIONS", "1000000", " must be -1, or 1 to 100000; got '1000000'."),
        ("OUTBOX_TOPIC_REPLICATION", "0", " must be -1, or 1 to 10000; got '0'."),
        ("OUTBOX_STATE_REPLICATION", "10001", " must be -1, or 1 to 10000; got '10001'."),
        ("OUTBOX_RELAY__METRICS_ADDRESS", "nope", " must be host:port, such as 0.0.0.0:9100; got 'nope'."),
        ("OUTBOX_SCHEMA", "", " must be text of 1 to 63 characters; got ''."),
        ("OUTBOX_WAL__SLOT", "A", " must be 1 to 63 of the characters a-z, 0-9 and _; got 'A'."),
        ("OUTBOX_WAL__SLOT", "postgresql://u:pw@h", " must be 1 to 63 of the characters a-z, 0-9 and _."),
        ("OUTBOX_KAFKA__TRANSACTIONAL_ID", "x", " is set by the relay itself; remove it."),
        ("OUTBOX_ROUTES", "orders", ' must be a JSON object, such as {"Order": "orders"}'),
        (
            "OUTBOX_ROUTES",
            '{"Order": {"topc": "o", "topic": "o"}}',
            ": Order.topc is not a setting: did you mean topic?",
        ),
        ("OUTBOX_RELAY", '{"batch_size": 0}', ": batch_size must be a whole number from 1 to 50000; got '0'."),
        ("OUTBOX_SPARK__CONF", "x", ' must be a JSON object, such as {"name": "value"}'),
        ("OUTBOX_KAFKA", '{"sasl.password": ["secret"]}', ": sasl.password must be text."),
    ],
)
def test_a_bad_value_names_the_variable_and_what_is_expected(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load()
    assert str(caught.value) == name + expected
    # Their texts quote the input.
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_all_mistakes_are_named_at_once(monkeypatch, tmp_path):
    (tmp_path / "outbox.toml").write_text('schema = ""\n[relay]\nbatch_size = 0\nlease_seconds = 0\n')
    monkeypatch.setenv("OUTBOX_RELAY__LEASE_SECONDS", "x")
    with pytest.raises(ConfigurationError) as caught:
        load(log_format="x")
    assert str(caught.value) == (
        "--log-format must be auto, console or json; got 'x'. "
        "schema in outbox.toml must be text of 1 to 63 characters; got ''. "
        "relay.batch_size in outbox.toml must be a whole number from 1 to 50000; got '0'. "
        "OUTBOX_RELAY__LEASE_SECONDS must be a number from 1.0 to 3600; got 'x'."
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("OUTBOX_DELIVRY", "OUTBOX_DELIVERY"),
        ("OUTBOX_DELIVERY__X", "OUTBOX_DELIVERY"),
        ("OUTBOX_RELAY__BATCHSIZE", "OUTBOX_RELAY__BATCH_SIZE"),
        ("OUTBOX_BATCH_SIZE", "OUTBOX_RELAY__BATCH_SIZE"),
        ("OUTBOX_KAFKA_BOOTSTRAP_SERVERS", "OUTBOX_KAFKA__BOOTSTRAP_SERVERS"),
        ("OUTBOX_KAFKA__SASL__PASSWORD", "OUTBOX_KAFKA__SASL_PASSWORD"),
        ("OUTBOX_DB_SCHEMA", "OUTBOX_SCHEMA"),
        ("OUTBOX_ROUTES__ORDER__TOPIC__X", None),
        ("OUTBOX_KAFKA__", None),
        ("OUTBOX_XYZZY", None),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(monkeypatch, name, near):
    monkeypatch.setenv(name, "tops3cret")
    with pytest.raises(ConfigurationError) as caught:
        load()
    assert str(caught.value).startswith(f"{name} is not a setting: ")
    assert near is None or str(caught.value).endswith(f"did you mean {near}?")
    assert "tops3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["OUTBOX_ROUTES__Order", "OUTBOX_ROUTES__ORDER__TOPIC"])
def test_a_variable_can_not_name_an_aggregate_type(monkeypatch, name):
    """It would be that type in lower case, which no event may have."""
    monkeypatch.setenv(name, "orders")
    with pytest.raises(ConfigurationError) as caught:
        load()
    assert str(caught.value) == (
        f"{name} is not a setting: a variable's name has no lower case, aggregate types may: give "
        """OUTBOX_ROUTES={"Order": "orders"}"""
    )


def test_variables_of_other_parts_and_of_kubernetes_are_not(monkeypatch, tmp_path):
    (tmp_path / "given.toml").touch()
    values = dict.fromkeys(environment.READ_ELSEWHERE, "x") | {
        "OUTBOX_CONFIG": "given.toml",
        "OUTBOX_CONSUMER__KEEP_DAYS": "3",
        "OUTBOX_SPARK_PACKAGES": "g:a:1",
        "OUTBOX_SPARK__CONF__SPARK_UI_ENABLED": "false",
        # The services `outbox` and `outbox-relay`.
        "OUTBOX_SERVICE_HOST": "10.0.0.1",
        "OUTBOX_SERVICE_PORT": "9100",
        "OUTBOX_RELAY_SERVICE_PORT_METRICS": "9100",
        "OUTBOX_RELAY_PORT": "tcp://10.0.0.1:9100",
        "OUTBOX_RELAY_PORT_9100_TCP": "tcp://10.0.0.1:9100",
        "OUTBOX_RELAY_PORT_9100_TCP_PROTO": "tcp",
        "OUTBOX_RELAY_PORT_9100_TCP_PORT": "9100",
        "OUTBOX_RELAY_PORT_9100_TCP_ADDR": "10.0.0.1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert load().consumer.keep_days == 3


PACKAGES = ("outbox", "relay", "spark_jobs")
TEXTS = ("README.md", "docker-compose.yml", "Dockerfile", "Makefile", "docs/**/*.md")


def test_each_variable_that_the_product_or_its_documents_name_is_known(tmp_path):
    (tmp_path / "value").write_text("{}")
    root = Path(__file__).parents[3]
    found: dict[str, str] = {}
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(value, str) and re.fullmatch(r"OUTBOX_[A-Z_]+", value):
                    found[value] = str(file)
    for pattern in TEXTS:
        for file in root.glob(pattern):
            found |= dict.fromkeys(re.findall(r"\bOUTBOX_[A-Z_]*[A-Z]\b", file.read_text()), str(file))
    found.pop("OUTBOX_", None)
    assert {"OUTBOX_PATIENCE", "OUTBOX_DATABASE_URL", "OUTBOX_SANDBOX"} <= found.keys()
    for name, file in found.items():
        try:
            environment.check({name: "value" if name.endswith("_FILE") else "{}"}, Settings)
        except ConfigurationError as error:
            pytest.fail(f"{file}: {error}")


def test_every_pattern_has_words_for_its_error():
    """Nobody should read a regular expression: ``Field(…, pattern=…, description="…")``."""

    def patterns(model, start=""):
        for name, field in model.model_fields.items():
            if any(getattr(constraint, "pattern", None) for constraint in field.metadata):
                yield start + name, field.description
            section = environment.model_of(field) or environment.model_of(environment.values_of(field))
            if section is not None:
                yield from patterns(section, f"{start}{name}.")

    found = dict(patterns(Settings))
    assert "relay.metrics_address" in found
    assert [name for name, words in found.items() if not words] == []


@pytest.mark.parametrize(
    "command",
    ["relay run", "db check", "consume a:b --once", "dead-letters list", "offsets show", "doctor", "sandbox status"],
)
def test_every_command_refuses_what_it_does_not_know(monkeypatch, command):
    monkeypatch.setenv("OUTBOX_DELIVRY", "exactly-once")
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, "did you mean OUTBOX_DELIVERY?" in result.stderr) == (2, True), result.output


def test_a_command_that_is_put_together_alone_refuses_it_too():
    code = "import sys; from relay.cli import main; sys.argv[0] = 'outbox'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "consumers", "groups"],
        env={**os.environ, "OUTBOX_CONSUMER_SCHEMAA": "x", "OUTBOX_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "did you mean OUTBOX_CONSUMER_SCHEMA?" in done.stderr) == (2, True), done.stderr


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
    once = load(delivery="at-most-once", kafka={"bootstrap.servers": "h:1", "message.timeout.ms": "4000"})
    assert producer_options(once)["delivery.timeout.ms"] == "4000"


def test_at_most_once_the_deadline_leaves_half_the_lease_to_send_in():
    assert delivery_seconds(load(delivery="at-most-once")) == 7.5
    for option in ("delivery.timeout.ms", "message.timeout.ms"):
        kafka = {"bootstrap.servers": "h:1", option: "7500"}
        assert delivery_seconds(load(delivery="at-most-once", kafka=kafka)) == 7.5
        for wrong in ("7501", "14900", "0", "x"):
            with pytest.raises(ConfigurationError, match=f"{option}={wrong}.*Set it to 7500 or lower.*LEASE_SECONDS"):
                producer_options(load(delivery="at-most-once", kafka=kafka | {option: wrong}))


def test_the_first_wait_of_an_event_is_not_above_the_longest():
    load(failures={"min_backoff_seconds": 600.0})
    with pytest.raises(ConfigurationError, match=r"min_backoff_seconds must be at most .*600; got 3600"):
        load(failures={"min_backoff_seconds": 3600.0})


def test_at_most_once_can_not_read_the_wal():
    assert load(source="wal", delivery="exactly-once").wal.slot == "outbox_relay"
    with pytest.raises(ConfigurationError, match="must be polling with at-most-once"):
        load(source="wal", delivery="at-most-once")


@pytest.mark.parametrize(
    ("delivery", "option"),
    [
        ("exactly-once", "retry.backoff.ms"),
        ("at-most-once", "acks"),
        ("at-most-once", "enable.idempotence"),
        ("at-most-once", "message.send.max.retries"),
        ("at-least-once", "message.send.max.retries"),
        ("exactly-once", "retries"),
    ],
)
def test_options_that_a_delivery_rests_on_are_its_own(delivery, option):
    settings = load(delivery=delivery, kafka={"bootstrap.servers": "h:1", option: "1"})
    with pytest.raises(ConfigurationError, match=f"{option}.*{delivery}"):
        producer_options(settings)


def test_at_most_once_the_leader_acknowledges_or_no_broker_does():
    def acks(**relay):
        return producer_options(load(delivery="at-most-once", kafka={"bootstrap.servers": "h:1"}, relay=relay))["acks"]

    assert (acks(), acks(at_most_once_acks=1), acks(at_most_once_acks=0)) == ("1", "1", "0")
    for delivery in ("at-least-once", "exactly-once"):
        with pytest.raises(ConfigurationError, match="at_most_once_acks is for at-most-once only: with"):
            load(delivery=delivery, relay={"at_most_once_acks": 1})
    # The option names its setting.
    for option in ("acks", "request.required.acks"):
        given = load(delivery="at-most-once", kafka={"bootstrap.servers": "h:1", option: "0"})
        with pytest.raises(ConfigurationError, match="OUTBOX_RELAY__AT_MOST_ONCE_ACKS"):
            producer_options(given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"delivery": "exactly-once", "relay": {"batch_size": 20_001}}, "batch_size"),
        ({"delivery": "at-most-once", "relay": {"at_most_once_acks": 2}}, "at_most_once_acks"),
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


def test_a_relay_starts_without_the_other_commands():
    """A start costs half a second of processor time; it would be a third more."""
    code = (
        "import sys; from relay.cli.assembly import assemble; assemble(['relay', 'run']); "
        "print(*{n for n in sys.modules if n.startswith(('relay.cli.', 'spark_jobs')) or n == 'rich.console'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {f"relay.cli.{name}" for name in ("assembly", "pauses", "relay", "session")}


def test_the_command_line_is_whole_where_it_is_not_clear_what_is_needed():
    named = set(get_command(app).commands)
    assert named >= {"relay", "db", "doctor", "replay", "consume"}
    for arguments in ([], ["--help"], ["--version"], ["nonsense"]):
        assert set(get_command(assemble(arguments)).commands) == named
    assert all(set(get_command(assemble([name, "--help"])).commands) == {name} for name in named)
