"""The pytest plugin, used as a service's author would use it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import psutil
import psycopg
import pytest
import sqlalchemy as sa
from confluent_kafka import Producer
from proxy import TcpProxy
from support import wait_until

from outbox.sandbox._process import patience
from outbox.testing import fixtures, plugin
from outbox.testing.fixtures import Database, DatabaseServer, RelayFactory, Topics

# Not those of conftest.py: what the test kit has for others is what is tried here.
outbox_postgres, outbox_relay = plugin.outbox_postgres, plugin.outbox_relay

INSERT = (
    "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
    "VALUES (%s, %s, 'OrderPlaced', jsonb_build_object('n', %s::int))"
)


def produce(topics: Topics, topic: str, count: int, **options: object) -> Producer:
    producer = Producer({"bootstrap.servers": topics.bootstrap_servers, "log_level": 0, **options})
    if "transactional.id" in options:
        producer.init_transactions(30)
        producer.begin_transaction()
    for number in range(count):
        producer.produce(topic, str(number).encode(), key=str(number % 7).encode())
    assert producer.flush(30) == 0
    return producer


class TestDatabase:
    names: ClassVar[list[str]] = []

    def test_every_test_has_a_migrated_database_of_its_own(self, outbox_postgres: Database) -> None:
        with outbox_postgres.connect() as connection:
            connection.execute(INSERT, ["Order", "1", 1])
            assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (1,)
            assert connection.execute("SELECT count(*) FROM outbox.lanes").fetchone() == (4,)
            assert connection.execute("SELECT current_database()").fetchone() == (outbox_postgres.name,)
        self.names.append(outbox_postgres.name)

    def test_which_is_gone_in_the_next_one(
        self, outbox_postgres: Database, outbox_postgres_server: DatabaseServer
    ) -> None:
        assert self.names, "runs after the test above"
        with outbox_postgres.engine().connect() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM outbox.events")).scalar() == 0
            found = connection.execute(
                sa.text("SELECT datname FROM pg_database WHERE datname = :name"), {"name": self.names[0]}
            )
            assert found.first() is None
        with psycopg.connect(outbox_postgres_server.url()) as connection:
            assert connection.info.dbname == "postgres"


class TestTopics:
    def test_what_is_open_is_waited_for(self, outbox_kafka: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
        """A commit is answered before its markers are there: whoever reads at once would miss what it committed."""
        topic = outbox_kafka.create_topic(outbox_kafka.name("Order"), partitions=2)
        producer = produce(outbox_kafka, topic, 5, **{"transactional.id": topic})
        with pytest.raises(AssertionError, match=rf"after 0.5 s, {topic}-\d: a transaction is open at offset 0:"):
            outbox_kafka.consume(topic, timeout=0.5 / patience())
        looked, found = threading.Event(), []
        ends = outbox_kafka._ends

        def look(*arguments: Any, **options: Any) -> Any:
            answer = ends(*arguments, **options)
            looked.set()
            return answer

        monkeypatch.setattr(outbox_kafka, "_ends", look)
        reader = threading.Thread(target=lambda: found.extend(outbox_kafka.consume(topic)))
        reader.start()
        assert looked.wait(30)
        producer.commit_transaction(30)
        # Another one, of which the reader need not know.
        producer.begin_transaction()
        producer.produce(topic, b"later", partition=1)
        producer.flush()
        reader.join(60)
        assert len(found) == 5
        producer.abort_transaction(30)

    def test_a_topic_that_never_comes(self, outbox_kafka: Topics) -> None:
        with pytest.raises(AssertionError, match="no such topic"):
            outbox_kafka.consume(outbox_kafka.name("Order"), count=1, timeout=0.5)
        with pytest.raises(AssertionError, match="no such topic"):
            outbox_kafka.await_transactions(outbox_kafka.name("Order"), timeout=0.1)

    def test_its_topics_are_deleted_in_the_end(self, outbox_kafka: Topics) -> None:
        with Topics(outbox_kafka.bootstrap_servers) as other:
            mine = other.create_topic(other.name("a"))
            other.create_topic(f"{other.name('b')}-events")
            yours = outbox_kafka.create_topic(outbox_kafka.name("c"))

        def left() -> set[str]:
            return set(outbox_kafka._admin.list_topics(timeout=30).topics)

        assert mine.endswith(other.token)
        # What has been deleted can be shown for a moment longer.
        wait_until(lambda: not any(other.token in name for name in left()), what="both to be gone")
        assert yours in left()


class TestRelay:
    def test_it_publishes_what_this_test_writes(
        self, outbox_postgres: Database, outbox_kafka: Topics, outbox_relay: RelayFactory
    ) -> None:
        relay = outbox_relay(relay__max_idle_seconds=0.01)
        kind = outbox_kafka.name("Order")
        with outbox_postgres.connect() as connection:
            for number in range(10):
                connection.execute(INSERT, [kind, "4711", number])
        messages = outbox_kafka.consume(f"{kind.lower()}-events", count=10)
        assert [message.key() for message in messages] == [b"4711"] * 10
        assert relay.running
        assert psutil.Process(relay.pid).is_running()

        relay.pause()
        assert psutil.Process(relay.pid).status() == psutil.STATUS_STOPPED
        relay.resume()
        relay.terminate()
        assert relay.wait() == 0
        assert not relay.running

        second = outbox_relay()
        assert second.pid != relay.pid
        second.kill()
        assert second.wait() == -signal.SIGKILL

    def test_settings_and_log(self, outbox_relay: RelayFactory) -> None:
        relay = outbox_relay(delivery="sometimes", database_url="postgresql://nowhere", bootstrap_servers="nowhere:1")
        assert relay.wait() != 0
        assert "OUTBOX_DELIVERY must be" in relay.log()
        with pytest.raises(AssertionError, match=r"(?s)ended without logging 'published'.*must be at-most-once"):
            relay.wait_for_log("published")
        relay.wait_for_log("must be at-most-once")


def test_given_servers_are_used_and_tests_that_would_kill_them_are_skipped(
    outbox_postgres_server: DatabaseServer, outbox_kafka: Topics, tmp_path: Path
) -> None:
    database = "a_given_one"
    given = outbox_postgres_server.create_database(database)
    (tmp_path / "test_inner.py").write_text(
        f"""
from pathlib import Path
import psycopg
import pytest
from outbox import Event, Outbox
from outbox.testing import committed_events

@pytest.fixture(scope="session")
def outbox_migrations():
    def migrate(url):
        with Path("migrated").open("a") as file:
            file.write(url + "\\n")
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE orders (id text PRIMARY KEY)")
    return migrate

def test_given(outbox_postgres, outbox_kafka):
    assert {given!r}.rpartition("/")[0] == outbox_postgres.url.rpartition("/")[0]
    assert outbox_postgres.name != {database!r}
    assert outbox_kafka.bootstrap_servers == {outbox_kafka.bootstrap_servers!r}
    with outbox_postgres.connect() as connection:
        connection.execute("INSERT INTO orders VALUES ('4711')")
        Outbox().add(connection, Event("Order", "4711", "OrderPlaced", {{"n": 1}}))
        connection.commit()
        [event] = committed_events(connection)
        assert event.aggregate_id == "4711"
    outbox_kafka.create_topic(outbox_kafka.name("x"))

def test_another_one(outbox_postgres):
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)
        connection.execute("INSERT INTO orders VALUES ('4711')")

def test_kills_postgres(private_postgres):
    raise AssertionError

def test_kills_kafka(private_kafka):
    raise AssertionError
"""
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)],
        env={
            **os.environ,
            "OUTBOX_TEST_DATABASE_URL": given,
            "OUTBOX_TEST_KAFKA": outbox_kafka.bootstrap_servers,
            # Another system's, as in a shell that is set up for it: no test goes there.
            "OUTBOX_DATABASE_URL": "postgresql://staging.invalid/shop",
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": "staging.invalid:9092",
            # Whatever would start a server of its own fails.
            "OUTBOX_PG_BIN": "/nonexistent",
            "JAVA_HOME": "/nonexistent",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "2 passed, 2 skipped" in result.stdout
    # Of the template: both tests have copies.
    assert len((tmp_path / "migrated").read_text().splitlines()) == 1
    assert "OUTBOX_TEST_DATABASE_URL is set, and this test kills its Postgres" in result.stdout
    assert "OUTBOX_TEST_KAFKA is set, and this test kills its Kafka" in result.stdout
    with psycopg.connect(given) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'outbox_te%'").fetchall()
    # This session's template is there, the inner session's is gone.
    assert len(left) <= 1
    outbox_postgres_server.drop_database(database)


def test_loading_the_plugin_imports_nothing_that_costs(tmp_path: Path) -> None:
    heavy = ["sqlalchemy", "psycopg", "confluent_kafka", "django", "rich", "typer", "jgo", "psutil", "pyspark"]
    heavy += ["stamina"]
    script = f"import sys, outbox.testing.plugin; print(sorted(set({heavy!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_fixtures_without_the_extra_say_which_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import sys\nsys.modules['psutil'] = None\n")
    fixtures = ("outbox_postgres", "outbox_kafka", "outbox_relay", "private_postgres", "private_kafka")
    tests = "".join(f"def test_{name}({name}): ...\n" for name in fixtures)
    (tmp_path / "test_theirs.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "5 errors" in result.stdout
    advice = "MissingExtra: psutil is not installed; run: pip install 'outbox-kafka[sandbox]'"
    assert len(re.findall(rf"^E +outbox\.errors\.{re.escape(advice)}$", result.stdout, re.MULTILINE)) == 5, (
        result.stdout
    )


def test_a_topic_is_created_by_another_client_where_the_first_one_found_no_controller(outbox_kafka, monkeypatch):
    monkeypatch.setattr(fixtures, "_ADMIN_TIMEOUT", 5.0)
    host, port = outbox_kafka.bootstrap_servers.split(":")
    with TcpProxy(host, int(port)) as proxy, Topics(proxy.address) as topics:
        proxy.stop()
        first, name = topics._admin, topics.name("Order")
        creating = threading.Thread(target=topics.create_topic, args=(name, 2))
        creating.start()
        wait_until(lambda: topics.__dict__.get("_admin") is not first, 60, "another client")
        proxy.start()
        creating.join(60)
        assert topics._partitions(name) == [0, 1]
